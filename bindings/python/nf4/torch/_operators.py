"""Kernels of torch.ops.nf4.* (_schemas.py), registered by importing this, and what layers call
in their place: linear, linear_grad and dequantize.

    eager     linear -> the fast way (_fast.py), and _Recorded if x or bias requires grad
    general   torch.ops.nf4.linear -> Autograd: _Linear -> _linear_below -> nf4.matmul, or
              torch.ops.nf4._linear where a compiler, a mode or a subclass is to see it
    backward  linear_grad -> the fast way, or torch.ops.nf4.linear_backward in the same manner

What the fast way does not do, the general one does. The weight is frozen: no gradient goes to it.
The gradient of x is an operator of its own, so that a compiler's graph of the backward pass holds
the four bits, and nowhere a dense weight that the forward pass left. For few rows it is a product
of libnf4, and on a CPU for a number of them that a graph leaves open (uses_fused_grad of
_kernels.py); else torch's with the dequantized weight. The operators of several weights that share
x are in _operators_batch.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nf4.errors import InvalidArgument
from nf4.torch import _fast, _kernels, _private, _schemas
from nf4.torch._checks import DTYPES, require_float
from nf4.torch._packed_codes import PackedCodes
from nf4.torch._schemas import OPERATORS, Parts

_DEVICES = ("CPU", "CUDA")
AUTOCAST = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_PLAIN = frozenset((Tensor, torch.nn.Parameter, PackedCodes, type(None)))


# ---- Below autograd --------------------------------------------------------------------


def _are_plain(*tensors: Tensor | None) -> bool:
    """Is none on meta, with its negative bit set, or of a subclass, which handles operators itself?
    The fast way takes none of these, so that this is asked only after it did nothing."""
    return _PLAIN.issuperset(map(type, tensors)) and not any(
        each.is_meta or each.is_neg() for each in tensors if each is not None
    )


def _with_memory(tensor: Tensor | None) -> Tensor | None:
    """Gradients may be torch's zero tensors, which have no memory."""
    if tensor is not None and _private.is_zero_tensor(tensor):
        return tensor.new_zeros(tensor.shape)
    return tensor


def to_next_transform(op: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Calls the operator again, for the next transform outwards: autograd has served one."""
    with _private.below_autograd():
        return op(*arguments)


def _linear_below(x: Tensor, bias: Tensor | None, weight: Parts) -> Tensor:
    return (_linear_idle if _private.is_idle() else linear_seen)(x, bias, weight)


def _linear_idle(x: Tensor, bias: Tensor | None, weight: Parts) -> Tensor:
    """Where only a tensor that is not plain needs the dispatcher."""
    y = _kernels.fast_linear(x, bias, weight)
    return _general_idle(x, bias, weight) if y is None else y


def _general_idle(x: Tensor, bias: Tensor | None, weight: Parts) -> Tensor:
    if _are_plain(x, bias, *weight.tensors):
        return _kernels.general_linear(_with_memory(x), _with_memory(bias), weight)
    return linear_seen(x, bias, weight)


def linear_seen(x: Tensor, bias: Tensor | None, weight: Parts) -> Tensor:
    """Through operators that compilers, modes, transforms and subclasses see."""
    if _private.has_transforms():
        return to_next_transform(OPERATORS[type(weight)].linear, x, bias, *weight.arguments())
    _schemas.require_operands(x, bias, weight)
    operators = OPERATORS[type(weight)]
    bias = None if bias is None else bias.contiguous()
    # Asking whether C++ takes these strides would fix the sizes of a graph.
    return operators.graph_linear(x.contiguous(), bias, *weight.numbers())


def _linear_grad_below(grad_y: Tensor, weight: Parts) -> Tensor:
    if _private.is_idle():
        grad_x = _kernels.fast_linear_grad(grad_y, weight)
        if grad_x is not None:
            return grad_x
        if _are_plain(grad_y, *weight.tensors):
            return _kernels.linear_grad(_with_memory(grad_y), weight)
    operators = OPERATORS[type(weight)]
    if _private.has_transforms():
        return to_next_transform(operators.linear_backward, grad_y, *weight.arguments())
    require_float("grad_y", grad_y.dtype)
    if _kernels.uses_fused_grad(grad_y, weight):
        return operators.graph_linear_grad(grad_y.contiguous(), *weight.numbers())
    return torch.matmul(grad_y, operators.graph_dense_like(grad_y, *weight.numbers()))


# ---- Gradients -------------------------------------------------------------------------


def _refuse_grad(
    names: Sequence[str], tensors: Sequence[Tensor | None], reverse: bool = True
) -> None:
    """reverse: are gradients recorded? torch.no_grad() leaves forward mode on."""
    for name, tensor in zip(names, tensors, strict=False):
        if tensor is None:
            continue
        dual = _private.in_forward_ad() and forward_ad.unpack_dual(tensor).tangent is not None
        if (reverse and tensor.requires_grad) or dual:
            raise InvalidArgument(
                f"{name} requires grad, but 4-bit weights are frozen; expected it detached"
            )


def require_frozen(weight: Parts) -> None:
    if _private.in_forward_ad() or _private.any_requires_grad(*weight):
        _refuse_grad(weight.names, weight)


def _keep(ctx: Any, weight: Parts) -> None:
    """For the backward pass."""
    require_frozen(weight)
    if ctx.needs_input_grad[0]:  # the gradient of a bias needs no weight
        ctx.save_for_backward(*weight.tensors)
    ctx.kind, ctx.spec = type(weight), weight.spec


class _Linear(_private.Function):
    """y is linear in x and in bias, so this can be differentiated as often as one likes. `below`
    computes y from x, bias and the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        weight: Parts,
        below: Callable[[Tensor, Tensor | None, Parts], Tensor],
    ) -> Tensor:
        _keep(ctx, weight)
        return below(x, bias, weight)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        of_x, of_bias, *_ = ctx.needs_input_grad
        grad_x = linear_grad(grad_y, ctx.kind(*ctx.saved_tensors, ctx.spec)) if of_x else None
        return grad_x, grad_of_bias(grad_y) if of_bias else None, None, None


