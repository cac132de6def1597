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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nf4.errors import InvalidArgument
from nf4.tensor import sizes
from nf4.torch import _kernels
from nf4.torch._kernels import PARTS

_C = torch._C
_DEVICES = ("CPU", "CUDA")
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
    _kernels.require_float("x", x.dtype)
    rows, cols = _kernels.rows_and_cols(weight[6])
    if x.dim() == 0 or x.shape[-1] != cols:
        raise InvalidArgument(f"x is of shape {tuple(x.shape)}; expected [..., {cols}]")
    _kernels.require_device(x.device, "x", {"bias": bias, **_kernels.parts_of(weight)})
    return x.new_empty((*x.shape[:-1], rows))


@torch.library.register_fake("nf4::linear_backward", lib=_library)
def _fake_linear_backward(grad_y: Tensor, *weight: Any) -> Tensor:
    _kernels.require_float("grad_y", grad_y.dtype)
    return grad_y.new_empty((*grad_y.shape[:-1], _kernels.rows_and_cols(weight[6])[1]))


# ---- Gradients ------------------------------------------------------------------


def _below_autograd(op: Any, keyset: Any, *arguments: Any) -> Any:
    with _C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & _C._after_autograd_keyset, *arguments)


def _refuse_grad(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    for name, tensor in zip(names, tensors, strict=False):
        if tensor is not None and tensor.requires_grad:
            raise InvalidArgument(
                f"{name} requires grad, and 4-bit weights are frozen; expected it detached"
            )


class _Linear(torch.autograd.Function):
    """y is linear in x and in bias, so this can be differentiated as often as one likes. keyset is
    None where the dispatcher was not asked."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
        _refuse_grad(PARTS, weight)
        ctx.save_for_backward(*weight[:6])
        ctx.layout = weight[6:]
        if keyset is None:
            y = _kernels.try_linear(x, bias, *weight)
            return _ops.linear.default(x, bias, *weight) if y is None else y
        return _below_autograd(_ops.linear.default, keyset, x, bias, *weight)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        _, of_x, of_bias, *_ = ctx.needs_input_grad
        grad_x = grad_bias = None
        if of_x:
            grad_x = _linear_backward(grad_y, *ctx.saved_tensors, *ctx.layout)
        if of_bias:
            # Without dimensions to sum over, torch sums over all.
            leading = tuple(range(grad_y.dim() - 1))
            grad_bias = grad_y.sum(dim=leading) if leading else grad_y
        return None, grad_x, grad_bias, *(None,) * 10


class _LinearBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keyset: Any, grad_y: Tensor, *weight: Any) -> Tensor:
        _refuse_grad(PARTS, weight)
        ctx.save_for_backward(*weight[:6])
        ctx.layout = weight[6:]
        return _below_autograd(_ops.linear_backward.default, keyset, grad_y, *weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        of_grad_y = _ops.linear.default(grad, None, *ctx.saved_tensors, *ctx.layout)
        return None, of_grad_y, *(None,) * 10


def _is_differentiated(*arguments: Any) -> bool:
    """Forward mode goes the same way, where torch says that there is none of that."""
    reverse = _C.is_grad_enabled() and _C._any_requires_grad(*arguments)
    return reverse or forward_ad._current_level >= 0


def _differentiable(op: Any, function: type[torch.autograd.Function]) -> Any:
    def kernel(keyset: Any, *arguments: Any) -> Any:
        if _is_differentiated(*arguments):
            return function.apply(keyset, *arguments)
        return _below_autograd(op, keyset, *arguments)

    return kernel


def _not_differentiable(op: Any, names: Sequence[str]) -> Any:
    def kernel(keyset: Any, *arguments: Any) -> Any:
        if _C.is_grad_enabled():
            _refuse_grad(names, arguments[: len(names)])
        return _below_autograd(op, keyset, *arguments)

    return kernel


for _name, _kernel in {
    "linear": _differentiable(_ops.linear.default, _Linear),
    "linear_backward": _differentiable(_ops.linear_backward.default, _LinearBackward),
    "dequantize": _not_differentiable(_ops.dequantize.default, PARTS),
    "quantize": _not_differentiable(_ops.quantize.default, ("weight", "codebook")),
}.items():
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


def _is_bare(x: Tensor, bias: Tensor | None) -> bool:
    """Is there nothing between these and the kernel that the dispatcher would have to see to, but
    for a gradient: no mode, transform, trace, or subclass?"""
    if type(x) is not Tensor or x.is_neg() or (bias is not None and bias.is_neg()):
        return False
    return not (
        _C._len_torch_dispatch_stack()
        or _C._is_any_autocast_enabled()
        or _C._are_functorch_transforms_active()
        or _C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def linear(x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
    """torch.ops.nf4.linear, in half of its time where the dispatcher has nothing to do."""
    if not torch.compiler.is_compiling() and _is_bare(x, bias):
        if _C.is_grad_enabled() and _C._any_requires_grad(x, bias, *weight):
            return _Linear.apply(None, x, bias, *weight)
        y = _kernels.try_linear(x, bias, *weight)
        if y is not None:
            return y
    return _ops.linear.default(x, bias, *weight)


def _linear_backward(grad_y: Tensor, *weight: Any) -> Tensor:
    """torch.ops.nf4.linear_backward, likewise. Gradients of gradients are the dispatcher's."""
    if not torch.compiler.is_compiling() and not _C.is_grad_enabled() and _is_bare(grad_y, None):
        return _kernels.linear_backward(grad_y, *weight)
    return _ops.linear_backward.default(grad_y, *weight)
