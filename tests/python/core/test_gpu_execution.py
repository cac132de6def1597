"""How tests/gpu/gpu_execution.py runs steps, side by side on several GPUs."""

from __future__ import annotations

import functools
import itertools
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT
from limits import HANG

sys.path[:0] = [str(ROOT / "tests" / "gpu")]

import gpu_execution as execution  # noqa: E402
import gpu_steps  # noqa: E402
import run  # noqa: E402

ENDLESS = ["sleep", "100000"]


@pytest.fixture(autouse=True)
def fresh_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program of its own, where no step has failed."""
    monkeypatch.setattr(execution, "_ended", threading.Event())


def test_status_and_output_of_a_step() -> None:
    script = "echo out; echo $NF4_SAYS >&2; exit 3"
    assert execution.execute(["sh", "-c", script], NF4_SAYS="err") == (3, "out\nerr\n")


def test_a_step_that_hangs_is_killed_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    # A pipe is readable, and at its end, once the last process that writes to it is gone.
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        script = 'exec 3>"$HELD"; echo started >&3; sleep 100000 & wait'
        started, seconds = b"", 1
        while not started and seconds < HANG:  # a busy machine takes longer to start it
            seconds *= 3
            monkeypatch.setattr(execution, "STEP_SECONDS", seconds)
            with pytest.raises(run.Failure, match=rf"took over {seconds} s"):
                execution.execute(["sh", "-c", script], HELD=str(fifo))
            started = os.read(reader, 100)
        assert started == b"started\n"
        ready, _, _ = select.select([reader], [], [], HANG)
        assert ready, "the child of the step lives on"
        assert os.read(reader, 100) == b""
    finally:
        os.close(reader)


def test_steps_run_side_by_side() -> None:
    # Each waits for the other.
    meeting = threading.Barrier(2, timeout=HANG)

    def meet(name: str, gpu: str) -> dict:
        meeting.wait()
        return {"of": name, "gpu": gpu}

    steps = {name: functools.partial(meet, name) for name in ("late", "early")}
    results = execution.at_once(steps, ["4", "7"])
    assert list(results) == ["late", "early"]
    assert [result["of"] for result in results.values()] == ["late", "early"]
    assert {result["gpu"] for result in results.values()} == {"4", "7"}


def test_gpus_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert execution.gpus(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    assert execution.gpus(2) == ["3", "GPU-5"]


def test_the_first_step_that_fails_ends_the_others() -> None:
    def fails(gpu: str) -> dict:
        raise run.Failure("broken")

    def hangs(gpu: str) -> dict:
        execution.execute(ENDLESS)
        return {}

    began = time.monotonic()
    waiting = {f"waiting {i}": hangs for i in range(execution.LANES)}  # some of them never begin
    with pytest.raises(run.Failure, match="broken"):
        execution.at_once({"hangs": hangs, "fails": fails, **waiting}, ["0"])
    assert time.monotonic() - began < HANG


def test_the_first_file_that_fails_ends_a_step() -> None:
    began, asked, numbers = time.monotonic(), [], itertools.count()

    def of_file(tags: str) -> dict:
        asked.append(tags)
        number = next(numbers)
        if number == 0:
            execution.execute(ENDLESS)
        while not execution._running and number == 1:  # what began after the test would sleep on
            time.sleep(0.01)
        if number > 1:
            execution._ended.wait(60)
        raise run.Failure("broken")

    with pytest.raises(run.Failure, match="broken"):
        execution.at_once({"step": lambda gpu: {"files": len(gpu_steps.by_file(of_file))}}, ["0"])
    assert time.monotonic() - began < HANG
    assert len(asked) <= gpu_steps.FILES_AT_ONCE + 1
    # At the end of the program, which waits for the other file's.
    while execution._running and time.monotonic() - began < HANG:
        time.sleep(0.1)
    assert not execution._running
    assert execution.execute(ENDLESS)[0] == -signal.SIGKILL
