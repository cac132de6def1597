"""y = x W^T + bias + s (x A^T) B^T with a frozen W in 4 bits: one Function for a layer and its
adapter.

    forward    y of the base product, p = s x A^T, y += p B^T in place
    backward   q = s dY B, dX = dY W, dX += q A in place, dA = q^T x, dB = dY^T p

Beside x it keeps p alone, which is [rows of x, rank]. A and B in float32 beside x in 16 bits are
rounded to its dtype, as autocast would; their gradients are float32 and never rounded to 16 bits
on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nf4.torch import _fast, _operators, _private
from nf4.torch._schemas import Parts


class Adapter(NamedTuple):
    """a is [rank, cols], b is [rows, rank], in the dtype of x or in float32."""

    a: Tensor
    b: Tensor
    scale: float


def _scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale left right, in one pass."""
    made = left.new_empty(left.shape[0], right.shape[1])
    return made.addmm_(left, right, beta=0, alpha=scale)


def _product_in(dtype: torch.dtype, left: Tensor, right: Tensor) -> Tensor:
    """left right, in a dtype that may be wider than theirs."""
    if left.dtype == dtype:
        return torch.mm(left, right)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.mm(left, right).to(dtype)


def _add_adapter(y: Tensor, x: Tensor, adapter: Adapter) -> Tensor:
    """Adds s (x A^T) B^T to y, [..., rows], and returns p. All are of one dtype."""
    p = _scaled(x.reshape(-1, x.shape[-1]), adapter.a.t(), adapter.scale)
    y.view(p.shape[0], y.shape[-1]).addmm_(p, adapter.b.t())
    return p


class _Adapted(torch.autograd.Function):
    """`made`: y of the base product, which forward adds to; the weight; and the scale. The weight
    is kept as an attribute, so that no hook of saved tensors moves or copies it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        made: tuple[Tensor, Parts, float],
    ) -> Tensor:
        y, ctx.weight, ctx.scale = made
        narrow = a.to(x.dtype), b.to(x.dtype)
        p = _add_adapter(y, x, Adapter(*narrow, ctx.scale))
        ctx.save_for_backward(x, p, a, b, *narrow)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return *_differentiable(ctx, grad_y), None
        of_x, of_a, of_b, of_bias, _ = ctx.needs_input_grad
        x, p, a, b, narrow_a, narrow_b = ctx.saved_tensors
        grad = grad_y.reshape(-1, grad_y.shape[-1])
        grad_x = grad_a = grad_b = None
        if of_x or of_a:
            q = _scaled(grad, narrow_b, ctx.scale)
        if of_x:
            grad_x = _operators.linear_grad(grad, ctx.weight)
            grad_x = grad_x.addmm_(q, narrow_a).view(x.shape)
        if of_a:
            grad_a = _product_in(a.dtype, q.t(), x.reshape(-1, x.shape[-1]))
        if of_b:
            grad_b = _product_in(b.dtype, grad.t(), p)
        return grad_x, grad_a, grad_b, _operators.grad_of_bias(grad_y) if of_bias else None, None


def _differentiable(ctx: Any, grad_y: Tensor) -> list[Tensor | None]:
    """The gradients, by operators that autograd records, for those who want theirs."""
    x, _, a, b, *_ = ctx.saved_tensors
    *needed, of_bias, _ = ctx.needs_input_grad
    y = _operators.linear(x, None, ctx.weight)
    y = y + ctx.scale * ((x @ a.to(x.dtype).t()) @ b.to(x.dtype).t())
    inputs = [each for each, needs in zip((x, a, b), needed, strict=True) if needs]
    found = iter(torch.autograd.grad(y, inputs, grad_y, create_graph=True) if inputs else ())
    grads = [next(found) if needs else None for needs in needed]
    return [*grads, _operators.grad_of_bias(grad_y) if of_bias else None]


_apply = _private.apply_of(_Adapted)


def linear(x: Tensor, bias: Tensor | None, weight: Parts, adapter: Adapter) -> Tensor | None:
    """The product, with gradients for x, A, B and bias; None if nothing was done, as _fast.linear
    says."""
    y = _fast.linear(x, bias, weight)
    if y is None:
        return None
    a, b, scale = adapter
    if torch.is_grad_enabled() and _private.any_requires_grad(x, a, b, bias):
        return _apply(x, a, b, bias, (y, weight, scale))
    with torch.no_grad():
        _add_adapter(y, x, Adapter(a.to(x.dtype), b.to(x.dtype), scale))
    return y
