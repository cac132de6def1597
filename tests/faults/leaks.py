"""Whether calls from Python leak: the memory of the process stays as it is.

    leaks.py CALLS

Half of them go through the extension module, if there is one, half through ctypes: quantize,
dequantize, matmul, with and without an output, gradients, integers, and wrong calls. After the
first tenth, which fills what Python and the C library keep, the resident memory may grow by a
quarter of a MiB.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import nf4
import numpy as np
from nf4 import _prepared

_MOST_BYTES = 1 << 18


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _calls() -> list[Callable[[], object]]:
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((8, 64)).astype(np.float32)
    x = rng.standard_normal((2, 64)).astype(np.float16)
    weight, integers = nf4.quantize(dense), nf4.quantize_int4(dense, group_size=32)
    out, of_rank = np.empty((2, 8), np.float16), np.ones((2, 4), np.float16)

    def wrong() -> None:
        with contextlib.suppress(nf4.InvalidArgument):
            nf4.quantize(dense, blocksize=33)

    def wrong_output() -> None:
        with contextlib.suppress(nf4.InvalidArgument):
            nf4.matmul(x, weight, out=out[:1])

    return [
        lambda: nf4.quantize(dense),
        lambda: nf4.dequantize(weight),
        lambda: nf4.matmul(x, weight),
        lambda: nf4.matmul(x, weight, out=out),
        lambda: nf4.matmul_grad(out, weight),
        lambda: nf4.lora_grad(x, out, of_rank, of_rank),
        lambda: nf4.matmul(x, integers),
        lambda: nf4.dequantize(integers),
        wrong,
        wrong_output,
    ]


def _growth(calls: int) -> int:
    """Bytes, over so many calls after a tenth of them."""
    each = _calls()
    before = 0
    for number in range(calls):
        if number == calls // 10:
            before = _resident()
        each[number % len(each)]()
    return _resident() - before


def main() -> int:
    calls = int(sys.argv[1])
    status = made = 0
    ways = [None] if _prepared._nf4_fast is None else [_prepared._nf4_fast, None]
    if len(ways) == 1:
        print("skipped: the extension module, which was not built")
    for extension in ways:
        _prepared._nf4_fast = extension
        made += calls // 2
        grown = _growth(calls // 2)
        name = "ctypes" if extension is None else "the extension module"
        print(f"{calls // 2} calls through {name}: {grown} bytes more")
        status |= grown > _MOST_BYTES
    if "NF4_PROOFS" in os.environ:  # for docs/reliability.md
        with open(os.environ["NF4_PROOFS"], "a") as file:
            file.write(f"leaks {made} {int(status)}\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