@_private.call_backward_directly
class _Recorded(_private.Function):
    """Gives y, which is x W^T + bias already, its gradients. `made`: y and the weight. Of its parts
    `packed` alone is saved: to save the others takes as long as all else here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, made: tuple[Tensor, Parts]) -> Tensor:
        y, weight = made
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(weight[0])
            ctx.kind, ctx.beside_packed = type(weight), weight[1:]
            ctx.versions = _fast.versions(ctx.beside_packed)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        of_x, of_bias, _ = ctx.needs_input_grad
        grad_x = None
        if of_x:
            beside = ctx.beside_packed
            if _fast.versions(beside) != ctx.versions:
                raise RuntimeError(
                    "a scale or the codebook of a 4-bit weight, which is needed for gradient "
                    "computation, has been modified by an inplace operation"
                )
            weight = tuple.__new__(ctx.kind, (*ctx.saved_tensors, *beside))
            grad_x = linear_grad(grad_y, weight)
        return grad_x, grad_of_bias(grad_y) if of_bias else None, None


def grad_of_bias(grad_y: Tensor) -> Tensor:
    # Without dimensions to sum over, torch sums over all.
    leading = tuple(range(grad_y.dim() - 1))
    return grad_y.sum(dim=leading) if leading else grad_y


class _LinearGrad(_private.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grad_y: Tensor,
        weight: Parts,
        below: Callable[[Tensor, Parts], Tensor],
    ) -> Tensor:
        _keep(ctx, weight)
        return below(grad_y, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight = ctx.kind(*ctx.saved_tensors, ctx.spec)
        return OPERATORS[ctx.kind].linear(grad, None, *weight.arguments()), None, None


def _recording(recorded: bool, below: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Calls `below` with the grad mode of the caller, and forward mode on: torch switches both off
    in a Function's forward."""
    with torch.set_grad_enabled(recorded), _private.forward_ad_enabled(True):
        return below(*arguments)


