"""quantize, quantize_int4, dequantize, linear and linear_grouped on torch tensors. They call the
operators torch.ops.nf4.*."""

from __future__ import annotations

import torch
from torch import Tensor

import nf4
from nf4 import _convert, _torch
from nf4._formats import SCALE_RULES, has_global_scales
from nf4.errors import InvalidArgument, shown
from nf4.torch import _operators, _operators_grouped, _schemas
from nf4.torch._checks import (
    require_dense,
    require_device,
    require_tensor,
    torch_dtype,
)
from nf4.torch._int4_weight import Int4Parts, Int4Stack
from nf4.torch._schemas import Parts
from nf4.torch._weight import WeightParts, with_rule
from nf4.typing import DTypeLike, FormatName, Int4Layout, ScaleRuleName
from nf4.weight import no_weight


def _parts_of(weight: nf4.Weight) -> Parts:
    if isinstance(weight, nf4.QuantizedTensor):
        return WeightParts.of(weight)
    if isinstance(weight, nf4.Int4Tensor):
        return Int4Parts.of(weight)
    raise no_weight("weight", weight)


def quantize(
    weight: Tensor,
    *,
    format: FormatName = "nf4",
    blocksize: int | None = None,
    nested_blocksize: int | None = None,
    scale_rule: ScaleRuleName | None = None,
    codebook: Tensor | None = None,
) -> nf4.QuantizedTensor:
    """Like nf4.quantize, as an operator that torch.compile can trace.

    weight            fp32, fp16 or bf16, of any shape and strides
    format            "nf4", "fp4", "mxfp4" or "nvfp4"
    blocksize, nested_blocksize, scale_rule
                      as for nf4.quantize, with the same defaults
    codebook          float32 [16] on the device of weight, instead of the format's own

    Raises what nf4.quantize raises.
    """
    require_dense("weight", weight)
    if codebook is not None:
        require_tensor("codebook", codebook)
        require_device(weight.device, "weight", {"codebook": codebook})
    blocksize, nested_blocksize = _convert.blocksizes(format, blocksize, nested_blocksize)
    packed, absmax, nested_absmax, nested_code, nested_offset = _schemas.quantize(
        weight, codebook, with_rule(format, scale_rule), blocksize, nested_blocksize
    )
    nested = nested_blocksize != 0 and format not in SCALE_RULES
    return nf4.QuantizedTensor(
        packed=packed,
        absmax=absmax,
        nested_absmax=nested_absmax if nested or has_global_scales(format) else None,
        nested_code=nested_code if nested else None,
        nested_offset=nested_offset if nested else None,
        codebook=codebook,
        format=format,
        blocksize=blocksize,
        nested_blocksize=nested_blocksize,
        scale_rule=scale_rule,
        shape=tuple(weight.shape),
        dtype=_torch.dtype_name(weight.dtype),
    )


def int4_scales_dtype(given: DTypeLike | None, dtype: torch.dtype) -> torch.dtype:
    """Returns torch's dtype for the scales; by default that of the weight, or fp16 for fp32."""
    if given is None:
        return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    wanted = torch_dtype(given, "scales_dtype")
    if wanted == torch.float32:
        raise InvalidArgument(f'scales_dtype is {shown(given)}; expected "fp16" or "bf16"')
    return wanted


