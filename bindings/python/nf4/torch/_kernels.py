"""What the operators do on tensors with memory: the fast way, and where that does nothing the
functions of nf4, which name what is wrong."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import nf4
from nf4 import _torch
from nf4.torch import _fast, _paths
from nf4.torch._checks import DTYPES, require_device, require_float, require_like
from nf4.torch._schemas import Parts, require_operands
from nf4.torch._weight import WeightParts


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that Dynamo does not trace, as it would after a graph break. Importing
    torch._dynamo takes a second; while nothing has imported it, nothing is compiled."""
    disabled: list[Callable[..., Any]] = []

    def kernel(*arguments: Any) -> Any:
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return function(*arguments)
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*arguments)

    return kernel


def _threads(tensor: Tensor) -> int:
    """As many as torch's own kernels use; a GPU has no use for the number."""
    return 0 if tensor.is_cuda else torch.get_num_threads()


# ---- y = x W^T + bias ------------------------------------------------------------------


# Another library's kernel for the same weights, where one is loaded: what _fast.linear calls its
# peer.
peer: Callable[[Tensor, Tensor | None, Any], Tensor | None] | None = None


def fast_linear(x: Tensor, bias: Tensor | None, weight: Parts) -> Tensor | None:
    """Takes the fast way; returns None if nothing was done."""
    return _fast.linear(x, bias, weight, peer)


def linear(x: Tensor, bias: Tensor | None, weight: Parts) -> Tensor:
    """In the dtype of x."""
    y = fast_linear(x, bias, weight)
    return general_linear(x, bias, weight) if y is None else y


def general_linear(x: Tensor, bias: Tensor | None, weight: Parts) -> Tensor:
    """Does the same for x of any strides, with a message for each fault."""
    if takes_dense(x, weight):
        return dense_linear(x, bias, weight)
    require_device(x.device, "x", {"bias": bias, **weight.named()})
    if x.dim() > 0 and not _has_row_stride(x):
        x = x.contiguous()
    bias = None if bias is None else bias.detach().contiguous()
    return nf4.matmul(x.detach(), weight.quantized(), bias=bias, threads=_threads(x))


def linear_batch(
    x: Tensor, biases: Sequence[Tensor | None], weights: Sequence[Parts]
) -> tuple[Tensor, ...]:
    """linear of each of several weights."""
    return tuple(linear(x, *each) for each in zip(biases, weights, strict=True))


def takes_dense(x: Tensor, weight: Parts) -> bool:
    """Is a dense weight expected to be faster, on a GPU? False for an x with a fault."""
    if not x.is_cuda or x.dtype not in DTYPES or x.dim() == 0 or x.shape[-1] != weight.spec.cols:
        return False
    return _paths.prefers_dense(x, weight)


def dense_linear(x: Tensor, bias: Tensor | None, weight: Parts) -> Tensor:
    """The same by torch's linear with the dequantized weight."""
    require_operands(x, bias, weight)
    dense = dequantize(weight, x.dtype).view(weight.spec.rows, weight.spec.cols)
    return torch.nn.functional.linear(x, dense, bias)


def _has_row_stride(x: Tensor) -> bool:
    """Are the rows of x contiguous, and one distance apart that is no less than their length?"""
    cols = x.shape[-1]
    rows = x.shape[:-1].numel()
    if rows <= 1 or cols <= 1:
        return x.is_contiguous()
    try:
        stride = x.view(rows, cols).stride()
    except RuntimeError:
        return False
    return stride[1] == 1 and stride[0] >= cols


# ---- The gradient of x -----------------------------------------------------------------


def uses_fused_grad(grad_y: Tensor, weight: Parts, rank: int = 0) -> bool:
    """Is libnf4's own dY W, which makes no dense weight, expected to be at least as fast as
    dequantize and torch's product? rank: of an adapter, whose products libnf4 makes beside it."""
    if type(weight) is not WeightParts or grad_y.dtype not in DTYPES or grad_y.dim() == 0:
        return False
    if type(grad_y.numel()) is not int:  # asking would fix the sizes of a graph
        return not grad_y.is_cuda
    return not _paths.grad_prefers_dense(grad_y, weight, rank)


def uses_lora_grad(rank: int, grad_y: Tensor) -> bool:
    """On a GPU, is libnf4's kernel for dA and dB expected to be faster than two products?"""
    return not _paths.lora_grad_prefers_dense(grad_y.dtype, rank, grad_y.device.index)


_kept = threading.local()


