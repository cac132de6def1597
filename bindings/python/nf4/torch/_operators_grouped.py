"""torch.ops.nf4.linear_grouped, the products of a stack of experts, and its gradient:

    linear_grouped(Tensor x, Tensor ends, Tensor? x_index, Tensor? bias, WEIGHT) -> Tensor
    linear_grouped_backward(Tensor grad_y, Tensor ends, Tensor? x_index, SymInt x_rows, WEIGHT)
        -> Tensor

WEIGHT is the ten arguments of _weight.py, of three dimensions: experts, rows, columns; of
linear_grouped_int4 and linear_grouped_backward_int4 the eight of _int4_weight.py. What ends and
x_index mean nf4.matmul_grouped says. Each is the other's gradient, so that both can be
differentiated as often as one likes; the weight is frozen. On a GPU fp32, and the gradient of
integers, make dense experts for the length of the call. Neither waits for anything, but fp32, and
the gradient of integers in fp16 or of sizes that are no multiples of 8, which read `ends`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

import nf4
from nf4.errors import InvalidArgument
from nf4.torch import _fast, _paths, _private, _schemas
from nf4.torch._checks import require_device, require_float, require_like
from nf4.torch._grouped_dense import Stack, dense_linear, dense_products, experts_of, sums_by
from nf4.torch._int4_weight import Int4Parts, Int4Stack
from nf4.torch._operators import AUTOCAST, cast, impl, require_frozen
from nf4.torch._packed_codes import PackedCodes
from nf4.torch._weight import WeightParts

_BEFORE = "Tensor ends, Tensor? x_index"

# How to get the weight as package nf4 has it.
Made: TypeAlias = Callable[[Any], nf4.QuantizedTensor | None]


class _Operators(NamedTuple):
    forward: Any
    backward: Any


def _defined(suffix: str, weight: str) -> _Operators:
    schemas = {
        "linear_grouped": f"Tensor x, {_BEFORE}, Tensor? bias, {weight}",
        "linear_grouped_backward": f"Tensor grad_y, {_BEFORE}, SymInt x_rows, {weight}",
    }
    for name, arguments in schemas.items():
        _schemas.define(f"{name}{suffix}({arguments}) -> Tensor")
    return _Operators(*(getattr(torch.ops.nf4, name + suffix).default for name in schemas))


_OPERATORS: dict[type[Stack], _Operators] = {
    WeightParts: _defined("", _schemas.weight_arguments(WeightParts)),
    Int4Stack: _defined("_int4", _schemas.weight_arguments(Int4Parts)),
}


def _require_stack(weight: Stack) -> tuple[int, int, int]:
    """Experts, rows and columns."""
    if len(weight.spec.shape) != 3:
        raise InvalidArgument(
            f"weight is of shape {weight.spec.shape}; expected 3 dimensions: experts, rows and "
            f"columns"
        )
    return weight.spec.shape


def _require_operands(
    name: str,
    x: Tensor,
    columns: int,
    ends: Tensor,
    x_index: Tensor | None,
    weight: Stack,
) -> None:
    experts, *_ = _require_stack(weight)
    require_float(name, x.dtype)
    if x.dim() != 2 or x.shape[1] != columns:
        raise InvalidArgument(f"{name} is of shape {tuple(x.shape)}; expected [rows, {columns}]")
    require_like("ends", ends, torch.int32, (experts,))
    if x_index is not None and (x_index.dtype != torch.int32 or x_index.dim() != 1):
        raise InvalidArgument(
            f"x_index is {x_index.dtype} of shape {tuple(x_index.shape)}; expected torch.int32 of "
            f"one dimension"
        )
    require_device(x.device, name, {"ends": ends, "x_index": x_index, **weight.named()})


# ---- Kernels -----------------------------------------------------------------------------


def _linear(
    kind: type[Stack],
    x: Tensor,
    ends: Tensor,
    x_index: Tensor | None,
    bias: Tensor | None,
    *arguments: Any,
) -> Tensor:
    weight = kind.of_arguments(*arguments)
    y = None
    if isinstance(weight, WeightParts):
        y = _fast.linear_grouped(x, ends, x_index, bias, weight)
    return _general_linear(x, ends, x_index, bias, weight) if y is None else y


def _general_linear(
    x: Tensor,
    ends: Tensor,
    x_index: Tensor | None,
    bias: Tensor | None,
    weight: Stack,
    made: Made | None = None,
) -> Tensor:
    experts, rows, cols = _require_stack(weight)
    _require_operands("x", x, cols, ends, x_index, weight)
    if bias is not None:
        require_device(x.device, "x", {"bias": bias})
        require_like("bias", bias, x.dtype, (experts, rows))
    if x.is_cuda and _paths.grouped_prefers_dense(x, x_index, weight, gradient=False):
        return dense_linear(x, ends, x_index, bias, weight)
    quantized = None if made is None else made(weight)
    return nf4.matmul_grouped(
        x.detach().contiguous(),
        weight.quantized() if quantized is None else quantized,
        ends.contiguous(),
        x_index=None if x_index is None else x_index.contiguous(),
        bias=None if bias is None else bias.detach().contiguous(),
        threads=0 if x.is_cuda else torch.get_num_threads(),
    )


def _linear_grad(
    kind: type[Stack],
    grad_y: Tensor,
    ends: Tensor,
    x_index: Tensor | None,
    x_rows: int,
    *arguments: Any,
) -> Tensor:
    weight = kind.of_arguments(*arguments)
    _, rows, _ = _require_stack(weight)
    _require_operands("grad_y", grad_y, rows, ends, x_index, weight)
    pairs = _pairs_grad(grad_y, ends, weight)
    if x_index is None:
        return pairs
    inside = (x_index >= 0) & (x_index < x_rows)
    return sums_by(torch.where(inside, x_index, x_rows), pairs, x_rows)


def _pairs_grad(grad_y: Tensor, ends: Tensor, weight: Stack) -> Tensor:
    """The gradient of the row of x that each row of y was made of."""
    dense = isinstance(weight, Int4Stack) or (
        grad_y.is_cuda and _paths.grouped_prefers_dense(grad_y, None, weight, gradient=True)
    )
    if dense:
        return dense_products(grad_y, weight, ends, gradient=True)
    pairs = nf4.matmul_grouped_grad(
        grad_y.detach().contiguous(),
        weight.quantized(),
        ends.contiguous(),
        threads=0 if grad_y.is_cuda else torch.get_num_threads(),
    )
    # The contents of rows without an expert are unspecified.
    outside = experts_of(ends, len(pairs)) >= len(ends)
    return pairs.masked_fill_(outside[:, None], 0)


def _fake_linear(
    kind: type[Stack],
    x: Tensor,
    ends: Tensor,
    x_index: Tensor | None,
    bias: Tensor | None,
    *arguments: Any,
) -> Tensor:
    weight = kind.of_arguments(*arguments)
    _, rows, cols = _require_stack(weight)
    _require_operands("x", x, cols, ends, x_index, weight)
    return x.new_empty((x if x_index is None else x_index).shape[0], rows)


def _fake_linear_grad(
    kind: type[Stack],
    grad_y: Tensor,
    ends: Tensor,
    x_index: Tensor | None,
    x_rows: int,
    *arguments: Any,
) -> Tensor:
    *_, cols = _require_stack(kind.of_arguments(*arguments))
    return grad_y.new_empty(x_rows, cols)


# ---- Gradients ---------------------------------------------------------------------------


def _keep(
    kind: type[Stack],
    ctx: Any,
    ends: Tensor,
    x_index: Tensor | None,
    arguments: tuple[Any, ...],
) -> None:
    require_frozen(kind.of_arguments(*arguments))
    count = len(kind.names)
    ctx.save_for_backward(ends, x_index, *arguments[:count])
    ctx.rest = arguments[count:]


def _keep_linear(kind: type[Stack], ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ends, x_index, bias, *arguments = inputs
    _keep(kind, ctx, ends, x_index, tuple(arguments))
    ctx.x_rows, ctx.experts = x.shape[0], None if bias is None else bias.shape[0]


def _linear_backward(kind: type[Stack], ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    ends, x_index, *tensors = ctx.saved_tensors
    of_x, of_bias = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
    grad_x = grad_bias = None
    if of_x:
        backward = _OPERATORS[kind].backward
        grad_x = backward(grad_y, ends, x_index, ctx.x_rows, *tensors, *ctx.rest)
    if of_bias:
        grad_bias = sums_by(experts_of(ends, grad_y.shape[0]), grad_y, ctx.experts)
    return grad_x, None, None, grad_bias, *[None] * (len(tensors) + len(ctx.rest))


def _keep_linear_grad(kind: type[Stack], ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad_y, ends, x_index, _, *arguments = inputs
    _keep(kind, ctx, ends, x_index, tuple(arguments))
    ctx.m = grad_y.shape[0]


def _linear_grad_backward(kind: type[Stack], ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    ends, x_index, *tensors = ctx.saved_tensors
    made = None
    if ctx.needs_input_grad[0]:
        made = _OPERATORS[kind].forward(grad, ends, x_index, None, *tensors, *ctx.rest)
        # The contents of rows without an expert are unspecified.
        inside = experts_of(ends, ctx.m) < ends.shape[0]
        made = torch.where(inside[:, None], made, 0)
    return made, None, None, None, *[None] * (len(tensors) + len(ctx.rest))


def _autocast_linear(
    kind: type[Stack],
    device: str,
    x: Tensor,
    ends: Tensor,
    x_index: Tensor | None,
    bias: Tensor | None,
    *weight: Any,
) -> Tensor:
    x, bias = cast(x, bias)
    with torch.autocast(device, enabled=False):
        return _OPERATORS[kind].forward(x, ends, x_index, bias, *weight)


# ---- Registration ------------------------------------------------------------------------

for _kind, (_forward, _backward) in _OPERATORS.items():
    _library = _schemas.library
    impl(_forward, partial(_linear, _kind))
    impl(_backward, partial(_linear_grad, _kind))
    torch.library.register_fake(_forward, partial(_fake_linear, _kind), lib=_library)
    torch.library.register_fake(_backward, partial(_fake_linear_grad, _kind), lib=_library)
    torch.library.register_autograd(
        _forward,
        partial(_linear_backward, _kind),
        setup_context=partial(_keep_linear, _kind),
        lib=_library,
    )
    torch.library.register_autograd(
        _backward,
        partial(_linear_grad_backward, _kind),
        setup_context=partial(_keep_linear_grad, _kind),
        lib=_library,
    )
    for _device, _key in AUTOCAST.items():
        _library.impl(_forward, partial(_autocast_linear, _kind, _device), _key)


def linear_grouped(
    x: Tensor,
    ends: Tensor,
    x_index: Tensor | None,
    bias: Tensor | None,
    weight: Stack,
    made: Made | None = None,
) -> Tensor:
    """torch.ops.nf4.linear_grouped, or that of integers, without the dispatcher where that has
    nothing to do. made: how to get the weight as a QuantizedTensor, where one is kept."""
    if not torch.compiler.is_dynamo_compiling() and _private.is_idle():
        if not (torch.is_grad_enabled() and _private.any_requires_grad(x, bias, *weight)):
            cast_x, cast_bias = cast(x, bias) if _private.any_autocast() else (x, bias)
            y = None
            if isinstance(weight, WeightParts):
                y = _fast.linear_grouped(cast_x, ends, x_index, cast_bias, weight)
            if y is not None:
                return y
            if all(map(_is_plain, (x, ends, x_index, bias, *weight.tensors))):
                return _general_linear(cast_x, ends, x_index, cast_bias, weight, made)
    forward = _OPERATORS[type(weight)].forward
    return forward(x, ends, x_index, bias, *weight.arguments())


def _is_plain(tensor: Tensor | None) -> bool:
    if tensor is None:
        return True
    return type(tensor) in (Tensor, torch.nn.Parameter, PackedCodes) and not (
        tensor.is_meta or tensor.is_neg()
    )
