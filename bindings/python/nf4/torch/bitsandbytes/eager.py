"""Replaces bitsandbytes' path from Linear4bit to gemm_4bit in eager mode, with the host overhead of
an NF4Linear.

bitsandbytes' own path is five Python functions and a torch operator. Ours handles the calls that
layers make all the time: it calls C++ (_fast.py), or traced.py where torch.compile traces. All
other calls go to the original function, which keeps its messages, warnings and rare cases, and
which reaches libnf4 through the operators:
    dispatch modes, transforms, tracing, derivatives in forward mode
    subclasses of Tensor, an `out`, a weight that requires grad
    a weight in another layout or orientation, one that is not quantized yet
    a bias in another dtype, scales in 16 bits
The results are bit-equal to the operators', and autocast changes nothing, as in bitsandbytes.
Linear4bit.forward rounds x to bf16 where bitsandbytes does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from nf4.torch import _fast, _kernels, _operators, _private
from nf4.torch._state import as_bytes
from nf4.torch._weight import Spec, WeightParts
from nf4.torch.bitsandbytes import own_kernels, traced
from nf4.torch.bitsandbytes.operators import is_ours, ready, takes

# (x, packed, state) -> the fields of a WeightParts; None: call the original.
WeightOf = Callable[[Tensor, Tensor, Any], "tuple[Any, ...] | None"]
# (x, packed, state, bias) -> x W^T + bias; None: call the original.
Product = Callable[[Tensor, Tensor, Any, "Tensor | None"], "Tensor | None"]


@functools.lru_cache(maxsize=4096)
def _spec(
    shape: tuple[int, ...], quant_type: str, blocksize: int, nested_blocksize: int
) -> Spec | None:
    """Returns the Spec; None for what gemm_4bit does not accept."""
    if not takes(shape, quant_type, nested_blocksize):
        return None
    return Spec.of(shape, quant_type, blocksize, nested_blocksize)


# ---- Gradients -------------------------------------------------------------------------


def _plain(packed: Tensor) -> Tensor:
    """Returns a tensor on the current bytes. A Params4bit follows its .data, which may be swapped
    or released before the backward pass."""
    with _private.no_torch_function():  # a Params4bit's takes 2 us
        return as_bytes(packed.data)


def _kept(packed: Tensor, weight: tuple[Any, ...]) -> WeightParts:
    """Returns the weight with these fields, for the backward pass."""
    return tuple.__new__(WeightParts, (_plain(packed), *weight[1:]))


def _dense(weight: WeightParts, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Returns the dense weight in a dtype, for a product with `like`."""
    if not torch.is_grad_enabled() and _private.is_idle():
        dense = _kernels.new_dense(*weight.spec[:2], dtype, like.device)
        if _fast.dequantize(dense, weight):
            return dense
    return _operators.dequantize(weight.with_float_scales(), dtype)


def _fused_grad(grad_y: Tensor, weight: WeightParts) -> Tensor | None:
    """Returns grad_y W without a dense weight; None if that is slower, or nothing was done."""
    if torch.is_grad_enabled() or not _private.is_idle():
        return None
    return _kernels.fused_linear_grad(grad_y, weight)