def quantize_int4(
    weight: Tensor,
    *,
    layout: Int4Layout = "gptq",
    group_size: int = 128,
    symmetric: bool = True,
    scales_dtype: DTypeLike | None = None,
) -> nf4.Int4Tensor:
    """Like nf4.quantize_int4, as an operator that torch.compile can trace.

    weight        fp32, fp16 or bf16 [rows, cols], or [experts, rows, cols], of any strides
    layout        "gptq", "gptq_v2", "awq" or "compressed-tensors"
    group_size    columns that share a scale; -1: all
    symmetric     all zero points are 8
    scales_dtype  "fp16" or "bf16"; by default that of weight, or fp16 for fp32

    Raises what nf4.quantize_int4 raises.
    """
    require_dense("weight", weight)
    wanted = int4_scales_dtype(scales_dtype, weight.dtype)
    _convert.int4_layout(layout)
    group_size = _convert.integer("group_size", group_size, 32)
    if not isinstance(symmetric, bool):
        raise InvalidArgument(f"symmetric is {shown(symmetric)}; expected True or False")
    packed, scales, zeros = _schemas.quantize_int4(weight, layout, group_size, symmetric, wanted)
    has_zeros = not symmetric or layout != "compressed-tensors"
    return nf4.Int4Tensor(
        layout=layout,
        shape=tuple(weight.shape),
        group_size=group_size,
        packed=packed,
        scales=scales,
        zeros=zeros if has_zeros else None,
    )


def dequantize(weight: nf4.Weight, dtype: DTypeLike | None = None) -> Tensor:
    """Returns the dense weight, of weight.shape. Like nf4.dequantize, as an operator that
    torch.compile can trace.

    weight  a QuantizedTensor or an Int4Tensor; its parts are tensors
    dtype   "fp32", "fp16", "bf16" or torch's; by default that of the weight before it was
            quantized, or of an Int4Tensor's scales

    Raises what nf4.dequantize raises.
    """
    parts = _parts_of(weight)
    wanted = torch_dtype(weight.dtype if dtype is None else dtype)
    return _operators.dequantize(parts, wanted)


def linear(x: Tensor, weight: nf4.Weight, bias: Tensor | None = None) -> Tensor:
    """Computes y = x W^T + bias, like torch.nn.functional.linear for a dense weight.

    x       fp32, fp16 or bf16 [..., cols], of any strides, on the weight's device. The call makes a
            temporary dense weight for fp32 on a GPU, and only for that
    weight  [..., rows, cols], a QuantizedTensor or an Int4Tensor; its parts are tensors
    bias    [rows] in the dtype of x

    x and bias may require gradients, of any order; the weight is frozen. Under torch.autocast x and
    bias are cast first. The weight's parts are kept for the backward pass, which dequantizes one
    weight at a time.

    Raises what nf4.matmul raises.
    """
    require_tensor("x", x)
    if bias is not None:
        require_tensor("bias", bias)
    return _operators.linear(x, bias, _parts_of(weight))


def linear_grouped(
    x: Tensor,
    weight: nf4.Weight,
    ends: Tensor,
    *,
    x_index: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiplies rows of x by a stack of experts, like nf4.matmul_grouped: row i of y is
    x[x_index[i]] W[e]^T + bias[e], where `ends` gives the row's expert e.

    x        fp32, fp16 or bf16 [x_rows, cols], on the weight's device. fp32 on a GPU makes a
             temporary dense stack
    weight   a QuantizedTensor or an Int4Tensor of shape [experts, rows, cols]; its parts are
             tensors
    ends     int32 [experts]: where each expert's rows of y end
    x_index  int32 [m]: the row of x for each row of y. None: row i of x for row i of y
    bias     [experts, rows] in the dtype of x

    x and bias may require gradients, of any order; the weight is frozen. The backward pass of an
    Int4Tensor makes temporary dense experts; on a GPU in bf16, all of them at once. On a GPU, two
    cases wait for `ends` and cannot be captured in a CUDA graph: fp32, and that backward pass in
    fp16 or with rows or cols that are not multiples of 8. Under torch.autocast x and bias are cast
    first.

    Returns [m, rows]; rows past the last end are unspecified. Raises what nf4.matmul_grouped
    raises.
    """
    for name, given in (("x", x), ("ends", ends), ("x_index", x_index), ("bias", bias)):
        if given is not None or name in ("x", "ends"):
            require_tensor(name, given)
    integers = isinstance(weight, nf4.Int4Tensor)
    parts = Int4Stack.of(weight) if integers else WeightParts.of(weight)
    return _operators_grouped.linear_grouped(x, ends, x_index, bias, parts)
