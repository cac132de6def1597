"""The bench of two GPUs, without them."""

from __future__ import annotations

import subprocess

import bench_path  # noqa: F401  (the path)
import pytest

torch = pytest.importorskip("torch")
from nf4bench import distributed, modes  # noqa: E402
from nf4bench.errors import LaunchFailed, LibraryMissing  # noqa: E402
from nf4bench.options import Options  # noqa: E402

FIGURES = {
    "training": {
        "libnf4": {"us": 1100.0, "error": 0.0, "step_bytes": 2e9, "resident_bytes": 1e9},
        "libnf4, one GPU": {"us": 1000.0, "error": 0.0, "step_bytes": 1e9},
        "bitsandbytes": {"us": 2200.0, "error": 0.04, "step_bytes": 2e9},
    },
    "decode": {"libnf4": {"us": 60.0}, "libnf4, one GPU": {"us": 100.0}},
}


def test_a_line_for_each_form() -> None:
    lines = [distributed.TABLE.line(row) for row in distributed.rows(FIGURES)]
    assert lines[0].startswith(
        "training, libnf4, 1100 µs, 1.10x over one GPU, 0.50x over bitsandbytes, 0.00000 error, "
        "1.00 GB of weights a rank, 2.00 GB a step beyond"
    )
    assert lines[3] == "decode, libnf4, 60 µs, 0.60x over one GPU"
    assert len(lines) == 5


def test_one_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LibraryMissing, match="1 GPUs; --distributed needs 2"):
        modes.run(Options("distributed"), print)


def test_a_process_that_fails_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(distributed.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(LaunchFailed, match="a process of torchrun failed"):
        modes.run(Options("distributed"), print)
