"""The bench's plots: what is drawn, and that they say of which figures they are."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_path import bench, matmul, matmul_row, models, models_row, record, row, stamp, timing

if importlib.util.find_spec("matplotlib") is None:
    pytest.skip("matplotlib is not installed", allow_module_level=True)

from matplotlib import pyplot  # noqa: E402
from nf4bench import plots  # noqa: E402

readme_table = importlib.import_module("readme_table")

BOUNDS = {
    "read": {"variant": 0, "bytes": 2_000_000, **timing(1.0)},
    "write": {"variant": 0, "bytes": 8_000_000, **timing(4.0)},
}
TRITON = {"triton": {"variant": 0, **timing(20.0), "ratio": 2.0}}
FIGURES = bench(
    row(**BOUNDS),
    row(8.0, launch="pdl"),
    row(40.0, shape=[4096, 4096], bytes=40_000_000, peers=TRITON),
    row(60.0, shape=[4096, 4096], bytes=80_000_000, dtype="fp32", **BOUNDS),
    row(nested=False),
    row(format="fp4"),
    row(placement="out + 1 element"),
    row(shape=[4097, 4095]),
    row(work="quantize"),
)


@pytest.fixture
def axes():
    figure, axes = pyplot.subplots()
    yield axes
    pyplot.close(figure)


def lines(axes) -> dict[str, list[tuple[float, float]]]:
    return {
        line.get_label(): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }


def test_every_plot_is_written_in_both_formats(tmp_path: Path) -> None:
    written = plots.write(tmp_path, "bench", FIGURES)
    assert sorted(written) == sorted(tmp_path.iterdir()) == sorted(plots.paths(tmp_path, "bench"))
    for path in written:
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert pyplot.imread(path).std() > 0.01
    assert plots.stale(tmp_path, "bench", FIGURES) == []


def test_the_same_figures_make_the_same_bytes(tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    first = {path.name: path.read_bytes() for path in plots.write(tmp_path, "bench", FIGURES)}
    assert first == {path.name: path.read_bytes() for path in plots.write(again, "bench", FIGURES)}


def test_plots_of_other_figures_and_missing_ones_are_stale(tmp_path: Path) -> None:
    plots.write(tmp_path, "bench", FIGURES)
    changed = copy.deepcopy(FIGURES)
    changed["rows"][0]["us"] += 0.001
    assert plots.stale(tmp_path, "bench", changed) == plots.paths(tmp_path, "bench")
    gone = plots.paths(tmp_path, "bench")[1]
    gone.unlink()
    assert plots.stale(tmp_path, "bench", FIGURES) == [gone]


def test_speedup_has_a_bar_for_each_peer_that_was_timed(axes) -> None:
    plots.speedup(axes, FIGURES)
    bars = {group.get_label(): [bar.get_height() for bar in group] for group in axes.containers}
    assert bars == {"bitsandbytes": [2.5], "Triton": [2.0]}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4096×1024", "4096×4096"]


def test_percent_of_the_limit_by_output(axes) -> None:
    plots.of_roofline(axes, FIGURES)
    megabytes = 4096 * 4096 / 1e6
    assert lines(axes) == {
        "bf16, plain": [(megabytes / 2, 90), (megabytes * 2, pytest.approx(22.5))],
        "fp32, plain": [(megabytes * 4, 15)],
        "bf16, PDL": [(megabytes / 2, pytest.approx(112.5))],
    }


def test_the_roofline_is_of_its_own_bytes(axes) -> None:
    plots.roofline(axes, FIGURES)
    found = lines(axes)
    assert found["reads alone"] == [(2, 2000)]
    assert found["writes alone"] == [(8, 2000)]
    assert found["the same bytes"][0] == (10, pytest.approx(10_000 / 9))
    assert found["libnf4, bf16"] == [(10, 1000), (40, 250)]


def test_figures_without_a_row_to_show_make_empty_plots(tmp_path: Path) -> None:
    assert plots.stale(tmp_path, "bench", bench()) == plots.paths(tmp_path, "bench")
    plots.write(tmp_path, "bench", bench())
    assert plots.stale(tmp_path, "bench", bench()) == []


# ---- Matmul -----------------------------------------------------------------------------

PRODUCTS = matmul(
    matmul_row(), matmul_row(9.0, launch="pdl"),
    matmul_row(20.0, m=64, peers={"tinygemm": {"variant": 0, **timing(90.0), "ratio": 4.5}}),
    matmul_row(7.0, shape=[4096, 4096]),
    matmul_row(dtype="fp16", m=2), matmul_row(weights=2, m=4),
)  # fmt: skip


def test_matmul_has_a_panel_for_each_weight_in_bf16() -> None:
    figure, grid = pyplot.subplots(1, 3)
    plots.time_by_rows(list(grid), PRODUCTS)
    large, square, none = grid
    assert large.get_title() == "14336×4096, bf16, nested"
    assert lines(large) == {
        "libnf4": [(1, 10), (64, 20)], "libnf4, PDL": [(1, 9)], "bitsandbytes": [(1, 30)],
        "dense": [(1, 35)], "int4": [(64, 90)], "reading the weight once": [(1, 8), (64, 8)],
    }  # fmt: skip
    assert (large.get_xscale(), large.get_yscale()) == ("log", "log")
    assert lines(square)["libnf4"] == [(1, 7)]
    assert not none.axison
    pyplot.close(figure)


@pytest.mark.parametrize("figures", [PRODUCTS, matmul()])
def test_the_plot_of_matmul_is_written_and_stale_for_others(figures, tmp_path: Path) -> None:
    paths = plots.paths(tmp_path, "matmul")
    assert plots.stale(tmp_path, "matmul", figures) == paths
    assert sorted(plots.write(tmp_path, "matmul", figures)) == sorted(tmp_path.iterdir())
    assert plots.stale(tmp_path, "matmul", figures) == []
    assert plots.stale(tmp_path, "matmul", figures | {"torch": "3"}) == paths


# ---- What the repository shows ----------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a README and figures, in place of this checkout."""
    (tmp_path / "README.md").write_text("a\n<!-- bench:begin -->\n<!-- bench:end -->\nb\n")
    folder = tmp_path / "docs" / "bench"
    folder.mkdir(parents=True)
    (folder / "figures.json").write_text(json.dumps(record(*FIGURES["rows"])))
    places = {
        "ROOT": tmp_path, "README": tmp_path / "README.md", "FOLDER": folder,
        "FIGURES": folder / "figures.json",
    }  # fmt: skip
    monkeypatch.setattr(readme_table.sources, "changed", lambda figures: set())
    for name, place in places.items():
        monkeypatch.setattr(readme_table, name, place)
    return tmp_path