@_private.call_backward_directly
class MatMul4Bit(_private.Function):
    """Attaches gradients to y, which is x W^T + bias already. Gradients from a dense weight are
    bit-equal to bitsandbytes'.

    It keeps the weight's parts as attributes, as bitsandbytes does, so that no hook of saved
    tensors moves or copies a weight.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, made: tuple[Tensor, WeightParts, torch.dtype]
    ) -> Tensor:
        y, ctx.weight, ctx.weight_dtype = made
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        of_x, of_bias, _ = ctx.needs_input_grad
        grad_x = grad_bias = None
        if of_x:
            # The dense weight is rounded to its own 16-bit dtype first.
            wide = ctx.weight_dtype == torch.float32
            dtype = grad_y.dtype if wide else ctx.weight_dtype
            grad_x = _fused_grad(grad_y, ctx.weight) if dtype == grad_y.dtype else None
            if grad_x is None:
                dense = _dense(ctx.weight, dtype, grad_y)
                grad_x = torch.matmul(grad_y, dense.to(grad_y.dtype))
        if of_bias:
            grad_bias = grad_y.sum(0)  # autograd sums over the other dimensions
        return grad_x, grad_bias, None


# ---- What takes the place of bitsandbytes' functions -----------------------------------

# Whoever has kept one of them, as accelerate keeps a layer's forward, finds the original here.
given_back = False


def weights_of(bitsandbytes: Any) -> WeightOf:
    QuantState = bitsandbytes.functional.QuantState

    def weight_of(x: Tensor, packed: Tensor, state: Any) -> tuple[Any, ...] | None:
        if type(state) is not QuantState or given_back or not _private.is_idle():
            return None
        if x.device not in ready and not is_ours(x):
            return None
        return _fast.state_parts(packed, state, _spec)

    return weight_of


def product_for(weight_of: WeightOf, bitsandbytes: Any) -> Product:
    QuantState = bitsandbytes.functional.QuantState

    def product(x: Tensor, packed: Tensor, state: Any, bias: Tensor | None) -> Tensor | None:
        if is_dynamo_compiling():
            aside = given_back or type(state) is not QuantState
            return None if aside else traced.product(x, packed, state, bias)
        records = torch.is_grad_enabled() and _private.any_requires_grad(x, packed, bias)
        if records and _private.any_requires_grad(packed):
            return None  # y requires grad, though there is no gradient of the weight
        weight = weight_of(x, packed, state)
        y = None if weight is None else own_kernels.linear(x, bias, weight)
        if weight is None or y is None or not records:
            return y
        return MatMul4Bit.apply(x, bias, (y, _kept(packed, weight), state.dtype))

    return product


def matmul_4bit(product: Product, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def matmul_4bit(
        A: Tensor,
        B: Tensor,
        quant_state: Any,
        out: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        y = None
        if out is None:
            y = product(A, B, quant_state, bias)
        return original(A, B, quant_state, out, bias) if y is None else y

    return matmul_4bit


def apply(product: Product, original: Callable[..., Tensor]) -> classmethod:
    """Replaces MatMul4Bit.apply, which subclasses inherit."""
    served = original.__self__

    def apply(
        cls: type,
        A: Tensor,
        B: Tensor,
        out: Tensor | None = None,
        bias: Tensor | None = None,
        quant_state: Any = None,
    ) -> Tensor:
        y = None
        if cls is served and out is None:
            y = product(A, B, quant_state, bias)
        return super(served, cls).apply(A, B, out, bias, quant_state) if y is None else y

    return classmethod(apply)


def _in_bf16(layer: Any, state: Any, x: Tensor, QuantState: type) -> bool:
    """Tells if bitsandbytes itself, on a CPU with AVX512-BF16, would compute this call in bf16
    though its dtype is another. It does in eval mode, for an x without gradients."""
    if layer.training or x.requires_grad or type(state) is not QuantState:
        return False
    rows, cols = state.shape
    if rows % 32 != 0 or cols % state.blocksize != 0:  # its layout does not hold these
        return False
    return (layer.compute_dtype or x.dtype) is not torch.bfloat16


# torch divides elementwise work of this many elements among OpenMP threads, which spin for
# milliseconds afterwards and delay libnf4's threads.
_SHARED = 32768


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x.to(dtype) without starting OpenMP threads."""
    if x.dtype is dtype or x.numel() < _SHARED or is_dynamo_compiling() or x.is_meta:
        return x.to(dtype)
    rows = x.reshape(-1, x.shape[-1])
    made = torch.empty_like(rows, dtype=dtype)
    step = max(1, (_SHARED - 1) // rows.shape[1])
    for part, of in zip(made.split(step), rows.split(step), strict=True):
        part.copy_(of)
    return made.view(x.shape)


def _rounded(layer: Any, x: Tensor, matmul: Callable[..., Tensor]) -> Tensor:
    """Computes y in bf16. In fp32 it would take up to twice bitsandbytes' time."""
    if not layer.compute_type_is_set:
        layer.set_compute_type(x)
        layer.compute_type_is_set = True
    dtype, bias = layer.compute_dtype or x.dtype, layer.bias
    weight = layer.weight
    in_bf16 = _cast(_cast(x, dtype), torch.bfloat16)
    y = _cast(matmul(in_bf16, weight, quant_state=weight.quant_state), dtype)
    if bias is not None:
        if bias.dtype is not dtype:
            bias.data = bias.data.to(dtype)
        y = y + bias
    return y.to(x.dtype) if y.requires_grad else _cast(y, x.dtype)


def forward(
    product: Product, weight_of: WeightOf, bitsandbytes: Any, original: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Makes Linear4bit.forward, once bitsandbytes.matmul_4bit is replaced. Its attributes
    nf4_operands and nf4_linear serve code that computes more than this product
    (nf4/torch/peft/layers.py)."""
    Params4bit, ours = bitsandbytes.nn.Params4bit, bitsandbytes.matmul_4bit
    QuantState = bitsandbytes.functional.QuantState
    rounds = bitsandbytes.functional.has_avx512bf16()  # the replaced one is in nn.modules

    def in_bf16(self: Any, x: Tensor) -> bool:  # on the CPU
        if not rounds or given_back or bitsandbytes.matmul_4bit is not ours:
            return False
        weight = self._parameters.get("weight")  # self.weight takes 0.5 us
        if self.support_avx512bf16_for_cpu or type(weight) is not Params4bit:
            return False
        return _in_bf16(self, getattr(weight, "quant_state", None), x, QuantState)

    def weight_state_bias(self: Any, on_cpu: bool) -> tuple[Tensor, Any, Tensor | None] | None:
        # Calls a later patch of the function that the original calls.
        if bitsandbytes.matmul_4bit is not ours:
            return None
        # torch.nn.Module looks in three places before it finds a parameter.
        own = self.__dict__
        parameters = own["_parameters"]
        weight = parameters.get("weight")
        if type(weight) is not Params4bit or not own.get("compute_type_is_set"):
            return None
        if on_cpu and self.support_avx512bf16_for_cpu:
            return None  # the original may change the layout
        state = getattr(weight, "quant_state", None)  # FSDP may have dropped it
        return weight, state, parameters["bias"] if "bias" in parameters else self.bias

    def operands(self: Any, x: Tensor) -> tuple[WeightParts, Tensor | None, torch.dtype] | None:
        on_cpu = x.is_cpu
        aside = is_dynamo_compiling() or (on_cpu and in_bf16(self, x))
        found = None if aside else weight_state_bias(self, on_cpu)
        if found is None:
            return None
        packed, state, bias = found
        frozen = not _private.any_requires_grad(packed)  # its own attribute calls Python
        weight = weight_of(x, packed, state) if frozen else None
        if weight is None:
            return None
        dtype = x.dtype if self.compute_dtype is None else self.compute_dtype
        return _kept(packed, weight), bias, dtype

    @functools.wraps(original)
    def forward(self: Any, x: Tensor) -> Tensor:
        on_cpu = x.is_cpu
        if on_cpu and in_bf16(self, x):
            return _rounded(self, x, ours)
        found = weight_state_bias(self, on_cpu)
        if found is None:
            return original(self, x)
        weight, state, bias = found
        dtype, wanted = x.dtype, self.compute_dtype
        casts = wanted is not None and wanted is not dtype
        y = product(x.to(wanted) if casts else x, weight, state, bias)
        if y is None:
            return original(self, x)
        return y.to(dtype) if casts else y

    forward.nf4_operands, forward.nf4_linear = operands, own_kernels.linear
    return forward
