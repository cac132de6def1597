"""The products of an engine's layers. They need no engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from nf4.torch._operators_grouped import linear_grouped
from nf4.torch._weight import WeightParts


def linear(layer: Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """y = x W^T + bias of a layer whose weights are several, side by side in y."""
    x, specs = x.contiguous(), layer.nf4_specs
    rows = [_rows(layer, i) for i in range(len(specs))]
    biases = [None] * len(specs) if bias is None else list(bias.split(rows))
    step = 1 if None in specs else 3
    outputs = [_columns(layer, x, i, biases[i : i + step]) for i in range(0, len(specs), step)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def _rows(layer: Module, i: int) -> int:
    spec = layer.nf4_specs[i]
    return getattr(layer, f"weight{i or ''}").shape[0] if spec is None else spec[1][0]


def _columns(layer: Module, x: Tensor, first: int, biases: list[Tensor | None]) -> Tensor:
    """The product with up to three weights, in one call."""
    if layer.nf4_specs[first] is None:
        return torch.nn.functional.linear(x, getattr(layer, f"weight{first or ''}"), biases[0])
    arguments: list[Any] = []
    for names, numbers in layer.nf4_specs[first : first + len(biases)]:
        arguments += (None if name is None else getattr(layer, name) for name in names)
        arguments += numbers
    ops = torch.ops.nf4
    operator = (ops._linear, ops._linear_columns2, ops._linear_columns3)[len(biases) - 1]
    return operator(x, *biases, *arguments)


def _stack(layer: Module, described: tuple[Any, Any]) -> WeightParts:
    """The weight of these names of tensors and this Spec. What holds on to the tensors themselves
    would keep those of the time before a reload."""
    names, spec = described
    return WeightParts(*(None if each is None else getattr(layer, each) for each in names), spec)


def experts(
    layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, activate: Callable[..., Tensor]
) -> Tensor:
    """Returns the sum of the outputs of each token's experts, [tokens, hidden], without waiting for
    the device. topk_weights, topk_ids: [tokens, top_k]. activate: [rows, gate and up] to [rows,
    intermediate]."""
    chosen, top_k = topk_ids.reshape(-1), topk_ids.shape[-1]
    w13, w2 = (_stack(layer, each) for each in (layer.nf4_w13, layer.nf4_w2))
    count = w13.spec.shape[0]
    if layer.expert_map is not None:  # of another rank: -1
        chosen = layer.expert_map[chosen.long()]
        chosen = torch.where(chosen < 0, count, chosen)
    chosen, order = chosen.sort(stable=True)
    every = torch.arange(count, dtype=chosen.dtype, device=chosen.device)
    ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
    index, bias = (order // top_k).int(), getattr(layer, "w13_bias", None)
    hidden = activate(linear_grouped(x, ends, index, bias, w13))
    y = linear_grouped(hidden, ends, None, getattr(layer, "w2_bias", None), w2)
    if layer.expert_map is not None:  # rows past the last end are unspecified
        y = y.masked_fill((chosen == count)[:, None], 0)
    y = torch.empty_like(y).index_copy_(0, order, y).view(*topk_ids.shape, y.shape[-1])
    return (y * topk_weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
