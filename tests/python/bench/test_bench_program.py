"""bench/bench.py: what it takes and refuses, runs, writes, and ends with."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import bench_path
import nf4
import pytest
from nf4bench import compare, options, plots
from nf4bench.options import Options

program = importlib.import_module("bench")  # bench_path puts it on the path, and sorts after it

# ---- Options ----------------------------------------------------------------------------


def test_what_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    given = f"--sweep --shapes 1x1,4096x14336 --replays 3 --json {shlex.quote(str(file))}"
    taken = {
        "": Options(),
        given: Options("sweep", shapes=((1, 1), (4096, 14336)), replays=3, json=file),
        "--peers triton,torch": Options(peers=("triton", "torch")),
        "--peers none": Options(peers=()),
        "--challenge --iterations 1": Options("challenge", iterations=1),
        "--matmul-sweep --quick": Options("matmul-sweep", quick=True),
        "--before other --quick": Options("before", quick=True, before=Path("other")),
        f"--report {shlex.quote(str(file))}": Options("report", report=file),
    }
    for arguments, found in taken.items():
        assert options.parse(shlex.split(arguments)) == found, arguments


REFUSED = {
    "--shapes=": "expected ROWSxCOLS",
    "--shapes axb": "expected ROWSxCOLS",
    "--shapes 0x64": "expected ROWSxCOLS",
    "--shapes 64x64,": "expected ROWSxCOLS",
    "--shapes 65536x32768": "of 1 to 2147483647 elements",
    "--peers marlin": "no peer 'marlin'; expected some of bitsandbytes,unsloth,torch,triton",
    "--replays 2": "'2'; expected a number of 3 or more",
    "--replays 1e3": "expected a number of 3",
    "--challenge --iterations 0": "'0'; expected a number of 1 or more",
    "--threads -5": "expected a number of 1",
    "--device tpu": "invalid choice: 'tpu'",
    "--fast": "unrecognized arguments: --fast",
    "--sweep --challenge": "not allowed with",
    "--before other --models": "not allowed with",
    "--before other --replays 5": "--replays means nothing to --before",
    "--before other --device cpu": "--before needs a GPU",
    "--report none/x.json": "--report: there is no folder none",
    "--report x.json --quick": "--quick means nothing to --report",
    "--quick --shapes 64x64": "not allowed with",
    "--challenge --quick": "--quick means nothing to --challenge",
    "--call --shapes 64x64": "--shapes means nothing to --call",
    "--iterations 5": "--iterations means nothing here",
    "--matmul-sweep --peers none": "--peers means nothing to --matmul-sweep",
    "--models --plots .": "--plots means nothing to --models",
    "--int4 --format mxfp4": "--format means nothing to --int4",
    "--matmul --format mxfp4 --shapes 64x64": "--shapes means nothing to --format",
    "--experts --format nf4": "invalid choice: 'nf4'",
    "--training --format nvfp4 --quick": "--quick means nothing to --format",
    "--json no/such/folder/x.json": "there is no folder no/such/folder",
    "--plots no/such/folder": "there is no folder no/such/folder",
    "--device cpu --sweep": "--sweep needs a GPU: no driver",
    "--device cpu --int4 --replays 5": "--replays needs a GPU",
    "--device cpu --peers none": "--peers needs a GPU",
    "--device cpu --replays 5": "--replays needs a GPU",
    "--device gpu --threads 2": "--threads is for the CPU",
    "--device cpu --shapes 64x65": "--shapes: 64x65: bitsandbytes is wrong where 64",
    "--device cpu --threads 100000": "--threads is 100000, and this process may run on ",
}


@pytest.mark.parametrize("arguments, reason", REFUSED.items())
def test_refused_with_the_usage(
    arguments: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bench_path.ROOT)
    with pytest.raises(SystemExit) as exit_of:
        found = options.parse(arguments.split())
        # What only the device makes wrong is refused where the device is settled.
        options.settle(found, "no driver" if found.device == "cpu" else None)
    assert exit_of.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: ./dev bench") and reason.removesuffix(": no driver") in said


def test_the_device_is_settled_by_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert options.settle(Options(), None) == "gpu"
    assert options.settle(Options(), "no driver") == "cpu"
    assert options.settle(Options(device="cpu"), None) == "cpu"
    assert options.settle(Options("int4", threads=1), "no driver") == "cpu"
    refused = [
        (Options(device="gpu"), "no driver", "--device gpu: no driver"),
        (Options("challenge"), "no driver", "--challenge needs a GPU: no driver"),
        (Options(plots=Path(".")), "no driver", "--plots needs a GPU: no driver"),
        (Options(threads=1), None, "--threads is for the CPU"),
    ]
    for found, no_gpu, reason in refused:
        with pytest.raises(SystemExit, match="2"):
            options.settle(found, no_gpu)
        assert reason in capsys.readouterr().err


def test_dev_refuses_before_it_builds() -> None:
    """options.py alone, with no packages: as ./dev calls it before anything is installed."""
    script = "bench/nf4bench/options.py"
    assert script in (bench_path.ROOT / "dev").read_text()
    for arguments, status, said in ((["--shapes", "x"], 2, "expected ROWS"), (["--quick"], 0, "")):
        done = subprocess.run(
            [sys.executable, "-S", script, *arguments], cwd=bench_path.ROOT, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == status and said in done.stderr and not done.stdout


# ---- The program ------------------------------------------------------------------------


def start(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, arguments)])
    return program.main()


@pytest.mark.parametrize("mode, name", [("", "bench"), ("--matmul", "matmul")])
def test_figures_and_plots_are_written_where_asked(
    mode: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    figures, file = bench_path.figures(name), tmp_path / "figures.json"
    monkeypatch.setattr(program, "no_gpu", lambda: None)
    monkeypatch.setattr(program, "on_gpu", lambda options: figures)
    given = ["--quick", "--json", file, "--plots", tmp_path]
    assert start(monkeypatch, *filter(None, [mode]), *given) == 0
    assert json.loads(file.read_text()) == figures and plots.stale(tmp_path, name, figures) == []


@pytest.mark.interop
def test_what_is_wrong_or_missing_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from nf4bench import check, library, modes

    monkeypatch.setattr(program, "no_gpu", lambda: None)
    for error, said in (
        (check.WrongResult("triton: 3 differ"), "wrong result: triton: 3 differ; not timed"),
        (library.LibraryMissing("no such file"), "no such file"),
    ):

        def fails(options, error=error):
            raise error

        monkeypatch.setattr(modes, "run", fails)
        with pytest.raises(SystemExit) as exit_of:
            start(monkeypatch, "--json", tmp_path / "x.json")
        # A string is printed to stderr, and the status is 1.
        assert exit_of.value.code == f"bench: {said}" and list(tmp_path.iterdir()) == []


@pytest.mark.interop
def test_without_a_gpu_the_cpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from nf4bench import cpu

    asked = []
    monkeypatch.setattr(cpu, "run", lambda shapes, threads: asked.append((list(shapes), threads)))
    monkeypatch.setattr(program, "no_gpu", lambda: "no driver")
    assert start(monkeypatch, "--shapes", "64x64,128x64", "--threads", 1) == 0
    assert start(monkeypatch, "--device", "cpu", "--quick") == 0
    processors = len(os.sched_getaffinity(0))
    assert asked == [([(64, 64), (128, 64)], 1), (cpu.SHAPES[:1], processors)]


@pytest.mark.interop
def test_the_figures_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, but for malloc, of which there is no way back."""
    pytest.importorskip("bitsandbytes")
    from nf4bench import cpu, cpu_experts, cpu_layers
    from nf4bench.experts_cases import Model

    monkeypatch.setattr(cpu_experts, "TURNS", 2)
    monkeypatch.setattr(cpu_experts.run, "__defaults__", (print, Model("M", 4, 128, 128, 2)))
    for name, value in (("TURNS", 1), ("PAUSE", 0), ("ROTATED_BYTES", 1)):
        monkeypatch.setattr(cpu_layers, name, value)
    for name, value in (("TURNS", 2), ("PAUSE", 0), ("LONG_MS", 1), ("ROTATED_BYTES", 1)):
        monkeypatch.setattr(cpu, name, value)
    monkeypatch.setattr(cpu, "keep_freed_memory", lambda: None)
    said: list[str] = []
    figures = json.loads(json.dumps(cpu.run([(64, 256)], 1, said.append)))
    assert [(row["work"], row["dtype"], row["nested"]) for row in figures["rows"]] == cpu.CASES
    ms = [m for group in cpu.products((64, 256)) for m in group.ms]
    assert [row["m"] for row in figures["matmul"]] == ms
    layers = len(cpu_layers.DTYPES) * cpu_layers.MS
    assert tuple(row["m"] for row in figures["layers"]) == layers
    experts = figures["experts"]
    assert [row["tokens"] for row in experts] == list(cpu_experts.TOKENS) * 2
    assert all(row["error"] < cpu_layers.MOST_ERROR for row in experts)
    assert len(said) == 1 + len(cpu.CASES) + len(ms) + len(layers) + len(experts)
    for row in figures["rows"]:
        theirs, ours = row["peers"]["bitsandbytes"], row["kept"]["ms"]
        assert theirs["ratio"]["both_kept"] == pytest.approx(theirs["kept"]["ms"] / ours, rel=0.1)
        assert row["of_roofline"] == pytest.approx(row["roofline"]["ms"] / ours, abs=1e-3)
    for row in figures["matmul"]:
        wanted = {"bitsandbytes", "dense"} if row["format"] == "nf4" else {"dense"}
        assert wanted <= row["peers"].keys() and 0 < row["error"] < 4e-3


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(reason: str | None):
        return lambda index: type("Device", (), {"usable": reason is None, "reason": reason})

    monkeypatch.setattr(nf4, "device_info", device("no driver"))
    assert program.no_gpu() == "no driver"
    monkeypatch.setattr(nf4, "device_info", device(None))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert program.no_gpu().startswith("torch is needed on the GPU: ")


