"""The operators torch.ops.nf4.*: their schemas, and the shapes of what comes out.

    quantize(Tensor weight, Tensor? codebook, str format, int blocksize, int nested_blocksize)
        -> (Tensor packed, Tensor absmax, Tensor nested_absmax, Tensor nested_code,
            Tensor nested_offset)
    dequantize(WEIGHT, ScalarType dtype) -> Tensor
    linear(Tensor x, Tensor? bias, WEIGHT) -> Tensor
    linear_backward(Tensor grad_y, WEIGHT) -> Tensor

WEIGHT is ten arguments, as _weight.py says. These have kernels for autograd (_operators.py). Below
autograd a compiler's graph has two others, with the eleven arguments, in C++ where the extension
module was built. torch keeps compiled graphs on disk, so what an operator of one of their names
does must never change, nor its arguments.

    _linear(Tensor x, Tensor? bias, NUMBERS) -> Tensor
    _dense_like(Tensor like, NUMBERS) -> Tensor
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nf4.errors import InvalidArgument
from nf4.tensor import sizes
from nf4.torch._checks import require_device, require_float
from nf4.torch._weight import Spec, WeightParts

_TENSORS = (
    "Tensor packed, Tensor absmax, Tensor? nested_absmax, Tensor? nested_code, "
    "Tensor? nested_offset, Tensor? codebook"
)
_WEIGHT = f"{_TENSORS}, int[] shape, str format, int blocksize, int nested_blocksize"
_NUMBERS = f"{_TENSORS}, int rows, int cols, int format, int blocksize, int nested_blocksize"
_SCHEMAS = (
    "quantize(Tensor weight, Tensor? codebook, str format, int blocksize, int nested_blocksize) -> "
    "(Tensor packed, Tensor absmax, Tensor nested_absmax, Tensor nested_code, "
    "Tensor nested_offset)",
    f"dequantize({_WEIGHT}, ScalarType dtype) -> Tensor",
    f"linear(Tensor x, Tensor? bias, {_WEIGHT}) -> Tensor",
    f"linear_backward(Tensor grad_y, {_WEIGHT}) -> Tensor",
    f"_linear(Tensor x, Tensor? bias, {_NUMBERS}) -> Tensor",
    f"_dense_like(Tensor like, {_NUMBERS}) -> Tensor",
)

# It takes its registrations along when it goes.
library = torch.library.Library("nf4", "DEF")
for _schema in _SCHEMAS:
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

quantize = torch.ops.nf4.quantize.default
dequantize = torch.ops.nf4.dequantize.default
linear = torch.ops.nf4.linear.default
linear_backward = torch.ops.nf4.linear_backward.default
graph_linear = torch.ops.nf4._linear.default
graph_dense_like = torch.ops.nf4._dense_like.default


def require_operands(x: Tensor, bias: Tensor | None, weight: WeightParts) -> None:
    """x and bias fit the weight, and all is on one device."""
    rows, cols = weight.spec[:2]
    require_float("x", x.dtype)
    if x.dim() == 0 or x.shape[-1] != cols:
        raise InvalidArgument(f"x is of shape {tuple(x.shape)}; expected [..., {cols}]")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (rows,)):
        raise InvalidArgument(
            f"bias is {bias.dtype} of shape {tuple(bias.shape)}; expected {x.dtype} of ({rows},)"
        )
    require_device(x.device, "x", {"bias": bias, **weight.named()})


# ---- Fake kernels: shapes without values ----------------------------------------------


@torch.library.register_fake("nf4::quantize", lib=library)
def _fake_quantize(
    weight: Tensor, codebook: Tensor | None, format: str, blocksize: int, nested_blocksize: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    require_float("weight", weight.dtype)
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


@torch.library.register_fake("nf4::dequantize", lib=library)
def _fake_dequantize(*arguments: Any) -> Tensor:
    packed, *_, dtype = arguments
    require_float("dtype", dtype)
    return packed.new_empty(arguments[6], dtype=dtype)


@torch.library.register_fake("nf4::linear", lib=library)
def _fake_linear(x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
    parts = WeightParts.of_arguments(*weight)
    require_operands(x, bias, parts)
    return x.new_empty((*x.shape[:-1], parts.spec.rows))


@torch.library.register_fake("nf4::linear_backward", lib=library)
def _fake_linear_backward(grad_y: Tensor, *weight: Any) -> Tensor:
    require_float("grad_y", grad_y.dtype)
    return grad_y.new_empty((*grad_y.shape[:-1], Spec.of(*weight[6:]).cols))


@torch.library.register_fake("nf4::_linear", lib=library)
def _fake_graph_linear(x: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], numbers[6]))


@torch.library.register_fake("nf4::_dense_like", lib=library)
def _fake_graph_dense_like(like: Tensor, *numbers: Any) -> Tensor:
    return like.new_empty(numbers[6:8])
