"""How tests/gpu/run.py runs its steps."""

from __future__ import annotations

import functools
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT

sys.path[:0] = [str(ROOT / "tests" / "gpu")]

import run  # noqa: E402


def test_status_and_output_of_a_step() -> None:
    script = "echo out; echo $NF4_SAYS >&2; exit 3"
    assert run.execute(["sh", "-c", script], NF4_SAYS="err") == (3, "out\nerr\n")


def test_a_step_that_hangs_is_killed_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "STEP_SECONDS", 3)
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    # A pipe is readable, and at its end, once the last process that writes to it is gone.
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        script = 'exec 3>"$HELD"; echo started >&3; sleep 1000 & wait'
        with pytest.raises(subprocess.TimeoutExpired):
            run.execute(["sh", "-c", script], HELD=str(fifo))
        assert os.read(reader, 100) == b"started\n"
        ready, _, _ = select.select([reader], [], [], 60)
        assert ready, "the child of the step lives on"
        assert os.read(reader, 100) == b""
    finally:
        os.close(reader)


def test_steps_run_side_by_side() -> None:
    # Each waits for the other.
    meeting = threading.Barrier(2, timeout=60)

    def meet(name: str) -> dict:
        meeting.wait()
        return {"of": name}

    steps = {name: functools.partial(meet, name) for name in ("late", "early")}
    results = run.at_once(steps)
    assert list(results) == ["late", "early"]
    assert {name: result["of"] for name, result in results.items()} == {
        "late": "late",
        "early": "early",
    }


def test_the_first_step_that_fails_ends_the_others() -> None:
    def fails() -> dict:
        raise run.Failure("broken")

    def hangs() -> dict:
        run.execute(["sleep", "1000"])
        return {}

    began = time.monotonic()
    waiting = {f"waiting {i}": hangs for i in range(run.LANES)}  # some of them never begin
    with pytest.raises(run.Failure, match="broken"):
        run.at_once({"hangs": hangs, "fails": fails, **waiting})
    assert time.monotonic() - began < run.STEP_SECONDS / 2


@pytest.mark.interop
def test_every_program_of_the_bench_is_in_the_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from nf4bench import check, library, programs

    asked = []

    def measured(options):
        asked.append((options.mode, options.iterations, options.build))
        return {"of": options.mode}

    monkeypatch.setattr(programs, "run", measured)
    assert run.figures(tmp_path) == {
        "bench": {"of": ""},
        "challenge": {"of": "challenge"},
        "call": {"of": "call"},
        "matmul": {"of": "matmul"},
        "models": {"of": "models"},
    }
    assert asked == [
        ("", None, tmp_path), ("challenge", 200, tmp_path), ("call", None, tmp_path),
        ("matmul", None, tmp_path), ("models", None, tmp_path),
    ]  # fmt: skip

    for error in (check.WrongResult("triton: 3 of 9"), library.LibraryMissing("no such file")):

        def fails(options, error=error):
            raise error

        monkeypatch.setattr(programs, "run", fails)
        with pytest.raises(run.Failure, match=f"the bench: {error}"):
            run.figures(tmp_path)