def test_a_report_is_that_of_nf4_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modes = importlib.import_module("nf4bench.modes")
    monkeypatch.setattr(modes.api, "write_report", lambda path: {"path": path})
    monkeypatch.setattr(modes.summary, "lines", lambda made: ["a GPU", "41 s"])
    monkeypatch.setattr(modes.reports, "doubts", lambda made: [])
    asked = Options("report", report=tmp_path / "x.json")
    assert modes.run(asked) == {"path": asked.report}
    assert capsys.readouterr().out == "a GPU\n41 s\n"
    monkeypatch.setattr(modes.reports, "doubts", lambda made: ["3 of 4 differ"])
    with pytest.raises(modes.WrongResult, match="3 of 4 differ"):
        modes.run(asked)


@pytest.mark.parametrize("within", [True, False])
def test_a_slower_build_ends_it_with_status_1(
    within: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked, file = [], tmp_path / "x.json"
    monkeypatch.setattr(compare, "main", lambda *given: asked.append(given) or {"products": []})
    monkeypatch.setattr(compare, "within_bounds", lambda figures: within)
    status = start(monkeypatch, "--before", "other", "--quick", "--json", file)
    assert status == (not within) and json.loads(file.read_text()) == {"products": []}
    assert asked == [(Path("other"), program.ROOT, program.ROOT / "build", True)]

    def fails(*given):
        raise compare.Failed("there is no other/build/lib/libnf4.so")

    monkeypatch.setattr(compare, "main", fails)
    with pytest.raises(SystemExit, match="bench: there is no other"):
        start(monkeypatch, "--before", "other")
