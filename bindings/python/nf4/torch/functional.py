"""quantize, dequantize and linear on torch tensors, through the operators torch.ops.nf4.*."""

from __future__ import annotations

from torch import Tensor

import nf4
from nf4 import _convert, _torch
from nf4.torch import _operators, _schemas
from nf4.torch._checks import (
    require_dense,
    require_device,
    require_tensor,
    torch_dtype,
)
from nf4.torch._weight import WeightParts
from nf4.typing import DTypeLike, FormatName


def quantize(
    weight: Tensor,
    *,
    format: FormatName = "nf4",
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
        require_device(weight.device, "weight", {"codebook": codebook})
    _convert.format_code(format)
    blocksize = _convert.integer("blocksize", blocksize, 32)
    nested_blocksize = _convert.integer("nested_blocksize", nested_blocksize, 32)
    packed, absmax, nested_absmax, nested_code, nested_offset = _schemas.quantize(
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


def dequantize(weight: nf4.QuantizedTensor, dtype: DTypeLike | None = None) -> Tensor:
    """As nf4.dequantize, for torch.compile to see.

    dtype  "fp32", "fp16", "bf16" or torch's; by default that of the weight before it was quantized

    Raises what nf4.dequantize raises.
    """
    parts = WeightParts.of(weight)
    wanted = torch_dtype(weight.dtype if dtype is None else dtype)
    return _operators.dequantize(parts, wanted)


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
    return _operators.linear(x, bias, WeightParts.of(weight))
