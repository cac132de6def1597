"""The report of a GPU: measured on the CPU in place of one, read, refused where it is not one, and
turned into rows."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import sys
from pathlib import Path
from typing import Any

import nf4
import pytest
from conftest import ROOT
from nf4 import _costs
from nf4._load import library
from nf4.checkpoint.errors import FormatError
from nf4.cli import main as nf4_main
from nf4.tuning import api, report

torch = pytest.importorskip("torch")
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "fuzz")]

import gpu_report  # noqa: E402
from changes import Changes  # noqa: E402
from nf4.tuning import bench, bits, figures, summary, tune  # noqa: E402

GPU = nf4.Device(
    0, True, "", "NF4_STATUS_OK", 1, "NVIDIA A100-SXM4-80GB", (8, 0), 108, 1 << 36, 13000, 13000,
    "sm80", 166912, False,
)  # fmt: skip
MOST_FUSED = 16  # rows of x on the GPU that stands in


class CpuTimer:
    """Makes a call, and takes 10 to 16 us for it."""

    def __init__(self) -> None:
        self.count, self.spread = 0, 1.0

    def microseconds(self, calls: Any) -> float:
        calls[0]()
        self.count += 1
        return 10.0 + self.count % 7


class CpuTuner(tune.Tuner):
    """Multiplies on the CPU, which has one kernel: the strategies skinny and multistage."""

    def __init__(self, gpu: nf4.Device, advance: Any) -> None:
        super().__init__(gpu, advance)
        self.device, self.timer = torch.device("cpu"), CpuTimer()

    def warm_up(self) -> None:
        pass

    def _runs(self, product: Any, dtype: str, strategy: str, weights: Any, m: int) -> list[str]:
        row = f"{product.name} {dtype} {strategy} 1 1 0 0 0"
        return [row] if strategy in ("skinny", "multistage") else []

    def is_fused(self, product: Any, dtype: str, weights: Any, m: int, rows: Any) -> bool:
        return m <= (2 * MOST_FUSED if rows else MOST_FUSED)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """Returns a report as `nf4 bench` writes it."""
    small = type("Properties", (), {"L2_cache_size": 1 << 13})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda device: small)
        patch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        patch.setattr(nf4._matmul, "matmul_workspace_bytes", lambda *_, **__: 0)
        patch.setattr(api, "_require_free", lambda device: GPU)
        patch.setattr(bench, "Tuner", CpuTuner)
        patch.setattr(bench, "Timer", CpuTimer)
        patch.setattr(bench, "_COPIED_BYTES", 1 << 10)
        patch.setattr(bench, "_SIZE", 64)
        patch.setattr(bits, "SHAPES", ((32, 64),))
        patch.setattr(tune, "SHAPES", ((128, 128), (128, 256), (256, 128), (256, 256)))
        patch.setattr(tune, "ROWS", (1, 8))
        patch.setattr(tune, "CHECKED_SHAPES", ((128, 384),))
        patch.setattr(tune, "CHECKED_ROWS", (2, 3, 5, 6))
        patch.setattr(tune, "_slower", lambda checks: {"awq"})
        patch.setattr(figures, "SHAPES", ((256, 128),))
        patch.setattr(figures, "ROWS", (1, 16, 17, 33))
        steps: list[str] = []
        document = api.report(advance=steps.append)
        assert len(steps) == api.report_steps()
    return json.loads(json.dumps(document, allow_nan=False))


@pytest.fixture
def file(measured: dict[str, Any], tmp_path: Path) -> Path:
    made = tmp_path / "report.json"
    made.write_text(json.dumps(measured))
    return made


def test_a_report_is_read_as_it_was_written(measured: dict[str, Any], file: Path) -> None:
    assert report.read(file) == measured and report.doubts(measured) == []
    assert measured["gpu"]["name"] == GPU.name and measured["versions"]["libnf4"] == nf4.version()
    assert {each["product"] for each in measured["figures"]} == set(report.PRODUCTS)
    assert {each["strategy"] for each in measured["times"]} == {"skinny", "multistage", "dense"}


def test_names_are_those_of_the_library_and_of_nf4_tune() -> None:
    assert tuple(product.name for product in tune.PRODUCTS) == report.PRODUCTS
    assert {*tune.STRATEGIES, tune.DENSE} == set(report.STRATEGIES)
    assert report.WIDEST_SPREAD == tune.WIDEST_SPREAD


def test_errors_are_those_of_the_results(measured: dict[str, Any]) -> None:
    for each in measured["figures"]:
        assert list(each["errors"]) == list(each["us"])
        for error in each["errors"].values():
            assert 0 < error < report.MOST_ERROR[each["dtype"]]


def test_bits_are_compared_for_every_kind(measured: dict[str, Any]) -> None:
    found = {(each["what"], each["dtype"]): each for each in measured["bits"]}
    for kind in (*bits.FORMATS, *bits.LAYOUTS):
        for dtype in bits.DTYPES:
            each = found[f"dequantize {kind}", dtype]
            assert (each["elements"], each["differing"]) == (32 * 64, 0)
    assert found["quantize nf4", "fp32"]["elements"] > 32 * 64 / 2


def test_bits_that_differ_are_counted() -> None:
    a = torch.tensor([0.0, 1.0, float("nan")])
    assert bits.differing(a, a.clone()) == 0
    assert bits.differing(a, torch.tensor([-0.0, 1.0, 2.0])) == 2
    with pytest.raises(ValueError, match="float16"):
        bits.differing(a, a.half())


@pytest.mark.parametrize("strategy", ["skinny", "dense"])
def test_a_wrong_product_is_doubtful(measured: dict[str, Any], strategy: str) -> None:
    wrong = copy.deepcopy(measured)
    wrong["figures"][0]["errors"][strategy] = 0.5
    wrong["bits"][1]["differing"] = 3
    wrong["spread"] = 2.0
    bad_bits, bad_error, spread = report.doubts(wrong)
    assert "3 of 2048 differ" in bad_bits and f"{strategy} is off by 5.0e-01" in bad_error
    assert "2.00 times as long" in spread
    assert [line for line in summary.lines(wrong) if line.startswith("doubtful")]


def test_a_dense_product_may_have_a_larger_error(measured: dict[str, Any]) -> None:
    made = copy.deepcopy(measured)
    figure = made["figures"][0]
    figure["errors"]["dense"] = 2 * report.MOST_ERROR[figure["dtype"]]
    assert report.doubts(made) == []
    figure["errors"]["skinny"] = figure["errors"]["dense"]
    assert ["skinny" in doubt for doubt in report.doubts(made)] == [True]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_dense_product_may_round_the_sums_of_parts(dtype: str) -> None:
    """The longest sums of a report, rounded as often as by the narrowest tiles of 32 columns."""
    columns, kind = max(map(max, figures.SHAPES)), {"fp16": torch.half, "bf16": torch.bfloat16}
    torch.manual_seed(0)
    x = torch.randn(32, columns, dtype=kind[dtype])
    weight = torch.randn(48, columns) / columns**0.5
    rounded, y = weight.to(x.dtype).float(), torch.zeros(32, 48, dtype=x.dtype)
    for part in torch.arange(columns).split(32):
        y += (x[:, part].float() @ rounded[:, part].T).to(x.dtype)
    exact = x.double() @ weight.double().T
    error = float((y - exact).norm() / exact.norm())
    assert 0.7 * report.MOST_DENSE_ERROR[dtype] < error < 0.9 * report.MOST_DENSE_ERROR[dtype]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_result_that_is_no_number_is_doubtful(value: float, monkeypatch: Any) -> None:
    """JSON cannot hold its error."""
    one = torch.ones(1, 1)
    errors = figures._Errors.__new__(figures._Errors)
    errors._y, errors._rows, errors._exact, errors.of = one * value, [0], one.double(), {}
    errors.add("skinny")
    assert errors.of == {"skinny": report.NO_NUMBER} and report.NO_NUMBER > 1


def test_a_report_without_evidence_is_doubtful(measured: dict[str, Any], file: Path) -> None:
    for name in ("bits", "checks", "figures"):
        made = changed(measured, name, [])
        assert report.doubts(made) == [f"it has no {name}"]
        file.write_text(json.dumps(made))
        assert gpu_report.main([str(file)]) == 1


def test_no_rows_of_one_report_replace_those_of_another(
    measured: dict[str, Any], file: Path, tmp_path: Path, capsys: Any
) -> None:
    second = tmp_path / "second.json"
    second.write_text(json.dumps(changed(measured, "versions/torch", "2.12")))
    assert gpu_report.main([str(file), str(second), "--rows", str(tmp_path)]) == 1
    assert "another of these reports is of the same GPU" in capsys.readouterr().err
    (made,) = tmp_path.glob("*.inc")
    assert "torch 2.12" not in made.read_text()


# ---- What is no report -----------------------------------------------------------------------


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Returns a copy in which the value at a path is another, or is gone (...)."""
    made = copy.deepcopy(document)
    *parents, last = (int(key) if key.isdigit() else key for key in path.split("/"))
    at: Any = made
    for key in parents:
        at = at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return made


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("nf4_report", 2, "its nf4_report is 2; expected 1"),
        ("nf4_report", ..., "its nf4_report is None"),
        ("nf4_report", True, "report.nf4_report is not 1"),
        ("costs", ..., "report has no 'costs'"),
        ("more", 1, "report has 'more', which is not known"),
        ("gpu", [], "report.gpu is not an object"),
        ("gpu/name", "A100 | <img src=x>", "report.gpu.name is not text"),
        ("gpu/name", 'A100"; system("x"); //', "report.gpu.name is not text"),
        ("gpu/name", "NVIDIA A100", "costs are of another GPU"),
        ("gpu/multiprocessors", -1, "report.gpu.multiprocessors is not a count"),
        ("gpu/compute_capability", [8], "report.gpu.compute_capability is not two counts"),
        ("versions/libnf4", "0.0.9", "another version of libnf4"),
        ("versions/bitsandbytes", "a\nb", "report.versions.bitsandbytes is not text or null"),
        ("seconds", 1e300, "report.seconds is not a number"),
        ("spread", "1", "report.spread is not a number"),
        ("figures", {}, "report.figures is not a list"),
        ("figures", [0] * 2001, "report.figures is not a list of up to 2000"),
        ("figures/0/us/dense", 0, "report.figures[0].us.dense is not a number above 0"),
        ("figures/0/us/other", 1, "report.figures[0].us has 'other', which is not known"),
        ("figures/0/fused/after", 1, "report.figures[0].fused.after is not true or false"),
        ("figures/0/m", 1 << 40, "report.figures[0].m is not rows of x"),
        ("figures/0/product", ["codebook"], "report.figures[0].product is not one of"),
        ("times/0/us", [1.0], "times of other products than it names"),
        ("figures/0/errors", {}, "errors of other strategies than those that it times"),
        ("bits/0/what", "`rm -rf`", "report.bits[0].what is not text"),
    ],
)
def test_another_document_is_refused(
    measured: dict[str, Any], tmp_path: Path, path: str, value: Any, reason: str
) -> None:
    made = tmp_path / "bad.json"
    made.write_text(json.dumps(changed(measured, path, value)))
    with pytest.raises(FormatError) as refused:
        report.read(made)
    assert reason in str(refused.value) and str(made) in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"nf4_report": NaN}', "[" * 10**5])
