"""Compares bits: what a GPU dequantizes and quantizes with what the CPU does, and bitsandbytes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nf4._dequantize import dequantize
from nf4._formats import SCALE_RULES
from nf4._quantize import quantize
from nf4._quantize_int4 import quantize_int4
from nf4.tuning.peers import Bitsandbytes

SHAPES = ((1024, 4096), (1000, 1088))
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FORMATS: dict[str, dict[str, Any]] = {
    "nf4": {"format": "nf4"},
    "fp4 flat": {"format": "fp4", "nested_blocksize": 0},
    **{format: {"format": format} for format in SCALE_RULES},
}
BITSANDBYTES_FORMATS = ("nf4", "fp4 flat")
LAYOUTS = ("gptq", "awq", "compressed-tensors")
GROUP_SIZE = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def differing(a: Tensor, b: Tensor) -> int:
    """Returns how many elements differ in any bit. Raises ValueError for tensors of different
    shapes or dtypes."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        raise ValueError(f"{tuple(a.shape)} of {a.dtype} and {tuple(b.shape)} of {b.dtype}")
    bits = _INTEGERS[a.element_size()]
    return int((a.contiguous().view(bits) != b.contiguous().view(bits)).sum())


def _parts(weight: Any) -> dict[str, Tensor]:
    every = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
    return {name: part for name, part in every.items() if isinstance(part, Tensor)}


def _quantized(kind: str, dense: Tensor) -> Any:
    if kind in LAYOUTS:
        return quantize_int4(dense, layout=kind, group_size=GROUP_SIZE)
    return quantize(dense, **FORMATS[kind])


def _pairs(
    kind: str, shape: tuple[int, int], device: torch.device, bitsandbytes: Bitsandbytes | None
) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Yields what is compared, its dtype, what the GPU made, and what it must be."""
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(50)) / 8
    here, there = _quantized(kind, dense), _quantized(kind, dense.to(device))
    parts, made = _parts(here), _parts(there)
    for name, part in parts.items():
        yield f"quantize {kind}", "fp32", made[name], part
    moved = dataclasses.replace(here, **{name: part.to(device) for name, part in parts.items()})
    for name, dtype in DTYPES.items():
        found = dequantize(moved, dtype=name)
        yield f"dequantize {kind}", name, found, dequantize(here, dtype=name)
        if bitsandbytes is not None and kind in BITSANDBYTES_FORMATS:
            other = bitsandbytes.dequantized(moved, dtype).view(found.shape)
            yield f"dequantize {kind}, bitsandbytes", name, found, other


def compared(device: torch.device, bitsandbytes: Bitsandbytes | None) -> list[dict[str, Any]]:
    """Returns how many elements differ, for each kind of weight and dtype."""
    counts: dict[tuple[str, str], list[int]] = {}
    for kind, shape in itertools.product((*FORMATS, *LAYOUTS), SHAPES):
        for what, dtype, found, expected in _pairs(kind, shape, device, bitsandbytes):
            count = counts.setdefault((what, dtype), [0, 0])
            count[0] += found.numel()
            count[1] += differing(found.cpu(), expected.cpu())
    names = ("what", "dtype", "elements", "differing")
    return [dict(zip(names, (*key, *count), strict=True)) for key, count in counts.items()]
