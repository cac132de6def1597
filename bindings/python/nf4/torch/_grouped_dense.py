"""Computes products of a stack of experts that have no kernel (_operators_grouped.py) with experts
that are dequantized for the call. Also maps rows to experts with torch operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

import nf4
from nf4.torch import _kernels
from nf4.torch._int4_weight import Int4Stack
from nf4.torch._weight import WeightParts

Stack: TypeAlias = WeightParts | Int4Stack


def experts_of(ends: Tensor, m: int) -> Tensor:
    """Returns the expert of each of m rows; the number of experts for a row that belongs to
    none."""
    rows = torch.arange(m, device=ends.device, dtype=torch.int32)
    return torch.searchsorted(ends.cummax(0).values, rows, right=True)


def sums_by(place: Tensor, rows: Tensor, count: int) -> Tensor:
    """Sums the rows of each index below `count`, in binary32 and in a fixed order."""
    sums = torch.zeros(count + 1, rows.shape[1], dtype=torch.float32, device=rows.device)
    place = place.clamp(max=count).long()
    if rows.is_cuda:  # index_add_ uses atomics here
        sums.index_put_((place,), rows.float(), accumulate=True)
    else:
        sums.index_add_(0, place, rows.float())
    return sums[:count].to(rows.dtype)


def _ranges(ends: Tensor, m: int) -> list[tuple[int, int, int]]:
    """Lists (expert, first row, end) for each expert that has rows."""
    found, begin = [], 0
    for expert, given in enumerate(ends.tolist()):
        end = min(m, max(begin, given))
        if end > begin:
            found.append((expert, begin, end))
        begin = end
    return found


def _dense_experts(weight: Stack, dtype: torch.dtype) -> Callable[[int], Tensor]:
    """Returns a function that dequantizes one expert."""
    if isinstance(weight, WeightParts):
        return _kernels.dequantize(weight, dtype).__getitem__
    made = weight.quantized()
    return lambda expert: nf4.dequantize(made.expert(expert), dtype)


def dense_stack(weight: Stack, dtype: torch.dtype) -> Tensor:
    """Dequantizes all experts."""
    if isinstance(weight, WeightParts):
        return _kernels.dequantize(weight, dtype)
    made = weight.quantized()
    dense = torch.empty(weight.spec.shape, dtype=dtype, device=made.packed.device)
    for expert, out in enumerate(dense):
        nf4.dequantize(made.expert(expert), out=out)
    return dense


def dense_products(rows: Tensor, weight: Stack, ends: Tensor, gradient: bool) -> Tensor:
    """Multiplies rows[i] by the transpose of its expert, or in the gradient by the expert itself.
    Rows without an expert give zeros."""
    (_, inner, cols), m = weight.spec.shape, rows.shape[0]
    grouped_mm = getattr(torch.nn.functional, "grouped_mm", None)
    whole_vectors = inner % 8 == 0 and cols % 8 == 0
    if grouped_mm is not None and rows.dtype == torch.bfloat16 and rows.is_cuda and whole_vectors:
        sound = ends.cummax(0).values.clamp(0, m)
        dense = dense_stack(weight, rows.dtype)
        y = grouped_mm(rows.contiguous(), dense if gradient else dense.mT, offs=sound)
        inside = torch.arange(m, device=rows.device) < sound[-1]
        return torch.where(inside[:, None], y, 0)
    expert_of = _dense_experts(weight, rows.dtype)
    y = rows.new_zeros(m, cols if gradient else inner)
    for expert, begin, end in _ranges(ends, m):
        dense = expert_of(expert)
        y[begin:end] = rows[begin:end] @ (dense if gradient else dense.mT)
    return y


def _gathered(x: Tensor, x_index: Tensor) -> Tensor:
    """Gathers rows of x by their indices; an index out of range gives zeros."""
    inside = (x_index >= 0) & (x_index < x.shape[0])
    rows = x.new_zeros(x_index.shape[0], x.shape[1])
    return torch.where(inside[:, None], x[x_index.clamp(0, x.shape[0] - 1)] if len(x) else rows, 0)


def dense_linear(
    x: Tensor, ends: Tensor, x_index: Tensor | None, bias: Tensor | None, weight: Stack
) -> Tensor:
    rows = x if x_index is None else _gathered(x, x_index)
    y = dense_products(rows, weight, ends, gradient=False)
    if bias is None:
        return y
    experts = experts_of(ends, rows.shape[0]).clamp(max=bias.shape[0] - 1)
    return y + bias[experts]
