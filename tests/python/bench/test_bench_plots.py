"""The bench's plots: what is drawn, and that they say of which figures they are."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_path import figures, matmul_row, peer, row

if importlib.util.find_spec("matplotlib") is None:
    pytest.skip("matplotlib is not installed", allow_module_level=True)

from matplotlib import pyplot  # noqa: E402
from matplotlib.text import Text  # noqa: E402
from nf4bench import plots  # noqa: E402

readme_table = importlib.import_module("readme_table")

SQUARE = {"shape": [4096, 4096]}
BENCH = figures(
    "bench", row(), row(8.0, launch="pdl"),
    row(40.0, **SQUARE, bytes=40_000_000, peers={"triton": peer(80.0, 40.0)}),
    row(60.0, **SQUARE, bytes=80_000_000, dtype="fp32"),
    # None of these is drawn.
    row(nested=False), row(format="fp4"), row(placement="out + 1 element"),
    row(shape=[4097, 4095]), row(work="quantize"),
)  # fmt: skip
MATMUL = figures(
    "matmul", matmul_row(), matmul_row(9.0, launch="pdl"),
    matmul_row(20.0, m=64, peers={"tinygemm": peer(90.0, 20.0)}), matmul_row(7.0, **SQUARE),
    matmul_row(dtype="fp16", m=2), matmul_row(weights=2, m=4),
)  # fmt: skip


def experts_row(us: float, tokens: int, **peers: float) -> dict:
    found = {name.replace("_", "-"): {"us": each} for name, each in peers.items()}
    return {"model": "M", "work": "layer", "tokens": tokens, "us": us, "peers": found}


EXPERTS = {
    "device": "GPU",
    "rows": [experts_row(5, 1, dense=20, grouped_nf4_gemm=60), experts_row(9, 8, dense=30)],
}


def lines(axes) -> dict[str, list[tuple[float, float]]]:
    return {
        line.get_label(): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }


def test_what_is_drawn_of_dequantize() -> None:
    figure, bars = pyplot.subplots()
    plots.speedup(bars, BENCH)
    found = {group.get_label(): [bar.get_height() for bar in group] for group in bars.containers}
    assert found == {"bitsandbytes": [2.5], "Triton": [2.0]}
    assert [each.get_text() for each in bars.get_xticklabels()] == ["4096×1024", "4096×4096"]
    pyplot.close(figure)


def test_matmul_has_a_panel_for_each_weight_in_bf16() -> None:
    figure, (large, square, first) = pyplot.subplots(1, 3)
    plots.time_by_rows([large, square], MATMUL)
    plain = {
        "libnf4": [(1, 10), (64, 20)], "bitsandbytes": [(1, 30)],
        "unquantized weight (cuBLAS)": [(1, 35)], "limit: read the weight once": [(1, 8), (64, 8)],
    }  # fmt: skip
    assert lines(large) == plain | {
        "libnf4, early start (PDL)": [(1, 9)], "torch's int4 matmul": [(64, 90)],
    }  # fmt: skip
    assert "14336×4096" in large.get_title() and lines(square)["libnf4"] == [(1, 7)]
    plots.overview(first, MATMUL)
    assert lines(first) == plain and "14336×4096" in first.get_title()
    pyplot.close(figure)


LETTERS = 9  # pixels of the smallest letters' size where a telephone shows a plot 400 pixels wide


@pytest.mark.parametrize("name, made", [("bench", BENCH), ("matmul", MATMUL), ("experts", EXPERTS)])
def test_a_plot_says_what_it_is_and_can_be_read_on_a_telephone(name: str, made: dict) -> None:
    for plot in plots.PLOTS[name].values():
        with pyplot.rc_context(plots.STYLE):
            figure = plots._drawn(pyplot, plot, made)
        figure.canvas.draw()
        assert made["device"] in figure.get_suptitle()
        for axes in figure.axes:
            assert re.search(r"(lower|higher) is better|1: as fast", axes.get_ylabel())
        scale = 400 / figure.get_figwidth() / 72
        texts = [each for each in figure.findobj(Text) if each.get_text()]
        assert min(each.get_fontsize() for each in texts) * scale >= LETTERS
        # And the title and the legend lie inside.
        width, height = figure.canvas.get_width_height()
        for each in (*figure.legends, figure._suptitle):
            box = each.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height
        pyplot.close(figure)


def test_experts_have_a_panel_for_each_work_of_a_model() -> None:
    figure, layer = pyplot.subplots()
    plots.time_by_tokens([layer], EXPERTS)
    assert lines(layer) == {
        "libnf4": [(1, 5), (8, 9)], "unquantized (grouped_mm)": [(1, 20), (8, 30)],
        "grouped-nf4-gemm": [(1, 60)],
    }  # fmt: skip
    assert layer.get_title() == "M, layer"
    pyplot.close(figure)


@pytest.mark.parametrize(
    "name, made",
    [("bench", BENCH), ("matmul", MATMUL), ("experts", EXPERTS), ("bench", BENCH | {"rows": []})],
)
def test_plots_are_written_alike_and_stale_for_other_figures(
    name: str, made: dict, tmp_path: Path
) -> None:
    wanted = plots.paths(tmp_path, name)
    assert plots.stale(tmp_path, name, made) == wanted
    assert plots.write(tmp_path, name, made) == wanted and plots.stale(tmp_path, name, made) == []
    first = {path: path.read_bytes() for path in wanted}
    for path in wanted:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    plots.write(tmp_path, name, made)
    assert first == {path: path.read_bytes() for path in wanted}
    assert plots.stale(tmp_path, name, made | {"torch": "3"}) == wanted
    wanted[0].unlink()
    assert plots.stale(tmp_path, name, made) == wanted[:1]


def test_everything_shown_is_made_from_the_figures_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "docs" / "bench"
    folder.mkdir(parents=True)
    places = {"ROOT": tmp_path, "README": tmp_path / "README.md", "FOLDER": folder}
    for name, place in (places | {"FIGURES": folder / "figures.json"}).items():
        monkeypatch.setattr(readme_table, name, place)
    monkeypatch.setattr(readme_table.sources, "changed", lambda figures: set())

    def make(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["readme_table.py", *arguments])
        return readme_table.main(), capsys.readouterr().out

    (tmp_path / "README.md").write_text("a\n<!-- bench:begin -->\n<!-- bench:end -->\nb\n")
    stamped = {"bench": BENCH, "challenge": figures("challenge"), "call": figures("call")}
    (folder / "figures.json").write_text(json.dumps(stamped))
    status, said = make("--check")
    assert status == 1 and said.count("not made from figures.json") == 2 + 1
    for name in ("matmul", "matmul-sweep", "models", "sweep"):
        assert f"there are no figures of {name}, which is left out" in said
    assert make()[0] == 0 and make("--check")[0] == 0
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("a\n<!-- bench:begin -->\nMeasured on one GPU of a test")
    assert readme.endswith("<!-- bench:end -->\nb\n")
    before = (folder / "README.md").read_text()
    (folder / "figures.json").write_text(json.dumps(stamped | {"matmul": MATMUL}))
    status, said = make("--check")
    assert status == 1 and "not made from figures.json: docs/bench/matmul.svg" in said
    assert make()[0] == 0 and make("--check")[0] == 0
    assert set(before.splitlines()) < set((folder / "README.md").read_text().splitlines())
