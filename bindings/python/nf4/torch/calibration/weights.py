"""Quantizes a matrix by what its columns of x were, to the bytes that any reader of the format
takes."""

from __future__ import annotations

import torch
from torch import Tensor

import nf4
from nf4 import _torch
from nf4.checkpoint.bnb import NESTED_BLOCKSIZE
from nf4.checkpoint.int4_layouts import LAYOUTS
from nf4.torch.calibration.layers import Seen
from nf4.torch.calibration.rounding import (
    Codebook,
    Integers,
    largest_scales,
    nested,
    searched_scales,
    with_feedback,
)
from nf4.torch.functional import int4_scales_dtype
from nf4.typing import FormatName, Int4Layout

# docs/design/quality.md compares others. Integers keep the scales of rounding to nearest.
DAMPING, DAMPING_OF_INTEGERS = 0.3, 0.01


def quantize(
    weight: Tensor, seen: Seen, *, format: FormatName, blocksize: int, with_nested: bool
) -> nf4.QuantizedTensor:
    """Like nf4.torch.quantize for "nf4" and "fp4", but scales and codes are those of small error in
    the output. weight: finite, [rows, cols]."""
    grid = Codebook(format, blocksize, weight.device)
    floats = weight.float()
    scales, stored = searched_scales(floats, grid, seen.hessian.diagonal()), None
    if with_nested:
        scales, stored = nested(scales.scale)
    codes, _ = with_feedback(floats, grid, scales, seen.hessian, DAMPING)
    return nf4.QuantizedTensor(
        packed=packed(codes),
        absmax=scales.scale if stored is None else stored.codes,
        nested_absmax=None if stored is None else stored.absmax,
        nested_code=None if stored is None else stored.code,
        nested_offset=None if stored is None else stored.offset,
        format=format,
        blocksize=blocksize,
        nested_blocksize=NESTED_BLOCKSIZE if with_nested else 0,
        shape=tuple(weight.shape),
        dtype=_torch.dtype_name(weight.dtype),
    )


def quantize_int4(
    weight: Tensor, seen: Seen, *, layout: Int4Layout, group_size: int, symmetric: bool
) -> nf4.Int4Tensor:
    """Like nf4.torch.quantize_int4 with the same scales, but the codes are those of small error in
    the output. weight: finite, [rows, cols]."""
    rows, cols = weight.shape
    size = cols if group_size == -1 else group_size
    dtype, to = int4_scales_dtype(None, weight.dtype), LAYOUTS[layout]
    grid, floats = Integers(size, symmetric, dtype), weight.float()
    scales = largest_scales(floats, grid)
    codes, _ = with_feedback(floats, grid, scales, seen.hessian, DAMPING_OF_INTEGERS)
    by_row = scales.scale.view(rows, -1).to(dtype)
    zeros = scales.zero.view(rows, -1).T.byte().cpu().contiguous().numpy()
    stored = None if to.by_row and symmetric else torch.from_numpy(to.stored_zeros(zeros))
    return nf4.Int4Tensor(
        layout=layout,
        shape=(rows, cols),
        group_size=group_size,
        packed=torch.from_numpy(to.packed(codes.cpu().numpy())).to(weight.device),
        scales=by_row if to.by_row else by_row.T.contiguous(),
        zeros=None if stored is None else stored.to(weight.device),
    )


def packed(codes: Tensor) -> Tensor:
    """Two codes a byte, the first one in the high bits."""
    flat = codes.flatten()
    flat = torch.cat([flat, flat.new_zeros(len(flat) % 2)])
    return flat[0::2] << 4 | flat[1::2]
