"""LoRA adapters of a stack of experts: multiplies rows that are sorted by expert by the A and B of
their experts. x is gathered, which dA needs anyway; no expert is dequantized. Importing this
imports torch._dynamo."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


def _products(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows[i] times weight[expert of i]^T, [experts, out, columns]. Rows past the last end are
    unspecified."""
    grouped_mm = getattr(functional, "grouped_mm", None)
    # For rows, and for the gradient of the result.
    vectors = (rows.shape[1] * rows.element_size(), weight.shape[1] * weight.element_size())
    if grouped_mm is None or any(size % 16 for size in vectors):
        return _one_by_one(rows, weight, ends)
    arguments = rows.contiguous(), weight.contiguous().transpose(1, 2), ends
    if rows.dtype != torch.bfloat16:
        return _uncompiled(grouped_mm, *arguments)
    return grouped_mm(*arguments[:2], offs=ends)


@torch.compiler.disable
def _uncompiled(grouped_mm: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """torch.compile supports grouped_mm only for bfloat16."""
    return grouped_mm(rows, weight, offs=ends)


@torch.compiler.disable
def _one_by_one(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    parts, begin = [], 0
    for expert, end in enumerate(ends.tolist()):
        parts.append(rows[begin:end] @ weight[expert].t())
        begin = end
    return torch.cat([*parts, rows.new_zeros(len(rows) - begin, weight.shape[1])])


class ExpertAdapter(NamedTuple):
    """a is [experts, rank, columns], b is [experts, rows, rank], in any float dtype."""

    a: Tensor
    b: Tensor
    scale: float

    def added(self, y: Tensor, x: Tensor, ends: Tensor, x_index: Tensor | None) -> Tensor:
        """y + scale B A x for the expert of each row of y, in the dtype of y. ends and x_index: as
        for nf4.torch.linear_grouped, also where they are wrong."""
        m = y.shape[0]
        if m == 0 or len(x) == 0:
            return y
        ends = ends.cummax(0).values.clamp(0, m)
        with torch.autocast(y.device.type, enabled=False):
            inside = torch.arange(m, device=y.device) < ends[-1]
            rows = x.to(y.dtype)
            if x_index is not None:
                inside = inside & (x_index >= 0) & (x_index < len(x))
                rows = rows[torch.where(inside, x_index, 0)]
            # Unspecified values of rows outside would otherwise reach the gradients.
            rows = torch.where(inside[:, None], rows, 0)
            a, b = self.a.to(y.dtype), self.b.to(y.dtype)
            wanted = -a.shape[1] % 8  # products of which are faster and need no loop
            a, b = functional.pad(a, (0, 0, 0, wanted)), functional.pad(b, (0, wanted))
            p = torch.where(inside[:, None], _products(rows, a, ends), 0)
            made = torch.where(inside[:, None], _products(p, b, ends), 0)
            return torch.add(y, made, alpha=self.scale)
