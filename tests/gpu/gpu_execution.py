"""Runs commands and steps: a command with a time limit, and steps side by side on several GPUs, of
which the first that fails ends the others."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEP_SECONDS = 3600  # a step that takes longer hangs
# Steps side by side on a GPU, besides one of racecheck: most of their time is a processor's, but a
# GPU serves many programs slowly, and where a test has an input come late the host must launch
# within a millisecond.
LANES = 3

# A step is told which GPU is its own, as CUDA_VISIBLE_DEVICES has it. Python's tests and those of
# two GPUs see all.
Step = Callable[[str], dict]


class Failure(Exception):
    """A step did not pass; the message says what to read."""


_running: set[subprocess.Popen] = set()
_ended = threading.Event()  # a step failed: what runs is killed, and what is started


def execute(command: list[str], **environment: str) -> tuple[int, str]:
    """The status of a command and what it printed. One that takes too long, or is
    interrupted, is killed with all that it started."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        _running.add(process)
        try:
            if _ended.is_set():
                os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate(timeout=STEP_SECONDS)
        except subprocess.TimeoutExpired as late:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise Failure(f"{' '.join(command)} took over {STEP_SECONDS} s:\n{output}") from late
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            _running.discard(process)
    return process.returncode, output


def gpus(count: int) -> list[str]:
    """The names of the GPUs that this program sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(index) for index in range(count)]


def step(title: str, work: Callable[[], dict]) -> dict:
    began = time.monotonic()
    print(f"{title} ...", flush=True)
    result = work()
    seconds = round(time.monotonic() - began, 1)
    print(f"{title}: {json.dumps(result)} in {seconds} s", flush=True)
    return {"seconds": seconds} | result


def at_once(
    steps: dict[str, Step], devices: list[str], races: Collection[str] = ()
) -> dict[str, dict]:
    """What the steps return, by name. LANES of them and one of `races` run at a time on each
    device, in the order of `steps`; the first that fails ends the others."""
    results: dict[str, dict] = {}
    racing = collections.deque(name for name in steps if name in races)
    others = collections.deque(name for name in steps if name not in races)

    def run(waiting: collections.deque[str], device: str) -> None:
        while waiting:
            try:
                name = waiting.popleft()
            except IndexError:  # another lane took the last one
                return
            if _ended.is_set():
                raise Failure("another step failed")
            results[name] = step(name, functools.partial(steps[name], device))

    lanes = [(others, device) for device in devices * LANES]
    lanes += [(racing, device) for device in reversed(devices)]
    with concurrent.futures.ThreadPoolExecutor(len(lanes)) as pool:
        futures = [pool.submit(run, *lane) for lane in lanes]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            _ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            raise
    return {name: results[name] for name in steps}
