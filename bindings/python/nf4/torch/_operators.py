"""The operators torch.ops.nf4.*, registered by importing this.

    quantize(Tensor weight, Tensor? codebook, str format, int blocksize, int nested_blocksize)
        -> (Tensor packed, Tensor absmax, Tensor nested_absmax, Tensor nested_code,
            Tensor nested_offset)
    dequantize(WEIGHT, ScalarType dtype) -> Tensor
    linear(Tensor x, Tensor? bias, WEIGHT) -> Tensor
    linear_backward(Tensor grad_y, WEIGHT) -> Tensor

WEIGHT is the ten arguments of _kernels. The weight is frozen: no gradient goes to it. The
gradient of x is an operator of its own, so that a compiler's graph of the backward pass holds
the four bits and nowhere a dense weight that the forward pass left.

Below autograd they come down to those of _native, which is what a compiler's graph has.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nf4.errors import InvalidArgument
from nf4.tensor import sizes
from nf4.torch import _kernels, _native
from nf4.torch._kernels import PARTS

_C = torch._C
_DEVICES = ("CPU", "CUDA")
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))  # of parts
_WEIGHT = (
    "Tensor packed, Tensor absmax, Tensor? nested_absmax, Tensor? nested_code, "
    "Tensor? nested_offset, Tensor? codebook, int[] shape, str format, int blocksize, "
    "int nested_blocksize"
)
_SCHEMAS = {
    "quantize": "(Tensor weight, Tensor? codebook, str format, int blocksize, "
    "int nested_blocksize) -> (Tensor packed, Tensor absmax, Tensor nested_absmax, "
    "Tensor nested_code, Tensor nested_offset)",
    "dequantize": f"({_WEIGHT}, ScalarType dtype) -> Tensor",
    "linear": f"(Tensor x, Tensor? bias, {_WEIGHT}) -> Tensor",
    "linear_backward": f"(Tensor grad_y, {_WEIGHT}) -> Tensor",
}

# It takes its registrations along when it goes.
_library = torch.library.Library("nf4", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    for _device in _DEVICES:
        _library.impl(_name, _kernels.uncompiled(getattr(_kernels, _name)), _device)
if not _native.registered:
    for _device in _DEVICES:
        for _name in ("linear", "dense_like"):
            _kernel = _kernels.uncompiled(getattr(_kernels, f"numbered_{_name}"))
            _library.impl(f"_{_name}", _kernel, _device)

_ops = torch.ops.nf4


# ---- What comes out, without computing it -------------------------------------


@torch.library.register_fake("nf4::quantize", lib=_library)
def _fake_quantize(
    weight: Tensor, codebook: Tensor | None, format: str, blocksize: int, nested_blocksize: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _kernels.require_float("weight", weight.dtype)
    counts = sizes(
        weight.shape, format=format, blocksize=blocksize, nested_blocksize=nested_blocksize
    )
    nested = nested_blocksize != 0
    return (
        weight.new_empty(counts.packed_bytes, dtype=torch.uint8),
        weight.new_empty(counts.blocks, dtype=torch.uint8 if nested else torch.float32),
        weight.new_empty(counts.nested_blocks if nested else 0, dtype=torch.float32),
        weight.new_empty(256 if nested else 0, dtype=torch.float32),
        weight.new_empty(() if nested else 0, dtype=torch.float32),
    )


@torch.library.register_fake("nf4::dequantize", lib=_library)
def _fake_dequantize(*arguments: Any) -> Tensor:
    *weight, dtype = arguments
    _kernels.require_float("dtype", dtype)
    return weight[0].new_empty(weight[6], dtype=dtype)


@torch.library.register_fake("nf4::linear", lib=_library)
def _fake_linear(x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
    _kernels.require_operands(x, bias, weight)
    return x.new_empty((*x.shape[:-1], _native.rows_and_cols(weight[6])[0]))


@torch.library.register_fake("nf4::linear_backward", lib=_library)
def _fake_linear_backward(grad_y: Tensor, *weight: Any) -> Tensor:
    _kernels.require_float("grad_y", grad_y.dtype)
    return grad_y.new_empty((*grad_y.shape[:-1], _native.rows_and_cols(weight[6])[1]))


@torch.library.register_fake("nf4::_linear", lib=_library)
def _fake_native_linear(x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight[6]))


@torch.library.register_fake("nf4::_dense_like", lib=_library)
def _fake_dense_like(like: Tensor, *weight: Any) -> Tensor:
    return like.new_empty(weight[6:8])


# ---- Gradients ------------------------------------------------------------------


def _refuse_grad(
    names: Sequence[str], tensors: Sequence[Tensor | None], reverse: bool = True
) -> None:
    """`reverse` is whether gradients are recorded; torch.no_grad() leaves derivatives on."""
    for name, tensor in zip(names, tensors, strict=False):
        if tensor is None:
            continue
        dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None
        if (reverse and tensor.requires_grad) or dual:
            raise InvalidArgument(
                f"{name} requires grad, and 4-bit weights are frozen; expected it detached"
            )


def _may_differentiate_weight(weight: Sequence[Any]) -> bool:
    return forward_ad._current_level >= 0 or _C._any_requires_grad(*weight[: len(PARTS)])


def _is_bare(x: Tensor, bias: Tensor | None) -> bool:
    """Is there nothing between these and the kernel that the dispatcher would have to see to, but
    for a gradient: no mode, transform, trace, or subclass? _are_plain sees to the others."""
    if type(x) is not Tensor or x.is_meta or x.is_neg() or (bias is not None and bias.is_neg()):
        return False
    return not (
        _C._len_torch_dispatch_stack()
        or _C._is_any_autocast_enabled()
        or _C._are_functorch_transforms_active()
        or _C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def _are_plain(*tensors: Tensor | None) -> bool:
    """Is none of a subclass, which the dispatcher would hand the operator to? The quick calls take
    none without memory of its own, so that this is asked only where they took nothing."""
    return _PLAIN.issuperset(map(type, tensors))


def _with_memory(tensor: Tensor | None) -> Tensor | None:
    """torch's gradients and derivatives may be zeros that it has not made yet."""
    if tensor is not None and tensor._is_zerotensor():
        return tensor.new_zeros(tensor.shape)
    return tensor


