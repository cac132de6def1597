"""Makes golden.npz: tensors quantized by bitsandbytes, and what it dequantizes them to.

    python tests/golden/make_golden.py      # needs bitsandbytes 0.50.2 and torch

The oracle is bitsandbytes' default backend, which is pure PyTorch. Its CPU backend is not:
the AVX-512 path of that is wrong where a row is not a multiple of the blocksize, and its
scalar path rounds NaN and ties in another way. So it is kept from registering.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import types
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # eager: no compiler that could contract or reorder
_CPU_BACKEND = types.ModuleType("bitsandbytes.backends.cpu")
_CPU_BACKEND.ops = types.ModuleType("bitsandbytes.backends.cpu.ops")
sys.modules[_CPU_BACKEND.__name__] = _CPU_BACKEND
sys.modules[_CPU_BACKEND.ops.__name__] = _CPU_BACKEND.ops

import bitsandbytes  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from bitsandbytes import functional as bnb  # noqa: E402

VERSION = "0.50.2"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Whole blocks; a partial last block; an odd count; more than one nested block of 256 scales.
SHAPES = {
    32: [(8, 64), (5, 37), (33, 33)],
    64: [(8, 64), (7, 33), (129, 129)],
    128: [(4, 128), (3, 55)],
    256: [(4, 128), (9, 31)],
    512: [(8, 128), (3, 201)],
    1024: [(4, 256), (5, 217)],
    2048: [(4, 512), (7, 331)],
    4096: [(4, 1024), (3, 1501)],
}


def cases() -> list[tuple[str, bool, int, tuple[int, int], str]]:
    """(format, nested, blocksize, shape, dtype of the source); the dtypes in turn."""
    dtypes = itertools.cycle(DTYPES)
    return [
        (quant_type, nested, blocksize, shape, next(dtypes))
        for quant_type, nested, blocksize in itertools.product(
            ("nf4", "fp4"), (False, True), SHAPES
        )
        for shape in SHAPES[blocksize]
    ]


def source(generator: torch.Generator, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Normal weights whose rows differ in size, one block of zeros, zeros of both signs."""
    scales = torch.exp2(torch.randint(-12, 4, (shape[0], 1), generator=generator).float())
    weight = torch.randn(shape, generator=generator) * scales
    weight.view(-1)[:32] = 0.0
    weight.view(-1)[40:42] = torch.tensor([0.0, -0.0])
    return weight.to(dtype)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor as unsigned integers, which numpy keeps as they are."""
    integer = torch.int32 if tensor.element_size() == 4 else torch.int16
    unsigned = np.uint32 if tensor.element_size() == 4 else np.uint16
    return tensor.contiguous().view(integer).numpy().view(unsigned)


def dequantized(packed: torch.Tensor, state: bnb.QuantState) -> dict[str, np.ndarray]:
    """The bits that bitsandbytes gives: in full for the source's dtype, and the SHA-256 for
    each of DTYPES, as one row of bytes each."""
    of_source = state.dtype
    digests = []
    for state.dtype in DTYPES.values():
        result = bits(bnb.dequantize_4bit(packed, state))
        digests.append(np.frombuffer(hashlib.sha256(result.tobytes()).digest(), np.uint8))
        if state.dtype == of_source:
            expected = result
    return {"expected": expected, "sha256": np.stack(digests)}


def golden_case(index: int, case: tuple) -> dict[str, np.ndarray]:
    quant_type, nested, blocksize, shape, dtype = case
    generator = torch.Generator().manual_seed(index)
    weight = source(generator, shape, DTYPES[dtype])
    packed, state = bnb.quantize_4bit(
        weight, blocksize=blocksize, compress_statistics=nested, quant_type=quant_type
    )
    parts = {
        "packed": packed.numpy().reshape(-1),
        "absmax": state.absmax.numpy(),
    } | dequantized(packed, state)
    if nested:
        parts["nested_absmax"] = state.state2.absmax.numpy()
        parts["nested_offset"] = state.offset.numpy()
    name = (
        f"{quant_type}-{'nested' if nested else 'flat'}-{blocksize}-{dtype}-{shape[0]}x{shape[1]}"
    )
    return {f"{name}/{part}": array for part, array in parts.items()}


def tables() -> dict[str, np.ndarray]:
    """What bitsandbytes calls the codes: of the formats, and of the scales."""
    return {
        "tables/nf4": bnb.get_4bit_type("nf4", device="cpu").numpy(),
        "tables/fp4": bnb.get_4bit_type("fp4", device="cpu").numpy(),
        "tables/scale_code": bnb.create_dynamic_map().numpy(),
    }


def main() -> None:
    if bitsandbytes.__version__ != VERSION:
        sys.exit(f"bitsandbytes is {bitsandbytes.__version__}; expected {VERSION}")
    arrays = tables()
    for index, case in enumerate(cases()):
        arrays |= golden_case(index, case)
    path = Path(__file__).with_name("golden.npz")
    np.savez_compressed(path, **arrays)
    print(f"{path}: {len(cases())} tensors, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