def new_dense(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for one dense weight, until the next call. torch's CUDA allocator reuses it from layer
    to layer. Its CPU allocator returns it to the system, and getting it again takes longer than
    dequantizing, so it is kept here."""
    if device.type != "cpu":
        return torch.empty(rows, cols, dtype=dtype, device=device)  # a tuple takes twice as long
    needed = rows * cols * dtype.itemsize
    buffer = getattr(_kept, "buffer", None)
    if buffer is None or buffer.numel() < needed:
        _kept.buffer = None  # the smaller one need not be there beside the larger
        buffer = _kept.buffer = torch.empty(needed, dtype=torch.uint8)
    return buffer[:needed].view(dtype).view(rows, cols)


def _dense_beside(grad_y: Tensor, weight: Parts) -> Tensor:
    """Where to dequantize the weight to for a product with grad_y."""
    require_float("grad_y", grad_y.dtype)
    require_device(grad_y.device, "grad_y", {"packed": weight.packed})
    return new_dense(weight.spec.rows, weight.spec.cols, grad_y.dtype, grad_y.device)


def _fused(grad_y: Tensor, weight: Parts, *adapter: Any) -> Any:
    """_fast.linear_grad, for grad_y of any strides: that of a sum is one number, expanded."""
    made = _fast.linear_grad(grad_y, weight, *adapter)
    if made is None and not grad_y.is_contiguous():
        made = _fast.linear_grad(grad_y.contiguous(), weight, *adapter)
    return made


def fused_linear_grad(grad_y: Tensor, weight: Parts, *adapter: Any) -> Any:
    """What _fast.linear_grad makes; None where a dense weight is faster, too."""
    rank = adapter[0].shape[0] if adapter else 0
    return _fused(grad_y, weight, *adapter) if uses_fused_grad(grad_y, weight, rank) else None


def fast_linear_grad(grad_y: Tensor, weight: Parts) -> Tensor | None:
    """linear_grad, the fast way; None if nothing was done."""
    if type(grad_y) is not Tensor:
        return None
    if uses_fused_grad(grad_y, weight):
        return _fused(grad_y, weight)
    dense = new_dense(weight.spec.rows, weight.spec.cols, grad_y.dtype, grad_y.device)
    return torch.matmul(grad_y, dense) if _fast.dequantize(dense, weight) else None


def linear_grad(grad_y: Tensor, weight: Parts) -> Tensor:
    """grad_y W, with W dense for as long as this takes where that is faster."""
    if uses_fused_grad(grad_y, weight):
        return general_linear_grad(grad_y, weight)
    dense = _dense_beside(grad_y, weight)
    _dequantize_to(dense, weight)
    return torch.matmul(grad_y, dense)


def general_linear_grad(grad_y: Tensor, weight: Parts) -> Tensor:
    """grad_y W without a dense weight, for grad_y of any strides."""
    require_float("grad_y", grad_y.dtype)
    require_device(grad_y.device, "grad_y", weight.named())
    if not _has_row_stride(grad_y):
        grad_y = grad_y.contiguous()
    return nf4.matmul_grad(grad_y.detach(), weight.quantized(), threads=_threads(grad_y))


# ---- dequantize, quantize --------------------------------------------------------------


def _dequantize_to(out: Tensor, weight: Parts) -> None:
    if _fast.dequantize(out, weight):
        return
    require_device(weight.packed.device, "packed", {"out": out, **weight.named()})
    nf4.dequantize(weight.quantized(), out=out.detach(), threads=_threads(out))


def dequantize(weight: Parts, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The weight, dense, in a dtype. An `out` of the caller's has to be contiguous, and of this
    dtype and the weight's shape."""
    shape = weight.spec.shape
    if out is None:
        out = torch.empty(*shape, dtype=dtype, device=weight.packed.device)
        _dequantize_to(out, weight)
        return out
    require_like("out", out, dtype, shape)
    _dequantize_to(out, weight)
    _torch.tell_of_writes([out])
    return out


def quantize(
    weight: Tensor, codebook: Tensor | None, format: str, blocksize: int, nested_blocksize: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """packed, absmax, nested_absmax, nested_code and nested_offset; those that the weight does not
    have are empty. format: may have a scale_rule, as in _weight.py."""
    require_device(weight.device, "weight", {"codebook": codebook})
    name, _, rule = format.partition(":")
    made = nf4.quantize(
        weight.detach().contiguous(),
        format=name,
        scale_rule=rule or None,
        blocksize=blocksize,
        nested_blocksize=nested_blocksize,
        codebook=codebook,
        threads=_threads(weight),
    )
    if not made.nested:
        none = made.absmax.new_empty(0, dtype=torch.float32)
        scales = none if made.nested_absmax is None else made.nested_absmax
        return made.packed, made.absmax, scales, none.clone(), none.clone()
    # An operator must return new memory, and all weights share nested_code.
    code = made.nested_code.clone()
    return made.packed, made.absmax, made.nested_absmax, code, made.nested_offset


def quantize_int4(
    weight: Tensor, layout: str, group_size: int, symmetric: bool, scales_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """packed, scales and zeros, which are empty where there are none."""
    made = nf4.quantize_int4(
        weight.detach().contiguous(),
        layout=layout,
        group_size=group_size,
        symmetric=symmetric,
        scales_dtype=scales_dtype,
        threads=_threads(weight),
    )
    none = made.packed.new_empty(0)
    return made.packed, made.scales, none if made.zeros is None else made.zeros
