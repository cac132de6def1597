"""Products of a stack of experts with dense ones, made for the length of a call: what has no kernel
(_operators_grouped.py). And rows by expert, as torch counts them."""

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
    """The expert of each of m rows; the number of experts, of one that has none."""
    rows = torch.arange(m, device=ends.device, dtype=torch.int32)
    return torch.searchsorted(ends.cummax(0).values, rows, right=True)


def sums_by(place: Tensor, rows: Tensor, count: int) -> Tensor:
    """The sums of the rows of each place below `count`, in binary32 and a fixed order."""
    sums = torch.zeros(count + 1, rows.shape[1], dtype=torch.float32, device=rows.device)
    place = place.clamp(max=count).long()
    if rows.is_cuda:  # of which index_add_ is atomic
        sums.index_put_((place,), rows.float(), accumulate=True)
    else:
        sums.index_add_(0, place, rows.float())
    return sums[:count].to(rows.dtype)


def _ranges(ends: Tensor, m: int) -> list[tuple[int, int, int]]:
    """(expert, first row, end) of those that have rows."""
    found, begin = [], 0
    for expert, given in enumerate(ends.tolist()):
        end = min(m, max(begin, given))
        if end > begin:
            found.append((expert, begin, end))
        begin = end
    return found


def _dense_experts(weight: Stack, dtype: torch.dtype) -> Callable[[int], Tensor]:
    """Gives an expert's part, dense."""
    if isinstance(weight, WeightParts):
        return _kernels.dequantize(weight, dtype).__getitem__
    made = weight.quantized()
    return lambda expert: nf4.dequantize(made.expert(expert), dtype)


def dense_stack(weight: Stack, dtype: torch.dtype) -> Tensor:
    """Of all experts."""
    if isinstance(weight, WeightParts):
        return _kernels.dequantize(weight, dtype)
    made = weight.quantized()
    dense = torch.empty(weight.spec.shape, dtype=dtype, device=made.packed.device)
    for expert, out in enumerate(dense):
        nf4.dequantize(made.expert(expert), out=out)
    return dense


def dense_products(rows: Tensor, weight: Stack, ends: Tensor, gradient: bool) -> Tensor:
    """rows[i] times the transpose of the expert of i, in the gradient the expert itself; zeros
    where there is none."""
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
    """The rows of x, or zeros, by their numbers."""
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
