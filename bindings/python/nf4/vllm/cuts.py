"""Cuts weights for tensor parallelism, and joins weights of one layer. No value is quantized again:
a cut weight dequantizes to the same bits.

A cut at the ends of blocks and nested blocks costs nothing. One inside a block makes blocks of half
the size, or less, which repeat its scale. What one inside a nested block makes, NF4Cut of
nf4.torch.distributed says.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

import nf4
from nf4.torch.distributed._cut_weight import cut as cut_at_blocks
from nf4.torch.distributed._cuts_nf4 import flat_scales

SMALLEST_BLOCK = 32  # of the kernels
Ranges = Sequence[tuple[int, int]]


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the ranges, with those that follow each other as one."""
    made: list[tuple[int, int]] = []
    for begin, end in ranges:
        if made and made[-1][1] == begin:
            begin, _ = made.pop()
        made.append((begin, end))
    return made


def cut(weight: nf4.QuantizedTensor, dim: int, ranges: Ranges) -> nf4.QuantizedTensor:
    """Returns the rows (dim 0) or columns (dim 1) in these ranges of a matrix, one after another.
    Raises ValueError where no block fits."""
    if list(ranges) == [(0, weight.shape[dim])]:
        return weight
    scale = weight.shape[1] if dim == 0 else 1
    lengths = itertools.accumulate((end - begin) * scale for begin, end in ranges)
    ends = list(lengths)[: -1 if dim == 0 else None]
    bounds = [*(begin * scale for begin, _ in ranges), *ends, 0 if dim == 0 else weight.shape[1]]
    blocksize = math.gcd(weight.blocksize, *bounds)
    if blocksize < SMALLEST_BLOCK:
        raise ValueError(
            f"{'columns' if dim else 'rows'} {ranges[0][0]} to {ranges[0][1]} of a weight of "
            f"{weight.shape[0]}x{weight.shape[1]} do not begin and end where {SMALLEST_BLOCK} "
            f"values do; choose another tensor parallel size"
        )
    times = weight.blocksize // blocksize
    if times > 1:  # smaller blocks, which repeat a scale
        blocks = -(-math.prod(weight.shape) // blocksize)
        absmax = weight.absmax.view(-1).repeat_interleave(times)[:blocks]
        sizes = {"blocksize": blocksize, "nested_blocksize": weight.nested_blocksize * times}
        weight = dataclasses.replace(weight, absmax=absmax, **sizes)
    return cut_at_blocks(weight, dim, ranges)


def flat(weight: nf4.QuantizedTensor) -> nf4.QuantizedTensor:
    """Returns the weight with fp32 scales."""
    if not weight.nested:
        return weight
    codes = weight.absmax.view(-1)
    scales = weight.nested_absmax.view(-1).repeat_interleave(weight.nested_blocksize)
    parts = flat_scales(codes, scales[: len(codes)], weight.nested_code, weight.nested_offset)
    return dataclasses.replace(weight, nested_blocksize=0, **parts)


def can_join(first: nf4.QuantizedTensor | Tensor, second: nf4.QuantizedTensor | Tensor) -> bool:
    """Tells if the rows of the second can follow those of the first in one weight, in 4 bits or
    dense. Weights that were quantized apart have different offsets of nested scales."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor)
    names = ("format", "blocksize", "nested_blocksize")
    tables = ("codebook", "nested_code", "nested_offset")
    return (
        math.prod(first.shape) % (first.blocksize * max(first.nested_blocksize, 1)) == 0
        and first.shape[-1] == second.shape[-1]
        and all(getattr(first, name) == getattr(second, name) for name in names)
        and all(_same(getattr(first, name), getattr(second, name)) for name in tables)
    )


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def join(weights: Sequence[nf4.QuantizedTensor | Tensor]) -> nf4.QuantizedTensor | Tensor:
    """Returns one matrix with the rows of all. Each of them can_join the next."""
    first = weights[0]
    if isinstance(first, Tensor):
        return torch.cat(weights)
    names = ("packed", "absmax", "nested_absmax")[: 3 if first.nested else 2]
    parts = {name: torch.cat([getattr(w, name).view(-1) for w in weights]) for name in names}
    rows = sum(each.shape[0] for each in weights)
    return dataclasses.replace(first, shape=(rows, first.shape[1]), **parts)
