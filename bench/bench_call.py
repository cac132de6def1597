"""Host overhead of one call from Python, without a GPU: what the binding costs beside what it is
made of.

    python bench/bench_call.py        # needs torch and a C compiler

The library is tests/python/fake_nf4.c, whose functions return at once. Torch tensors are in host
memory; raw addresses pass for device memory. Prints nanoseconds, the least of some repetitions.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SHAPE = (4096, 1024)
CALLS, REPETITIONS = 50_000, 9
STREAM, OUT = 0x7F00_1234_5678, 1 << 41
PARTS = ("packed", "absmax", "nested_absmax", "nested_code", "nested_offset")


def fake_library(directory: str) -> str:
    """The path of fake_nf4.c, compiled."""
    path, source = f"{directory}/libnf4.so", ROOT / "tests" / "python" / "fake_nf4.c"
    command = ["cc", "-O2", "-shared", "-fPIC", f"-I{ROOT / 'include'}", str(source), "-o", path]
    subprocess.run(command, check=True)
    return path


def calls() -> dict[str, Callable[[], object]]:
    """The calls to time, by name."""
    import nf4
    import torch
    from nf4 import _abi
    from nf4._load import library

    sizes, layout = nf4.sizes(SHAPE), {"nested_blocksize": 256, "shape": SHAPE, "dtype": "bf16"}
    counts = (sizes.packed_bytes, sizes.blocks, sizes.nested_blocks, 256, 1)
    dtypes = (torch.uint8, torch.uint8, torch.float32, torch.float32, torch.float32)
    tensors = [torch.zeros(n, dtype=dtype) for n, dtype in zip(counts, dtypes, strict=True)]

    def of(parts: Iterable[object]) -> nf4.QuantizedTensor:
        return nf4.QuantizedTensor(**dict(zip(PARTS, parts, strict=True)), **layout)

    weight, raw = of(tensors), of((1 << 40) + 4096 * i for i in range(len(PARTS)))
    on_host = of(part.numpy() for part in tensors)
    out, array = torch.empty(SHAPE, dtype=torch.bfloat16), np.empty(SHAPE, np.uint16)
    x, y = (torch.empty((1, each), dtype=torch.bfloat16) for each in SHAPE[::-1])
    descriptor = ctypes.c_void_p(ctypes.addressof(_abi.Tensor()))
    launch = library().nf4_dequant_launch
    return {
        "dequantize: tensors, out": lambda: nf4.dequantize(weight, out=out),
        "dequantize: tensors, new": lambda: nf4.dequantize(weight),
        "dequantize: addresses, out, stream": lambda: nf4.dequantize(raw, out=OUT, stream=STREAM),
        "dequantize: numpy, out": lambda: nf4.dequantize(on_host, "bf16", out=array.ctypes.data),
        "matmul: tensors, out": lambda: nf4.matmul(x, weight, out=y),
        "matmul: tensors, new": lambda: nf4.matmul(x, weight),
        "an empty function": lambda: None,
        "tensor.data_ptr()": out.data_ptr,
        "torch.empty": lambda: torch.empty(SHAPE, dtype=torch.bfloat16, device="cpu"),
        "bare ctypes call": lambda: launch(descriptor, OUT, 3, STREAM),
    }


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        os.environ["NF4_LIBRARY"] = fake_library(directory)
        sys.path[:0] = [str(ROOT / "build" / "bindings" / "python")]
        print(f"Python {platform.python_version()}, nanoseconds")
        for name, call in calls().items():
            best = min(timeit.repeat(call, number=CALLS, repeat=REPETITIONS)) / CALLS
            print(f"{name:36} {best * 1e9:8.0f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