def test_what_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    made = tmp_path / "bad.json"
    made.write_text(text)
    with pytest.raises(FormatError):
        report.read(made)


def test_every_truncated_report_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    for length in random.Random(50).sample(range(len(whole)), 200):
        file.write_bytes(whole[:length])
        with pytest.raises(FormatError):
            report.read(file)


def test_what_is_no_file_or_too_large_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError):
        report.read(tmp_path / "none")
    with pytest.raises(FormatError, match="regular"):
        report.read("/dev/zero")
    file.write_bytes(b" " * (report.MAX_BYTES + 1))
    with pytest.raises(FormatError, match="larger"):
        report.read(file)


def test_any_change_is_refused_or_does_no_harm(file: Path, tmp_path: Path, capsys: Any) -> None:
    """What the tool accepts, it turns into rows that the library accepts."""
    whole, changes = file.read_bytes(), Changes(random.Random(50))
    outcomes = []
    for _ in range(1000):
        file.write_bytes(changes.text(whole))
        outcomes.append(gpu_report.main([str(file), "--rows", str(tmp_path)]))
        for made in tmp_path.glob("*.inc"):
            assert _library_takes(made) == ""
            made.unlink()
    assert set(outcomes) == {0, 1}
    assert "gpu_report: " in capsys.readouterr().err