def _to_next_transform(op: Any, *arguments: Any) -> Tensor:
    """The operator once more, for the transform around that which autograd has just served."""
    with _C._AutoDispatchBelowAutograd():
        return op(*arguments)


def _linear_below(x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
    if _is_bare(x, bias):
        y = _kernels.try_linear(x, bias, *weight)
        if y is not None:
            return y
        if _are_plain(x, bias, *weight[: len(PARTS)]):
            return _kernels.checked_linear(_with_memory(x), _with_memory(bias), *weight)
    if _C._are_functorch_transforms_active():
        return _to_next_transform(_ops.linear.default, x, bias, *weight)
    _kernels.require_operands(x, bias, weight)
    numbers = _native.numbers(weight)
    if _kernels.needs_dense(x):
        return torch.nn.functional.linear(x, _native.dense_like(x, *numbers), bias)
    bias = None if bias is None else bias.contiguous()
    # Strides that _native takes as they are cannot be told from others without fixing the sizes of
    # a graph.
    return _native.linear(x.contiguous(), bias, *numbers)


def _linear_backward_below(grad_y: Tensor, *weight: Any) -> Tensor:
    if _is_bare(grad_y, None):
        grad_x = _kernels.try_linear_backward(grad_y, *weight)
        if grad_x is not None:
            return grad_x
        if _are_plain(grad_y, *weight[: len(PARTS)]):
            return _kernels.linear_backward(grad_y, *weight)
    if _C._are_functorch_transforms_active():
        return _to_next_transform(_ops.linear_backward.default, grad_y, *weight)
    _kernels.require_float("grad_y", grad_y.dtype)
    return torch.matmul(grad_y, _native.dense_like(grad_y, *_native.numbers(weight)))


class _Function(torch.autograd.Function):
    """Arguments are tensors that may be differentiated, the ten of a weight as one, and what
    _grad_around gives."""

    @staticmethod
    def keep(ctx: Any, weight: Sequence[Any]) -> None:
        if _may_differentiate_weight(weight):
            _refuse_grad(PARTS, weight)
        if ctx.needs_input_grad[0]:  # that of a bias needs no weight
            ctx.save_for_backward(*weight[: len(PARTS)])
        ctx.layout = weight[len(PARTS) :]

    @staticmethod
    def called(grad_around: bool | None, below: Any, *arguments: Any) -> Tensor:
        """What comes below autograd, with gradients recorded as they are around this, and not as
        in a Function's forward, where torch has switched off them and derivatives."""
        if grad_around is None:
            return below(*arguments)
        with torch.set_grad_enabled(grad_around), forward_ad._set_fwd_grad_enabled(True):
            return below(*arguments)


class _Linear(_Function):
    """y is linear in x and in bias, so this can be differentiated as often as one likes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weight: Sequence[Any], grad_around: bool | None
    ) -> Tensor:
        _Linear.keep(ctx, weight)
        return _Linear.called(grad_around, _linear_below, x, bias, *weight)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        of_x, of_bias, *_ = ctx.needs_input_grad
        grad_x = grad_bias = None
        if of_x:
            grad_x = _linear_backward(grad_y, *ctx.saved_tensors, *ctx.layout)
        if of_bias:
            # Without dimensions to sum over, torch sums over all.
            leading = tuple(range(grad_y.dim() - 1))
            grad_bias = grad_y.sum(dim=leading) if leading else grad_y
        return grad_x, grad_bias, None, None


class _LinearBackward(_Function):
    @staticmethod
    def forward(
        ctx: Any, grad_y: Tensor, weight: Sequence[Any], grad_around: bool | None
    ) -> Tensor:
        _LinearBackward.keep(ctx, weight)
        return _LinearBackward.called(grad_around, _linear_backward_below, grad_y, *weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _ops.linear.default(grad, None, *ctx.saved_tensors, *ctx.layout), None, None


# torch.autograd.Function.apply without what that does for torch.func.
_apply_linear = super(torch.autograd.Function, _Linear).apply
_apply_linear_backward = super(torch.autograd.Function, _LinearBackward).apply


def _in_transforms() -> AbstractContextManager[None]:
    """torch.func's transforms come one by one to a kernel of the dispatcher, which has the level of
    one of them before it then; a Function has to be allowed there."""
    if not _C._are_functorch_transforms_active():
        return nullcontext()
    # Not of torch's public names: whoever uses no transform does without it.
    from torch._functorch.utils import enable_single_level_autograd_function

    return enable_single_level_autograd_function()


def _grad_around() -> bool | None:
    """Whether the transforms around the present one may record gradients: not where the caller
    said torch.no_grad(). None where there is no transform."""
    return _C.is_grad_enabled() if _C._are_functorch_transforms_active() else None


def _is_differentiated(*arguments: Any) -> bool:
    """Forward mode goes the same way, where torch says that there is none of that."""
    reverse = _C.is_grad_enabled() and _C._any_requires_grad(*arguments)
    return reverse or forward_ad._current_level >= 0


def _resolved(weight: Sequence[Any]) -> Sequence[Any]:
    """Without lazy negation, which kernels that are not the dispatcher's to call do not see."""
    parts = weight[: len(PARTS)]
    if not any(part is not None and part.is_neg() for part in parts):
        return weight
    parts = [part if part is None else part.resolve_neg() for part in parts]
    return *parts, *weight[len(PARTS) :]


def _autograd_linear(x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
    weight = _resolved(weight)
    if _is_differentiated(x, bias, *weight):
        with _in_transforms():
            return _apply_linear(x, bias, weight, _grad_around())
    return _linear_below(x, bias, *weight)


def _autograd_linear_backward(grad_y: Tensor, *weight: Any) -> Tensor:
    weight = _resolved(weight)
    if _is_differentiated(grad_y, *weight):
        with _in_transforms():
            return _apply_linear_backward(grad_y, weight, _grad_around())
    return _linear_backward_below(grad_y, *weight)


def _not_differentiable(op: Any, names: Sequence[str]) -> Any:
    def kernel(keyset: Any, *arguments: Any) -> Any:
        reverse = _C.is_grad_enabled()
        if reverse or forward_ad._current_level >= 0:
            _refuse_grad(names, arguments[: len(names)], reverse)
        with _C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & _C._after_autograd_keyset, *arguments)

    return kernel


_library.impl("linear", _autograd_linear, "Autograd")
_library.impl("linear_backward", _autograd_linear_backward, "Autograd")
for _name, _names in {"dequantize": PARTS, "quantize": ("weight", "codebook")}.items():
    _kernel = _not_differentiable(getattr(_ops, _name).default, _names)
    _library.impl(_name, _kernel, "Autograd", with_keyset=True)


# ---- Autocast -------------------------------------------------------------------

_AUTOCAST = _C.DispatchKeySet(_C.DispatchKey.AutocastCPU) | _C.DispatchKeySet(
    _C.DispatchKey.AutocastCUDA
)


def _autocast(x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
    """x and bias in autocast's dtype, and the scales as they are."""
    dtype = torch.get_autocast_dtype(x.device.type)
    if x.dtype in _kernels.DTYPES:
        x = x.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with _C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return _ops.linear.default(x, bias, *weight)


for _device in _DEVICES:
    _library.impl("linear", _autocast, f"Autocast{_device}")


# ---- The way there ----------------------------------------------------------------


def linear(x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
    """torch.ops.nf4.linear, in half of its time where the dispatcher has nothing to do."""
    if not torch.compiler.is_compiling() and _is_bare(x, bias):
        if _C.is_grad_enabled() and _C._any_requires_grad(x, bias, *weight):
            return _apply_linear(x, bias, weight, None)
        y = _kernels.try_linear(x, bias, *weight)
        if y is not None:
            return y
    return _ops.linear.default(x, bias, *weight)


def _linear_backward(grad_y: Tensor, *weight: Any) -> Tensor:
    """torch.ops.nf4.linear_backward, likewise. Gradients of gradients are the dispatcher's."""
    if not torch.compiler.is_compiling() and not _C.is_grad_enabled() and _is_bare(grad_y, None):
        grad_x = _kernels.try_linear_backward(grad_y, *weight)
        if grad_x is not None:
            return grad_x
    return _ops.linear_backward.default(grad_y, *weight)
