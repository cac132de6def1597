"""Runs Python programs that need torch. Each is a fork of one process that has imported torch and
other modules that take seconds to import (warm_process.py). A test of what an interpreter does when
it starts, or of what is imported before torch, needs a process of its own. So do all where there is
a GPU: CUDA cannot be used in a fork once an import has asked for GPUs."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_PROGRAM = Path(__file__).with_name("warm_process.py")
_HAS_GPU = Path("/dev/nvidiactl").exists()


@functools.cache
def _process() -> subprocess.Popen[str]:
    """It ends at the end of its standard input."""
    # A number of threads is read when torch is imported.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(_PROGRAM)], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def end() -> None:
    """conftest.py calls it. The CPU seconds of the process then count as those of this one."""
    if _process.cache_info().currsize:
        _process().communicate()


def run(
    program: Path | str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | str = ".",
) -> subprocess.CompletedProcess[str]:
    """What `python program arguments` does, or, of a string, `python -c program arguments`, where
    torch has one thread."""
    is_file = isinstance(program, Path)
    begin = [str(program)] if is_file else ["-c", str(program)]
    argv: Sequence[str] = [begin[0], *map(str, arguments)]
    if _HAS_GPU:
        environment = {**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *begin, *argv[1:]]
        return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        request = {
            "argv": argv,
            "code": None if is_file else program,
            "env": dict(os.environ if env is None else env),
            "cwd": os.path.abspath(cwd),
            "outputs": list(map(str, outputs)),
        }
        process = _process()
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps(request), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{_PROGRAM.name} ended with status {process.wait()}")
        status = int(answer)
        return subprocess.CompletedProcess(argv, status, *(each.read_text() for each in outputs))
