"""What one call from Python costs the host, beside what it is made of.

    python tests/bench/bench_call.py        # needs torch and a C compiler, and no GPU

The library is tests/python/fake_nf4.c, whose launches return at once, so that what is left is the
binding's own. Tensors of the CPU are passed off as device memory: torch answers nf4's questions
about them in the same time. Prints nanoseconds, the least of some repetitions.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (4096, 1024)
CALLS, REPETITIONS = 50_000, 9
STREAM = 0x7F00_1234_5678


def fake_library(directory: str) -> str:
    """The path of fake_nf4.c, compiled."""
    path = f"{directory}/libnf4.so"
    source = ROOT / "tests" / "python" / "fake_nf4.c"
    command = ["cc", "-O2", "-shared", "-fPIC", f"-I{ROOT / 'include'}", str(source), "-o", path]
    subprocess.run(command, check=True)
    return path


def nanoseconds(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=CALLS, repeat=REPETITIONS)) / CALLS * 1e9


def tensors():
    """A weight of torch tensors and an output for it."""
    import nf4
    import torch

    sizes = nf4.sizes(SHAPE)
    weight = nf4.QuantizedTensor(
        packed=torch.zeros(sizes.packed_bytes, dtype=torch.uint8),
        absmax=torch.zeros(sizes.blocks, dtype=torch.uint8),
        nested_absmax=torch.zeros(sizes.nested_blocks),
        nested_code=torch.zeros(256),
        nested_offset=torch.zeros(1),
        nested_blocksize=256,
        shape=SHAPE,
        dtype="bf16",
    )
    return weight, torch.empty(SHAPE, dtype=torch.bfloat16)


def addresses():
    """A weight of addresses."""
    import nf4

    names = ("packed", "absmax", "nested_absmax", "nested_code", "nested_offset")
    parts = {name: (1 << 40) + 4096 * i for i, name in enumerate(names)}
    return nf4.QuantizedTensor(**parts, nested_blocksize=256, shape=SHAPE, dtype="bf16")


def calls(prefix: str) -> dict[str, Callable[[], object]]:
    """The calls to time, by name. Everything is first used here, as device memory."""
    import nf4
    import torch
    from nf4 import _prepared

    locate, _prepared.locate = _prepared.locate, lambda parts: parts[0]._replace(on_device=True)
    (weight, out), raw = tensors(), addresses()
    device = _prepared.prepare(weight).torch
    device.is_cuda, device.current_stream = True, lambda: STREAM
    _prepared.prepare(raw)
    _prepared.locate = locate
    dequantize, matmul = nf4.dequantize, nf4.matmul
    rows, cols = SHAPE
    x, y = (torch.empty((1, each), dtype=torch.bfloat16) for each in (cols, rows))
    return {
        f"{prefix}: tensors, out, stream": lambda: dequantize(weight, out=out, stream=STREAM),
        f"{prefix}: addresses, out, stream": lambda: dequantize(raw, out=1 << 41, stream=STREAM),
        f"{prefix}: matmul, out, stream": lambda: matmul(x, weight, out=y, stream=STREAM),
        f"{prefix}: matmul, new tensor": lambda: matmul(x, weight),
    }


def pieces() -> dict[str, Callable[[], object]]:
    """What a call is made of, and what a caller would pay anyway."""
    import torch
    from nf4 import _abi
    from nf4._load import library

    out = torch.empty(SHAPE, dtype=torch.bfloat16)
    struct = _abi.Tensor()
    descriptor = ctypes.c_void_p(ctypes.addressof(struct))
    launch = library().nf4_dequant_launch
    launch_by_reference = ctypes.CDLL(library()._name).nf4_dequant_launch
    launch_by_reference.argtypes = [ctypes.POINTER(_abi.Tensor), *launch.argtypes[1:]]
    return {
        "an empty function": lambda: None,
        "tensor.data_ptr()": out.data_ptr,
        "torch.empty on the CPU": lambda: torch.empty(SHAPE, dtype=torch.bfloat16, device="cpu"),
        "bare ctypes call": lambda: launch(descriptor, 1 << 41, 3, STREAM),
        "bare ctypes call, byref": lambda: launch_by_reference(
            ctypes.byref(struct), 1 << 41, 3, STREAM
        ),
    }


def host() -> dict[str, Callable[[], object]]:
    """A whole call on host memory: two numpy arrays of few elements."""
    import nf4

    q = nf4.quantize(np.zeros((4, 64), np.float32))
    out = np.empty((4, 64), np.float32)
    return {
        "numpy: out": lambda: nf4.dequantize(q, out=out),
        "numpy: new array": lambda: nf4.dequantize(q),
    }


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        os.environ["NF4_LIBRARY"] = fake_library(directory)
        sys.path[:0] = [str(ROOT / "build" / "bindings" / "python")]
        import torch
        from nf4 import _prepared

        print(f"Python {platform.python_version()}, torch {torch.__version__}, nanoseconds")
        if _prepared._nf4_fast is None:
            print("no extension module: _nf4_fast is not built")
        else:
            report(calls("extension"))
        _prepared._nf4_fast = None
        report(calls("ctypes"))
        report(host())
        report(pieces())
    return 0


def report(timed: dict[str, Callable[[], object]]) -> None:
    for name, call in timed.items():
        print(f"{name:36} {nanoseconds(call):8.0f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
