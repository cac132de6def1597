"""Kernels of torch.ops.nf4.linear_batch2 and 3 (_schemas.py), for weights that share x, registered
by importing this, and linear_batch, which siblings call. They are as those of linear in
_operators.py, without the fast way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nf4.torch import _fast, _kernels, _private, _schemas
from nf4.torch._operators import (
    AUTOCAST,
    around,
    cast,
    grad_of_bias,
    impl,
    is_differentiated,
    linear_grad,
    require_frozen,
    resolved,
    to_next_transform,
)
from nf4.torch._schemas import BATCHES, Parts
from nf4.torch._weight import WeightParts


def _linear_batch_below(
    x: Tensor, biases: Sequence[Tensor | None], weights: Sequence[Parts]
) -> tuple[Tensor, ...]:
    """Through an operator that compilers see."""
    operators = BATCHES[type(weights[0])][len(weights)]
    if _private.has_transforms():
        arguments = (each for weight in weights for each in weight.arguments())
        return to_next_transform(operators.linear, x, *biases, *arguments)
    for bias, weight in zip(biases, weights, strict=True):
        _schemas.require_operands(x, bias, weight)
    biases = [None if bias is None else bias.contiguous() for bias in biases]
    numbers = (each for weight in weights for each in weight.numbers())
    return operators.graph_linear(x.contiguous(), *biases, *numbers)


class _LinearBatch(_private.Function):
    """_Linear of each weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Sequence[Parts],
        below: Callable[..., tuple[Tensor, ...]],
        *biases: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        for weight in weights:
            require_frozen(weight)
        ctx.kind, ctx.specs = type(weights[0]), [weight.spec for weight in weights]
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(*(part for weight in weights for part in weight.tensors))
        return below(x, biases, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of_x, _, _, *of_biases = ctx.needs_input_grad
        parts, count = ctx.saved_tensors, len(ctx.kind.names)
        grad_x = None
        # In the order in which autograd adds the gradients of single layers.
        for i in reversed(range(len(grads) if of_x else 0)):
            if grads[i] is not None:
                weight = ctx.kind(*parts[i * count : (i + 1) * count], ctx.specs[i])
                grad = linear_grad(grads[i], weight)
                grad_x = grad if grad_x is None else grad_x + grad
        grad_biases = (
            grad_of_bias(grad) if of_bias and grad is not None else None
            for of_bias, grad in zip(of_biases, grads, strict=True)
        )
        return grad_x, None, None, *grad_biases


def _autograd_linear_batch(
    kind: type[Parts], count: int, x: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    make = functools.partial(resolved, kind)
    biases, weights = _schemas.taken_apart(count, make, arguments)
    if not is_differentiated(x, *biases, *(part for weight in weights for part in weight)):
        return _linear_batch_below(x, biases, weights)
    with _private.function_in_transform():
        return _LinearBatch.apply(x, weights, around(_linear_batch_below), *biases)


def _autocast_linear_batch(
    op: Callable[..., Any], count: int, device: str, x: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    biases = [cast(x, bias)[1] for bias in arguments[:count]]
    x, _ = cast(x, None)
    with torch.autocast(device, enabled=False):
        return op(x, *biases, *arguments[count:])


def _implement_batch(kind: type[Parts], count: int, ops: _schemas.BatchOperators) -> None:
    """But for those in C++."""
    taken_apart, kernel = _schemas.taken_apart, _kernels.linear_batch
    # Called in inference mode, in which the kernel for autograd is not.
    below = _linear_batch_below
    impl(ops.linear, lambda x, *a: below(x, *taken_apart(count, kind.of_arguments, a)))
    if not _fast.registered:
        impl(ops.graph_linear, lambda x, *a: kernel(x, *taken_apart(count, kind.of_numbers, a)))
    autograd = functools.partial(_autograd_linear_batch, kind, count)
    _schemas.library.impl(ops.linear, autograd, "Autograd")
    for device, key in AUTOCAST.items():
        autocast = functools.partial(_autocast_linear_batch, ops.linear, count, device)
        _schemas.library.impl(ops.linear, autocast, key)


for _kind, _batches in BATCHES.items():
    for _count, _ops in _batches.items():
        _implement_batch(_kind, _count, _ops)


def _linear_columns(count: int, x: Tensor, *arguments: Any) -> Tensor:
    """The kernel of _linear_columns2 and 3, where C++ has none."""
    taken = _schemas.taken_apart(count, WeightParts.of_numbers, arguments)
    return torch.cat(_kernels.linear_batch(x, *taken), dim=-1)


if not _fast.registered:
    for _count, _operator in _schemas.COLUMNS.items():
        impl(_operator, functools.partial(_linear_columns, _count))


def linear_batch(
    x: Tensor, biases: Sequence[Tensor | None], weights: Sequence[Parts]
) -> tuple[Tensor, ...]:
    """linear of two or three weights that share x: torch.ops.nf4.linear_batch2 or 3."""
    arguments = [each for weight in weights for each in weight.arguments()]
    return BATCHES[type(weights[0])][len(weights)].linear(x, *biases, *arguments)
