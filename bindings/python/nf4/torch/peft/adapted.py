"""One autograd Function for a layer and its adapter: y = x W^T + bias + s (x A^T) B^T, with a
frozen 4-bit W.

    forward    p = x A^T, y = x W^T + bias + s p B^T
    backward   q = dY B, dX = dY W + s q A, dA = s q^T x, dB = s dY^T p

y and dX are one call of libnf4 each if that has a fast kernel (_fast.py), and are rounded once;
else the adapter's part is added in place. On a GPU dA and dB are one call too, and the whole
backward pass is then one C++ call. Only x and p, [rows of x, rank], are kept for it. If x has 16
bits, float32 A and B are rounded to its dtype, as under autocast; their gradients are float32, and
on a GPU never rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nf4.torch import _fast, _kernels, _operators, _private
from nf4.torch._schemas import Parts


class Adapter(NamedTuple):
    """The halves of an adapter. a is [rank, cols], b is [rows, rank], both in the dtype of x or in
    float32."""

    a: Tensor
    b: Tensor
    scale: float

    def narrow(self, dtype: torch.dtype) -> Adapter:
        return Adapter(self.a.to(dtype), self.b.to(dtype), self.scale)


def _grad_of_half(left: Tensor, right: Tensor, scale: float, like: Tensor) -> Tensor:
    """Returns scale left^T right, summed over their rows, in the dtype of `like`, which may be
    wider than theirs."""
    left, right, dtype = _rows(left).t(), _rows(right), like.dtype
    shape = left.shape[0], right.shape[1]
    if left.dtype == dtype:
        return left.new_empty(shape).addmm_(left, right, beta=0, alpha=scale)
    if not left.is_cuda or not _private.is_idle():  # transforms do not support `out`
        return (left @ right).to(dtype).mul_(scale)
    made = left.new_empty(shape, dtype=dtype)
    return torch.addmm(made, left, right, out_dtype=dtype, beta=0, alpha=scale, out=made)


def _adapter_grads(
    grad_y: Tensor, x: Tensor, p: Tensor, q: Tensor, adapter: Adapter
) -> tuple[Tensor, Tensor]:
    """Returns dA and dB."""
    a, b, scale = adapter
    if grad_y.is_cuda and _private.is_idle() and _kernels.uses_lora_grad(len(a), grad_y):
        made = _fast.lora_grads(grad_y, x, p, q, a, b, scale)
        if made is not None:
            return made
    return _grad_of_half(q, x, scale, a), _grad_of_half(grad_y, p, scale, b)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def product(
    x: Tensor,
    bias: Tensor | None,
    weight: Parts,
    adapter: Adapter,
    base: Callable[..., Tensor | None] | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Returns y and p = x A^T; None if nothing was done, as in _fast.linear. base(x, bias, weight)
    multiplies by the weight alone; by default it is _kernels.fast_linear."""
    made = _fast.linear_adapted(x, bias, weight, *adapter)
    if made is not None:
        return made
    y = (base or _kernels.fast_linear)(x, bias, weight)
    if y is None:
        return None
    with torch.no_grad():
        a, b, scale = adapter.narrow(x.dtype)
        p = torch.mm(_rows(x), a.t())
        y.view(p.shape[0], y.shape[-1]).addmm_(p, b.t(), alpha=scale)
    return y, p


def _backward(grad_y: Tensor, weight: Parts, adapter: Adapter, of_x: bool) -> tuple[Any, Tensor]:
    """Returns dX, if it is needed, and q = dY B, which has the rows of dY."""
    if of_x and _private.is_idle():
        made = _kernels.fused_linear_grad(grad_y, weight, *adapter)
        if made is not None:
            return made
    a, b, scale = adapter.narrow(grad_y.dtype)
    rows = _rows(grad_y)
    q = torch.mm(rows, b)
    if not of_x:
        return None, q
    grad_x = _operators.linear_grad(rows, weight).addmm_(q, a, alpha=scale)
    return grad_x.view(*grad_y.shape[:-1], a.shape[1]), q


@_private.call_backward_directly
class _Adapted(_private.Function):
    """Attaches gradients to y. `made`: y, p, the weight and the scale. The weight is kept as an
    attribute, so that no saved-tensor hook moves or copies it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        made: tuple[Tensor, Tensor, Parts, float],
    ) -> Tensor:
        y, p, ctx.weight, ctx.scale = made
        ctx.save_for_backward(x, p, a, b)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        grads_of = _differentiable if torch.is_grad_enabled() else _grads
        if not _private.any_autocast():
            return grads_of(ctx, grad_y)
        with torch.autocast(grad_y.device.type, enabled=False):  # dtypes are the forward pass's
            return grads_of(ctx, grad_y)


def _grads(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    of_x, _, _, of_bias, _ = ctx.needs_input_grad  # `linear` requires gradients of A and B
    x, p, a, b = ctx.saved_tensors
    weight, scale = ctx.weight, ctx.scale
    grad_bias = _operators.grad_of_bias(grad_y) if of_bias else None
    rank = len(a)
    idle = grad_y.is_cuda and of_x and _private.is_idle()
    if idle and _kernels.uses_lora_grad(rank, grad_y):
        fused = _kernels.uses_fused_grad(grad_y, weight, rank)
        made = _fast.adapted_grads(grad_y, x, p, weight, a, b, scale, fused)
        if made is not None:
            return *made, grad_bias, None
    adapter = Adapter(a, b, scale)
    grad_x, q = _backward(grad_y, weight, adapter, of_x)
    return grad_x, *_adapter_grads(grad_y, x, p, q, adapter), grad_bias, None


def _differentiable(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the gradients by operators that autograd records, for higher derivatives."""
    x, _, a, b = ctx.saved_tensors
    *needed, of_bias, _ = ctx.needs_input_grad
    y = _operators.linear(x, None, ctx.weight)
    y = y + ctx.scale * ((x @ a.to(x.dtype).t()) @ b.to(x.dtype).t())
    inputs = [each for each, needs in zip((x, a, b), needed, strict=True) if needs]
    found = iter(torch.autograd.grad(y, inputs, grad_y, create_graph=True) if inputs else ())
    grads = [next(found) if needs else None for needs in needed]
    return *grads, _operators.grad_of_bias(grad_y) if of_bias else None, None


def linear(
    x: Tensor,
    bias: Tensor | None,
    weight: Parts,
    adapter: Adapter,
    base: Callable[..., Tensor | None] | None = None,
) -> Tensor | None:
    """Returns the product, with gradients for x, A, B and bias; None if nothing was done, as
    `product` says."""
    a, b, scale = adapter
    records = torch.is_grad_enabled() and _private.any_requires_grad(x, a, b, bias)
    if records and not (a.requires_grad and b.requires_grad):
        return None  # a frozen half does not need x or p
    made = product(x, bias, weight, adapter, base)
    if made is None or not records:
        return made and made[0]
    return _Adapted.apply(x, a, b, bias, (*made, weight, scale))
