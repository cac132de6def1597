"""Measures a report of a GPU: costs, figures beside bitsandbytes and a dense weight, bits and
errors."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from nf4 import _paths
from nf4.info import Device, version
from nf4.tuning import bits, figures, report, tune
from nf4.tuning.fit import Times
from nf4.tuning.peers import BITSANDBYTES, Bitsandbytes, own_bitsandbytes
from nf4.tuning.timing import Timer
from nf4.tuning.tune import Advance, Tuner

EXPERTS = (128, 1536, 2048)
_COPIED_BYTES, _SIZE = 1 << 28, 4096


def steps() -> int:
    """Returns how often `advance` is called."""
    return tune.steps() + figures.steps()


def _rates(device: torch.device) -> dict[str, float]:
    """Returns how fast the GPU copies, counting reads and writes, and multiplies in fp16."""
    timer = Timer()
    a, b = (torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    copy = timer.microseconds([partial(b.copy_, a)] * 2)
    x, y = (torch.randn(_SIZE, _SIZE, dtype=torch.float16, device=device) for _ in range(2))
    multiply = timer.microseconds([partial(torch.mm, x, y)] * 2)
    return {
        "copy_gb_per_s": 2 * _COPIED_BYTES / copy / 1e3,
        "matmul_tflops": 2 * _SIZE**3 / multiply / 1e6,
    }


def _experts_rows(device: int) -> int:
    """Returns up to how many mean rows of x an expert libnf4's kernels multiply; 0 for none."""
    experts, rows, cols = EXPERTS
    weight = _paths.typical("nf4")
    weight.rows, weight.cols = experts * rows, cols
    ask = partial(_paths.grouped_is_dense, weight, EXPERTS, "fp16", device=device, gathers=True)
    fused = (n for n in (4096, 1024, 256, 128, 64, 32, 16, 8, 4, 2, 1)
             if not ask(n * experts, x_rows=n * experts))  # fmt: skip
    return next(fused, 0)


def _facts(gpu: Device) -> dict[str, Any]:
    return {
        "name": gpu.name, "compute_capability": list(gpu.compute_capability),
        "kernels": gpu.dequant_variant, "multiprocessors": gpu.multiprocessors,
        "shared_memory_bytes": gpu.shared_memory_bytes, "memory_bytes": gpu.memory_bytes,
        "l2_bytes": torch.cuda.get_device_properties(gpu.index).L2_cache_size,
        "driver_version": gpu.driver_version, "runtime_version": gpu.runtime_version,
    }  # fmt: skip


def _versions(peer: Bitsandbytes | str) -> dict[str, Any]:
    return {
        "libnf4": version(), "python": platform.python_version(), "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "bitsandbytes": None if isinstance(peer, str) else peer.version,
    }  # fmt: skip


def _rounded(value: Any) -> Any:
    """Keeps four digits of the fractions in a document."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _times(times: Times) -> Iterator[dict[str, Any]]:
    for key, of_shapes in times.items():
        yield {**key._asdict(), "shapes": list(of_shapes), "us": list(of_shapes.values())}


def measure(gpu: Device, advance: Advance) -> dict[str, Any]:
    """Returns the report."""
    began, tuner = time.monotonic(), Tuner(gpu, advance)
    with (
        torch.cuda.device(gpu.index),
        torch.no_grad(),
        own_bitsandbytes(tuner.device) as peer,
    ):
        found, times = tune.tuned(tuner)
        present = None if isinstance(peer, str) else peer
        rows = found.costs.splitlines()[2:-1]
        measured = figures.Figures(tuner, rows, present).measured()
        document = {
            "nf4_report": report.VERSION,
            "gpu": _facts(gpu),
            "versions": _versions(peer),
            "missing": {BITSANDBYTES: peer} if isinstance(peer, str) else {},
            "rates": _rates(tuner.device),
            "spread": tuner.timer.spread,
            "experts_rows": _experts_rows(gpu.index),
            "costs": found.costs,
            "bits": bits.compared(tuner.device, present),
            "checks": [dataclasses.asdict(each) for each in found.checks],
            "figures": [dataclasses.asdict(each) for each in measured],
            "times": list(_times(times)),
        }
    return _rounded({**document, "seconds": time.monotonic() - began})
