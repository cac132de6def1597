"""Signals and kill -9 while a checkpoint is written, and the memory that takes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoint_helpers as helpers
import numpy as np
import pytest
from checkpoint_helpers import command, listing, run_cli
from limits import HANG
from nf4.checkpoint import QuantizeOptions, quantize_checkpoint


def _large_model(folder: Path) -> Path:
    """About 24 MB, so that there is time to be interrupted in."""
    tensors = {
        f"model.layers.{n}.proj.weight": helpers.random_weight((512, 1024), seed=n)
        for n in range(12)
    }
    return helpers.write_model(folder, tensors)


def _wait_for_work(process: subprocess.Popen, folder: Path) -> None:
    """Until a temporary with some data is there."""
    while process.poll() is None:
        for temporary in folder.glob(".*.nf4-tmp-*"):
            if any(p.stat().st_size for p in temporary.glob("*.safetensors")):
                return
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_signals_clean_up(number, code, tmp_path):
    source = _large_model(tmp_path / "in")
    destination = helpers.write_model(tmp_path / "out")
    before = helpers.tree(destination)
    for _ in range(20):
        process = subprocess.Popen(
            command("quantize", source, destination, "--force", "--threads", 1),
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        _wait_for_work(process, tmp_path)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=HANG)
        if process.returncode == code:
            break
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr and stderr.count("\n") == 1
    assert listing(tmp_path) == ["in", "out"]
    assert helpers.tree(destination) == before


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_kill_leaves_old_bytes_or_new_bytes(kind, tmp_path):
    """kill -9 at random moments: the destination is old or new in whole, and whatever else is
    there is a temporary by its name. tests/faults/fault_files.py ends a process at each change of a
    file."""
    folder = _large_model(tmp_path / "in")
    source = folder if kind == "directory" else folder / "model.safetensors"
    work = tmp_path / "work"
    work.mkdir()
    destination = work / "out"

    def content() -> object:
        return helpers.tree(destination) if kind == "directory" else destination.read_bytes()

    quantize_checkpoint(str(source), str(destination), QuantizeOptions(format="fp4"))
    old = content()
    started = time.monotonic()
    reference = tmp_path / "reference"
    assert run_cli("quantize", source, reference).returncode == 0
    duration = time.monotonic() - started
    new = helpers.tree(reference) if kind == "directory" else reference.read_bytes()
    assert old != new
    rng = random.Random(4)
    killed = 0
    for _ in range(10):
        process = subprocess.Popen(
            command("quantize", source, destination, "--force"), stdout=subprocess.DEVNULL
        )
        started = time.monotonic()
        try:
            process.wait(rng.uniform(0.3, 1.1) * duration)
            duration = time.monotonic() - started  # the machine has become faster
        except subprocess.TimeoutExpired:
            process.kill()
        killed += process.wait() == -signal.SIGKILL
        assert content() in (old, new)
        assert all(name == "out" or ".nf4-tmp-" in name for name in listing(work))
        if content() == new:
            quantize_checkpoint(
                str(source), str(destination), QuantizeOptions(format="fp4"), replace=True
            )
    assert killed
    assert run_cli("quantize", source, destination, "--force").returncode == 0
    assert content() == new


def test_memory_is_bounded_by_the_largest_tensor(tmp_path):
    """80 MB in tensors of 8 MB, and one dense tensor of 64 MB that is only copied:
    the conversion takes a few tensors' worth of memory."""
    weights = {
        f"model.layers.{n}.proj.weight": helpers.random_weight((2048, 1024), seed=n)
        for n in range(10)
    }
    weights["model.embed_tokens.weight"] = np.ones((16384, 1024), np.float32)
    source = helpers.write_model(tmp_path / "in", weights)
    largest = 2048 * 1024 * 4
    script = (
        "import resource, sys\n"
        "from nf4.checkpoint import *\n"
        "import nf4, numpy\n"
        "nf4.quantize(numpy.ones((64, 64), numpy.float32))\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "start = peak()\n"
        "quantize_checkpoint(sys.argv[1], sys.argv[2], QuantizeOptions())\n"
        "print(peak() - start)\n"
        "dequantize_checkpoint(sys.argv[2], sys.argv[3])\n"
        "print(peak() - start)\n"
    )
    arguments = [sys.executable, "-c", script, source, tmp_path / "q", tmp_path / "back"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert [int(line) < 5 * largest for line in result.stdout.split()] == [True, True], (
        result.stdout
    )
    back = helpers.load_all(tmp_path / "back")["model.embed_tokens.weight"]
    assert back[2] == weights["model.embed_tokens.weight"].tobytes()