def around(below: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`below` for the transforms outside the current one, which record gradients as the caller's
    grad mode says."""
    if not _private.has_transforms():
        return below
    return functools.partial(_recording, torch.is_grad_enabled(), below)


def is_differentiated(*tensors: Any) -> bool:
    """Forward mode takes the same way: torch's error says that it is not supported."""
    reverse = torch.is_grad_enabled() and _private.any_requires_grad(*tensors)
    return reverse or _private.in_forward_ad()


def resolved(kind: type[Parts], *weight: Any) -> Parts:
    """Without negative bits, which the kernels do not see."""
    count = len(kind.names)
    tensors = (
        part.resolve_neg() if part is not None and part.is_neg() else part
        for part in weight[:count]
    )
    return kind.of_arguments(*tensors, *weight[count:])


def _autograd_linear(kind: type[Parts], x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
    parts = resolved(kind, *weight)
    if not is_differentiated(x, bias, *parts):
        return _linear_below(x, bias, parts)
    with _private.function_in_transform():
        return _Linear.apply(x, bias, parts, around(_linear_below))


def _autograd_linear_backward(kind: type[Parts], grad_y: Tensor, *weight: Any) -> Tensor:
    parts = resolved(kind, *weight)
    if not is_differentiated(grad_y, *parts):
        return _linear_grad_below(grad_y, parts)
    with _private.function_in_transform():
        return _LinearGrad.apply(grad_y, parts, around(_linear_grad_below))


def _not_differentiable(op: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    def kernel(keyset: Any, *arguments: Any) -> Any:
        reverse = torch.is_grad_enabled()
        if reverse or _private.in_forward_ad():
            _refuse_grad(names, arguments[: len(names)], reverse)
        with _private.below_autograd():
            return op.redispatch(keyset & _private.keys_below_autograd, *arguments)

    return kernel


# ---- Autocast --------------------------------------------------------------------------


def cast(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x and bias in autocast's dtype where that is on; scales stay as they are."""
    device = x.device.type
    if x.dtype not in DTYPES or device not in AUTOCAST or not torch.is_autocast_enabled(device):
        return x, bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), None if bias is None else bias.to(dtype)


def _autocast_linear(
    op: Callable[..., Tensor], device: str, x: Tensor, bias: Tensor | None, *weight: Any
) -> Tensor:
    x, bias = cast(x, bias)
    with torch.autocast(device, enabled=False):
        return op(x, bias, *weight)


# ---- Registrations ---------------------------------------------------------------------


def impl(op: Any, kernel: Callable[..., Any]) -> None:
    for device in _DEVICES:
        _schemas.library.impl(op, _kernels.uncompiled(kernel), device)


def _implement(kind: type[Parts], ops: _schemas.Operators) -> None:
    """The operators of a kind of weight, but for those in C++."""
    of_arguments, of_numbers = kind.of_arguments, kind.of_numbers
    impl(ops.dequantize, lambda *a: _kernels.dequantize(of_arguments(*a[:-1]), a[-1]))
    impl(ops.linear, lambda x, bias, *w: _kernels.linear(x, bias, of_arguments(*w)))
    impl(ops.linear_backward, lambda dy, *w: _kernels.linear_grad(dy, of_arguments(*w)))
    if not _fast.registered:
        impl(ops.graph_linear, lambda x, b, *n: _kernels.general_linear(x, b, of_numbers(*n)))
        impl(
            ops.graph_dense_like,
            lambda like, *n: _kernels.dequantize(of_numbers(*n), like.dtype),
        )
        if ops.graph_linear_grad is not None:
            impl(
                ops.graph_linear_grad,
                lambda dy, *n: _kernels.general_linear_grad(dy, of_numbers(*n)),
            )
    library, backward = _schemas.library, _autograd_linear_backward
    library.impl(ops.linear, functools.partial(_autograd_linear, kind), "Autograd")
    library.impl(ops.linear_backward, functools.partial(backward, kind), "Autograd")
    for device, key in AUTOCAST.items():
        library.impl(ops.linear, functools.partial(_autocast_linear, ops.linear, device), key)
    _refuse_grads_of(ops.dequantize, kind.names)


def _refuse_grads_of(op: Any, names: Sequence[str]) -> None:
    if _private.can_redispatch:
        kernel = _not_differentiable(op, names)
        _schemas.library.impl(op, kernel, "Autograd", with_keyset=True)


impl(_schemas.quantize, _kernels.quantize)
impl(_schemas.quantize_int4, _kernels.quantize_int4)
_refuse_grads_of(_schemas.quantize, ("weight", "codebook"))
_refuse_grads_of(_schemas.quantize_int4, ("weight",))
for _kind, _ops in OPERATORS.items():
    _implement(_kind, _ops)


# ---- What layers call ------------------------------------------------------------------


def linear(x: Tensor, bias: Tensor | None, weight: Parts) -> Tensor:
    """y = x W^T + bias: torch.ops.nf4.linear, without the dispatcher where that has nothing to
    do."""
    if not torch.compiler.is_dynamo_compiling() and type(x) is Tensor and _private.is_idle():
        if _private.any_autocast():
            x, bias = cast(x, bias)
        records, y = torch.is_grad_enabled(), _fast.linear(x, bias, weight, _kernels.peer)
        if y is not None:  # the weight requires no grad
            if records and _private.any_requires_grad(x, bias):
                return _Recorded.apply(x, bias, (y, weight))
            return y
        if records and _private.any_requires_grad(x, bias, *weight):
            return _Linear.apply(x, bias, weight, _general_idle)
        return _general_idle(x, bias, weight)
    return OPERATORS[type(weight)].linear(x, bias, *weight.arguments())


def linear_grad(grad_y: Tensor, weight: Parts) -> Tensor:
    """grad_y W: torch.ops.nf4.linear_backward, likewise."""
    if not torch.is_grad_enabled() and _private.is_idle():
        grad_x = _kernels.fast_linear_grad(grad_y, weight)
        if grad_x is not None:
            return grad_x
    return OPERATORS[type(weight)].linear_backward(grad_y, *weight.arguments())


def dequantize(weight: Parts, dtype: torch.dtype) -> Tensor:
    """The weight in a dtype: torch.ops.nf4.dequantize, likewise."""
    if not torch.compiler.is_dynamo_compiling() and _private.is_idle():
        if not (torch.is_grad_enabled() and _private.any_requires_grad(*weight)):
            out = torch.empty(*weight.spec.shape, dtype=dtype, device=weight.packed.device)
            if _fast.dequantize(out, weight):
                return out
    return OPERATORS[type(weight)].dequantize(*weight.arguments(), dtype)
