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
    """Like nf4.quantize, as an operator that torch.compile knows.

    weight            fp32, fp16 or bf16, of any shape and strides
    format            "nf4" or "fp4"
    blocksize         elements that share a scale
    nested_blocksize  scales that share a nested scale; 0: scales stay float32 (flat)
    codebook          float32 [16] in place of the format's own, on the device of weight

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
    """The weight, dense, of weight.shape: like nf4.dequantize, as an operator that torch.compile
    knows.

    weight  its parts are tensors
    dtype   "fp32", "fp16", "bf16" or torch's; by default that of the weight before it was quantized

    Raises what nf4.dequantize raises.
    """
    parts = WeightParts.of(weight)
    wanted = torch_dtype(weight.dtype if dtype is None else dtype)
    return _operators.dequantize(parts, wanted)


def linear(x: Tensor, weight: nf4.QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + bias, as torch.nn.functional.linear computes it for a dense weight.

    x       [..., cols] of fp32, fp16 or bf16, of any strides, on the weight's device. fp32 on a GPU
            needs a dense weight for the length of the call; nothing else does
    weight  [..., rows, cols]; its parts are tensors
    bias    [rows] in the dtype of x

    x and bias may require gradients, of any order; the weight is frozen. Under torch.autocast x and
    bias are cast first. The backward pass keeps the weight's parts, and dequantizes one weight at a
    time.

    Raises what nf4.matmul raises.
    """
    require_tensor("x", x)
    if bias is not None:
        require_tensor("bias", bias)
    return _operators.linear(x, bias, WeightParts.of(weight))