# ---- Rows ------------------------------------------------------------------------------------


def _library_takes(made: Path) -> str:
    """Returns why the library refuses built-in costs as a text, or ""."""
    lines = [line for line in made.read_text().splitlines() if not line.startswith("//")]
    assert all(line.startswith('"') and line.endswith('\\n"') for line in lines)
    gpu, *rows = (line[1:-3] for line in lines)
    refused = _costs.set_costs(library(), _costs.text_of(gpu, rows, nf4.version()))
    _costs.set_costs(library(), None)
    return refused


def test_a_report_becomes_built_in_costs(file: Path, tmp_path: Path, capsys: Any) -> None:
    assert gpu_report.main([str(file), "--rows", str(tmp_path)]) == 0
    made = tmp_path / "nvidia_a100_sxm4_80gb_sm80.inc"
    assert f"wrote {made}" in capsys.readouterr().out and _library_takes(made) == ""
    text = made.read_text()
    assert text.startswith("// NVIDIA A100-SXM4-80GB: measured by nf4 bench with libnf4 ")
    assert '\n"gpu 80 sm80 108 166912 0 NVIDIA A100-SXM4-80GB\\n"\n"codebook fp16 skinny 1 ' in text
    assert "awq" not in text  # which the costs made slower


def test_a_report_becomes_a_row_of_the_page(file: Path, capsys: Any) -> None:
    assert gpu_report.main([str(file)]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    header = next(
        line for line in (ROOT / "docs" / "gpus.md").read_text().splitlines() if "| GPU |" in line
    )
    assert row.count("|") == header.count("|")
    assert row.startswith("| NVIDIA A100-SXM4-80GB | sm80 | ") and gpu_report.BASIS in row


@pytest.mark.parametrize(
    ("fused", "said"),
    [
        ({1: True, 8: True}, "libnf4"),
        ({1: False, 8: False}, "dense"),
        ({17: True, 64: True, 128: False}, "libnf4 up to 64"),
        ({1: False, 9: True, 16: True}, "libnf4 from 9"),
        ({1: False, 9: True, 16: True, 17: False}, "libnf4 from 9 to 16"),
        ({1: True, 4: False, 9: True, 16: True}, "libnf4 up to 1 and from 9"),
        ({}, "not measured"),
    ],
)
def test_numbers_of_rows_are_said_in_words(fused: dict[int, bool], said: str) -> None:
    assert summary.ranges(fused) == said


def test_reports_that_cannot_be_relied_on_are_refused(
    measured: dict[str, Any], file: Path, monkeypatch: Any, capsys: Any
) -> None:
    file.write_text(json.dumps(changed(measured, "spread", 1.5)))
    assert gpu_report.main([str(file)]) == 1
    assert "1.50 times as long" in capsys.readouterr().err
    file.write_text(json.dumps(measured))
    monkeypatch.setattr(nf4, "version", lambda: "9.9.9")
    assert gpu_report.main([str(file), str(file.parent / "none")]) == 1
    said = capsys.readouterr().err
    assert f"it is of libnf4 {measured['versions']['libnf4']}; this is 9.9.9" in said
    assert "No such file" in said


def test_costs_that_the_library_refuses(measured: dict[str, Any], file: Path, capsys: Any) -> None:
    costs = measured["costs"].replace("skinny", "skinnier", 1)
    file.write_text(json.dumps(changed(measured, "costs", costs)))
    assert gpu_report.main([str(file)]) == 1
    assert "its costs are refused: text has" in capsys.readouterr().err


# ---- The command -----------------------------------------------------------------------------


def test_the_command_writes_a_report(
    measured: dict[str, Any], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(api, "report", lambda device, advance: advance("x") or measured)
    path = tmp_path / "report.json"
    assert nf4_main(["bench", str(path), "--quiet"]) == 0
    assert report.read(path) == measured and list(tmp_path.iterdir()) == [path]
    (usual := tmp_path / "usual").touch()
    assert path.stat().st_mode == usual.stat().st_mode  # others may read it, too
    said = capsys.readouterr().out
    assert said.startswith("NVIDIA A100-SXM4-80GB: libnf4 ") and f"written to {path}" in said
    doubtful = changed(measured, "spread", 3.0)
    monkeypatch.setattr(api, "report", lambda device, advance: doubtful)
    assert nf4_main(["bench", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["path"] == str(path)


def test_a_failed_measurement_leaves_what_was_there(tmp_path: Path, monkeypatch: Any) -> None:
    def fail(device: int, advance: Any) -> None:
        raise nf4.Error("no more memory")

    monkeypatch.setattr(api, "report", fail)
    path = tmp_path / "report.json"
    path.write_text("before")
    assert nf4_main(["bench", str(path)]) == 4
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys: Any) -> None:
    assert nf4_main(["bench", str(tmp_path)]) == 4
    assert "it is not a regular file" in capsys.readouterr().err
    assert nf4_main(["bench", str(tmp_path / "none" / "report.json")]) == 4
    assert "No such file" in capsys.readouterr().err
