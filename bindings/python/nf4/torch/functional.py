"""quantize, dequantize and linear on torch tensors, through the operators torch.ops.nf4.*."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import nf4
from nf4 import _convert, _torch
from nf4.errors import InvalidArgument, kind_of
from nf4.tensor import no_weight
from nf4.torch import _kernels, _operators  # noqa: F401  the import registers the operators

_DTYPES = dict(zip(("fp32", "fp16", "bf16"), _kernels.DTYPES, strict=True))
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def torch_dtype(dtype: Any, argument: str = "dtype") -> torch.dtype:
    """torch's dtype for "fp32", "fp16", "bf16", or a numpy or torch dtype. `argument` is the
    caller's, for messages."""
    if isinstance(dtype, torch.dtype) and dtype in _NAMES:
        return dtype
    if isinstance(dtype, str) and dtype in _DTYPES:  # which a compiler can follow
        return _DTYPES[dtype]
    return _DTYPES[_convert.dtype_name(dtype, argument)]


def require_tensor(name: str, given: Any) -> None:
    if not isinstance(given, Tensor):
        raise InvalidArgument(f"{name} is {kind_of(given)}; expected a torch tensor")
    if given.layout is not torch.strided:
        raise InvalidArgument(f"{name} is of layout {given.layout}; expected torch.strided")


def require_dense(name: str, given: Any) -> None:
    """A weight that can be quantized."""
    require_tensor(name, given)
    _kernels.require_float(name, given.dtype)


def arguments(weight: nf4.QuantizedTensor) -> tuple[Any, ...]:
    """The ten arguments by which the operators know a weight."""
    if not isinstance(weight, nf4.QuantizedTensor):
        raise no_weight("weight", weight)
    parts = tuple(getattr(weight, name) for name in _kernels.PARTS)
    for name, part in zip(_kernels.PARTS, parts, strict=True):
        if part is not None:
            require_tensor(name, part)
    return (
        *parts,
        list(weight.shape),
        weight.format,
        weight.blocksize,
        weight.nested_blocksize,
    )


def quantize(
    weight: Tensor,
    *,
    format: str = "nf4",
    blocksize: int = 64,
    nested_blocksize: int = 256,
    codebook: Tensor | None = None,
) -> nf4.QuantizedTensor:
    """As nf4.quantize, of a tensor of any strides, and for torch.compile to see.

    Raises what nf4.quantize raises.
    """
    require_dense("weight", weight)
    if codebook is not None:
        require_tensor("codebook", codebook)
        _kernels.require_device(weight.device, "weight", {"codebook": codebook})
    _convert.format_code(format)
    blocksize = _convert.integer("blocksize", blocksize, 32)
    nested_blocksize = _convert.integer("nested_blocksize", nested_blocksize, 32)
    packed, absmax, nested_absmax, nested_code, nested_offset = torch.ops.nf4.quantize.default(
        weight, codebook, format, blocksize, nested_blocksize
    )
    nested = nested_blocksize != 0
    return nf4.QuantizedTensor(
        packed=packed,
        absmax=absmax,
        nested_absmax=nested_absmax if nested else None,
        nested_code=nested_code if nested else None,
        nested_offset=nested_offset if nested else None,
        codebook=codebook,
        format=format,
        blocksize=blocksize,
        nested_blocksize=nested_blocksize,
        shape=tuple(weight.shape),
        dtype=_torch.dtype_name(weight.dtype),
    )


def dequantize(weight: nf4.QuantizedTensor, dtype: Any = None) -> Tensor:
    """As nf4.dequantize, for torch.compile to see.

    dtype  "fp32", "fp16", "bf16" or torch's; by default that of the weight before it was quantized

    Raises what nf4.dequantize raises.
    """
    given = arguments(weight)
    wanted = torch_dtype(weight.dtype if dtype is None else dtype)
    return torch.ops.nf4.dequantize.default(*given, wanted)


def linear(x: Tensor, weight: nf4.QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + bias, as torch.nn.functional.linear computes it for a dense weight.

    x       [..., cols] of fp32, fp16 or bf16, of any strides, where the weight is. fp32 on a GPU
            takes a dense weight for as long as the call lasts; all else does not
    weight  its parts are tensors
    bias    [rows] in the dtype of x

    Gradients go to x and to the bias, of any order; the weight is frozen. Under torch.autocast x
    and bias are cast first. What the backward pass keeps are the weight's parts, and it makes the
    weight dense, for one layer at a time.

    Raises what nf4.matmul raises.
    """
    require_tensor("x", x)
    if bias is not None:
        require_tensor("bias", bias)
    return torch.ops.nf4.linear.default(x, bias, *arguments(weight))
