"""tests/bench/bench.py: what it runs, writes, and ends with."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import bench_path
import nf4
import pytest
from nf4bench import compare, cpu, plots

program = importlib.import_module("bench")  # bench_path puts it on the path, and sorts after it


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
    return program.main()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list:
    """A GPU that measures nothing: what it was asked for."""
    asked = []

    def figures(options):
        asked.append(options)
        return bench_path.bench(bench_path.row())

    monkeypatch.setattr(program, "no_gpu", lambda: None)
    monkeypatch.setattr(program, "on_gpu", figures)
    return asked


def test_figures_are_written_where_asked(
    gpu: list, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    json_file = tmp_path / "figures.json"
    written = start(monkeypatch, "--quick", "--json", str(json_file), "--plots", str(tmp_path))
    assert written == 0 and gpu[0].quick
    figures = json.loads(json_file.read_text())
    assert figures == bench_path.bench(bench_path.row())
    assert plots.stale(tmp_path, "bench", figures) == []


def test_the_plots_of_matmul_are_its_own(
    gpu: list, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    figures = bench_path.matmul(bench_path.matmul_row())
    monkeypatch.setattr(program, "on_gpu", lambda options: figures)
    assert start(monkeypatch, "--matmul", "--plots", str(tmp_path)) == 0
    assert sorted(tmp_path.iterdir()) == sorted(plots.paths(tmp_path, "matmul"))


@pytest.mark.interop
def test_a_wrong_result_ends_it_with_status_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from nf4bench import check, modes

    def wrong(options):
        raise check.WrongResult("dequantize 64x64 bf16 nested: triton: 3 of 4096 elements differ")

    monkeypatch.setattr(program, "no_gpu", lambda: None)
    monkeypatch.setattr(modes, "run", wrong)
    with pytest.raises(SystemExit) as exit_of:
        start(monkeypatch, "--json", str(tmp_path / "x.json"))
    # A string is printed to stderr, and the status is 1.
    assert exit_of.value.code == (
        "bench: wrong result: dequantize 64x64 bf16 nested: triton: 3 of 4096 elements differ; "
        "not timed"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.interop
def test_a_bench_library_that_is_not_built_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from nf4bench import modes
    from nf4bench.library import LibraryMissing

    def missing(options):
        raise LibraryMissing("cannot open libnf4_bench.so")

    monkeypatch.setattr(program, "no_gpu", lambda: None)
    monkeypatch.setattr(modes, "run", missing)
    with pytest.raises(SystemExit) as exit_of:
        start(monkeypatch, "--build", str(tmp_path))
    assert exit_of.value.code == "bench: cannot open libnf4_bench.so"


def test_without_a_gpu_the_cpu_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def run(shapes, threads):
        asked.append((list(shapes), threads))
        return {
            "cpu_variant": "scalar", "threads": threads, "peers": {"bitsandbytes": "missing: x"},
            "rows": [],
        }  # fmt: skip

    monkeypatch.setattr(cpu, "run", run)
    monkeypatch.setattr(program, "no_gpu", lambda: "no driver")
    figures = tmp_path / "x.json"
    given = ["--shapes", "64x64,128x64", "--threads", "1", "--json", str(figures)]
    assert start(monkeypatch, *given) == 0
    assert start(monkeypatch, "--device", "cpu", "--quick") == 0
    assert start(monkeypatch) == 0
    every = cpu.SHAPES
    processors = len(os.sched_getaffinity(0))
    assert asked == [([(64, 64), (128, 64)], 1), (every[:1], processors), (every, processors)]
    assert json.loads(figures.read_text())["threads"] == 1


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(reason: str | None):
        return lambda index: type("Device", (), {"usable": reason is None, "reason": reason})

    monkeypatch.setattr(nf4, "device_info", device("no driver"))
    assert program.no_gpu() == "no driver"
    monkeypatch.setattr(nf4, "device_info", device(None))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert program.no_gpu().startswith("torch is needed on the GPU: ")


@pytest.mark.parametrize("within", [True, False])
def test_a_slower_build_ends_it_with_status_1(
    within: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    monkeypatch.setattr(compare, "main", lambda *given: asked.append(given) or {"products": []})
    monkeypatch.setattr(compare, "within_bounds", lambda figures: within)
    figures = tmp_path / "x.json"
    status = start(monkeypatch, "--before", "other", "--quick", "--json", str(figures))
    assert status == (0 if within else 1) and json.loads(figures.read_text()) == {"products": []}
    assert asked == [(Path("other"), program.ROOT, program.ROOT / "build", True)]

    def fails(*given):
        raise compare.Failed("there is no other/build/lib/libnf4.so")

    monkeypatch.setattr(compare, "main", fails)
    with pytest.raises(SystemExit, match="bench: there is no other"):
        start(monkeypatch, "--before", "other")