def make(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["readme_table.py", *arguments])
    return readme_table.main()


def test_everything_shown_is_made_from_the_figures_and_checked(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make(monkeypatch, "--check") == 1
    said = capsys.readouterr().out.splitlines()
    left_out, stale = said[:4], said[4:]
    assert left_out == [
        f"there are no figures of {name}, which is left out"
        for name in ("matmul", "matmul-sweep", "models", "sweep")
    ]
    assert len(stale) == 2 + len(plots.paths(checkout, "bench"))
    assert make(monkeypatch) == 0
    assert make(monkeypatch, "--check") == 0
    readme = (checkout / "README.md").read_text()
    assert readme.startswith("a\n<!-- bench:begin -->\nOne GPU of a test") and readme.endswith(
        "b\n"
    )
    document = checkout / "docs" / "bench" / "README.md"
    document.write_text(document.read_text() + "more")
    assert make(monkeypatch, "--check") == 1
    assert "not made from figures.json: docs/bench/README.md" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, figures, title, plotted",
    [
        ("matmul", PRODUCTS, "Matmul", ["docs/bench/matmul.svg"]),
        ("models", models(models_row()), "Whole models", []),
    ],
)
def test_what_came_later_is_shown_where_the_figures_have_it(
    name: str, figures: dict, title: str, plotted: list[str],
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Without its figures all is as it was; with them, README, docs and the plots have them."""
    assert make(monkeypatch) == 0
    shown = [checkout / "README.md", checkout / "docs" / "bench" / "README.md"]
    before = [path.read_text() for path in shown]
    assert title not in before[1]
    place = checkout / "docs" / "bench" / "figures.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {name: stamp(figures)}))
    capsys.readouterr()
    assert make(monkeypatch, "--check") == 1
    said = capsys.readouterr().out
    assert all(path in said for path in plotted) and f"no figures of {name}," not in said
    assert make(monkeypatch) == 0 and make(monkeypatch, "--check") == 0
    for path, text in zip(shown, before, strict=True):
        assert path.name == "README.md" or title in path.read_text()
        # Nothing that was there is gone.
        assert set(text.splitlines()) <= set(path.read_text().splitlines())
