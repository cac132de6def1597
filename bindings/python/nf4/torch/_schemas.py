"""The operators torch.ops.nf4.*: their schemas, and the shapes of what comes out.

    quantize(Tensor weight, Tensor? codebook, str format, int blocksize, int nested_blocksize)
        -> (Tensor packed, Tensor absmax, Tensor nested_absmax, Tensor nested_code,
            Tensor nested_offset)
    dequantize(WEIGHT, ScalarType dtype) -> Tensor
    linear(Tensor x, Tensor? bias, WEIGHT) -> Tensor
    linear_backward(Tensor grad_y, WEIGHT) -> Tensor
    quantize_int4(Tensor weight, str layout, int group_size, bool symmetric,
                  ScalarType scales_dtype) -> (Tensor packed, Tensor scales, Tensor zeros)

WEIGHT is ten arguments, as _weight.py says. These have kernels for autograd (_operators.py). Below
autograd a compiler's graph has three others, with the eleven arguments, in C++ where the extension
module was built. torch keeps compiled graphs on disk, so what an operator of one of their names
does must never change, nor its arguments.

    _linear(Tensor x, Tensor? bias, NUMBERS) -> Tensor
    _dense_like(Tensor like, NUMBERS) -> Tensor
    _linear_grad(Tensor grad_y, NUMBERS) -> Tensor

linear_batch2 and linear_batch3, and below autograd _linear_batch2 and _linear_batch3, do the same
for two or three weights that share x. They take all biases, then all weights, and give one y each.
_linear_columns2 and _linear_columns3 take the same, without gradients, and give one tensor in which
each y is a range of columns.

Those for integers, dequantize_int4, linear_int4, linear_backward_int4, _linear_int4 and
_dense_like_int4, have the arguments that _int4_weight.py says for WEIGHT and NUMBERS.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from nf4.errors import InvalidArgument
from nf4.int4 import int4_shapes, shape_of
from nf4.tensor import sizes
from nf4.torch._checks import require_device, require_float, require_like
from nf4.torch._int4_weight import Int4Parts
from nf4.torch._weight import Spec, WeightParts

Parts: TypeAlias = WeightParts | Int4Parts

_TENSORS = (
    "Tensor packed, Tensor absmax, Tensor? nested_absmax, Tensor? nested_code, "
    "Tensor? nested_offset, Tensor? codebook"
)
_INT4_TENSORS = "Tensor packed, Tensor scales, Tensor? zeros, Tensor? g_idx, Tensor? permutation"
_MATRIX = "int rows, int cols"
# For each kind of weight: the end of its operators' names, and the arguments for one weight.
_KINDS = {
    WeightParts: (
        "",
        f"{_TENSORS}, int[] shape, str format, int blocksize, int nested_blocksize",
        f"{_TENSORS}, {_MATRIX}, int format, int blocksize, int nested_blocksize",
    ),
    Int4Parts: (
        "_int4",
        f"{_INT4_TENSORS}, int[] shape, str layout, int group_size",
        f"{_INT4_TENSORS}, {_MATRIX}, int layout, int zero_offset, int group_size",
    ),
}
_QUANTIZE = (
    "quantize(Tensor weight, Tensor? codebook, str format, int blocksize, int nested_blocksize) -> "
    "(Tensor packed, Tensor absmax, Tensor nested_absmax, Tensor nested_code, "
    "Tensor nested_offset)",
    "quantize_int4(Tensor weight, str layout, int group_size, bool symmetric, "
    "ScalarType scales_dtype) -> (Tensor packed, Tensor scales, Tensor zeros)",
)

# It takes its registrations along when it goes.
library = torch.library.Library("nf4", "DEF")
define = functools.partial(library.define, tags=(torch.Tag.pt2_compliant_tag,))
for _schema in _QUANTIZE:
    define(_schema)


def weight_arguments(kind: type[Parts]) -> str:
    """The schema of a weight in a public operator."""
    return _KINDS[kind][1]


class Operators(NamedTuple):
    """Those of a kind of weight. Of integers there is no graph_linear_grad."""

    dequantize: Any
    linear: Any
    linear_backward: Any
    graph_linear: Any
    graph_dense_like: Any
    graph_linear_grad: Any = None


def _defined(suffix: str, weight: str, numbers: str) -> Operators:
    schemas = {
        "dequantize": f"{weight}, ScalarType dtype",
        "linear": f"Tensor x, Tensor? bias, {weight}",
        "linear_backward": f"Tensor grad_y, {weight}",
        "_linear": f"Tensor x, Tensor? bias, {numbers}",
        "_dense_like": f"Tensor like, {numbers}",
    }
    if suffix == "":
        schemas["_linear_grad"] = f"Tensor grad_y, {numbers}"
    for name, arguments in schemas.items():
        define(f"{name}{suffix}({arguments}) -> Tensor")
    return Operators(*(getattr(torch.ops.nf4, name + suffix).default for name in schemas))


class BatchOperators(NamedTuple):
    """Those of a kind of weight for several that share x."""

    linear: Any
    graph_linear: Any


def _numbered(arguments: str, count: int) -> str:
    """Schema arguments for each of `count` weights."""
    names = (f"{each}{i}" for i in range(count) for each in arguments.split(", "))
    return ", ".join(names)


def _defined_batch(count: int, suffix: str, weight: str, numbers: str) -> BatchOperators:
    names = (f"linear_batch{count}{suffix}", f"_linear_batch{count}{suffix}")
    results = ", ".join(["Tensor"] * count)
    for name, arguments in zip(names, (weight, numbers), strict=True):
        each = f"{_numbered('Tensor? bias', count)}, {_numbered(arguments, count)}"
        define(f"{name}(Tensor x, {each}) -> ({results})")
    return BatchOperators(*(getattr(torch.ops.nf4, name).default for name in names))


def _defined_columns(count: int) -> Any:
    """The operator of several weights whose outputs are columns of one tensor."""
    name = f"_linear_columns{count}"
    each = f"{_numbered('Tensor? bias', count)}, {_numbered(_KINDS[WeightParts][2], count)}"
    define(f"{name}(Tensor x, {each}) -> Tensor")
    return getattr(torch.ops.nf4, name).default


OPERATORS = {kind: _defined(*strings) for kind, strings in _KINDS.items()}
# Operators by the number of weights. C++ has the same numbers.
BATCHES = {
    kind: {count: _defined_batch(count, *strings) for count in (2, 3)}
    for kind, strings in _KINDS.items()
}
COLUMNS = {count: _defined_columns(count) for count in (2, 3)}
quantize = torch.ops.nf4.quantize.default
quantize_int4 = torch.ops.nf4.quantize_int4.default
dequantize, linear, linear_backward, graph_linear, graph_dense_like, graph_linear_grad = OPERATORS[
    WeightParts
]


def require_operands(x: Tensor, bias: Tensor | None, weight: Parts) -> None:
    """x and bias fit the weight, and all is on one device."""
    rows, cols = weight.spec[:2]
    require_float("x", x.dtype)
    if x.dim() == 0 or x.shape[-1] != cols:
        raise InvalidArgument(f"x is of shape {tuple(x.shape)}; expected [..., {cols}]")
    require_like("bias", bias, x.dtype, (rows,))
    require_device(x.device, "x", {"bias": bias, **weight.named()})


# ---- Fake kernels: shapes without values ----------------------------------------------


@torch.library.register_fake("nf4::quantize", lib=library)
def _fake_quantize(
    weight: Tensor, codebook: Tensor | None, format: str, blocksize: int, nested_blocksize: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    require_float("weight", weight.dtype)
    spec = Spec.of(weight.shape, format, blocksize, nested_blocksize)
    counts = sizes(
        weight.shape, format=spec.name, blocksize=blocksize, nested_blocksize=nested_blocksize
    )
    as_bytes = spec.scale_bytes or nested_blocksize != 0
    nested = as_bytes and not spec.scale_bytes
    return (
        weight.new_empty(counts.packed_bytes, dtype=torch.uint8),
        weight.new_empty(counts.blocks, dtype=torch.uint8 if as_bytes else torch.float32),
        weight.new_empty(counts.nested_blocks, dtype=torch.float32),
        weight.new_empty(256 if nested else 0, dtype=torch.float32),
        weight.new_empty(() if nested else 0, dtype=torch.float32),
    )


@torch.library.register_fake("nf4::quantize_int4", lib=library)
def _fake_quantize_int4(
    weight: Tensor, layout: str, group_size: int, symmetric: bool, scales_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    require_float("weight", weight.dtype)
    experts = weight.shape[:1] if weight.dim() == 3 else ()
    shape = shape_of(weight.shape[len(experts) :], "the shape of weight")
    shapes = int4_shapes(layout, shape, group_size)
    has_zeros = not symmetric or layout != "compressed-tensors"
    return (
        weight.new_empty((*experts, *shapes.packed), dtype=torch.int32),
        weight.new_empty((*experts, *shapes.scales), dtype=scales_dtype),
        weight.new_empty((*experts, *shapes.zeros) if has_zeros else 0, dtype=torch.int32),
    )


def _fake_dequantize(kind: type[Parts], *arguments: Any) -> Tensor:
    *weight, dtype = arguments
    require_float("dtype", dtype)
    parts = kind.of_arguments(*weight)
    return parts.packed.new_empty(parts.spec.shape, dtype=dtype)


def _fake_linear(kind: type[Parts], x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
    parts = kind.of_arguments(*weight)
    require_operands(x, bias, parts)
    return x.new_empty((*x.shape[:-1], parts.spec.rows))


def _fake_linear_backward(kind: type[Parts], grad_y: Tensor, *weight: Any) -> Tensor:
    require_float("grad_y", grad_y.dtype)
    return grad_y.new_empty((*grad_y.shape[:-1], kind.of_arguments(*weight).spec.cols))


def _fake_graph_linear(kind: type[Parts], x: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], numbers[len(kind.names)]))


def _fake_graph_dense_like(kind: type[Parts], like: Tensor, *numbers: Any) -> Tensor:
    first = len(kind.names)
    return like.new_empty(numbers[first : first + 2])


def _fake_graph_linear_grad(kind: type[Parts], grad_y: Tensor, *numbers: Any) -> Tensor:
    return grad_y.new_empty((*grad_y.shape[:-1], numbers[len(kind.names) + 1]))


_FAKES = Operators(
    _fake_dequantize,
    _fake_linear,
    _fake_linear_backward,
    _fake_graph_linear,
    _fake_graph_dense_like,
    _fake_graph_linear_grad,
)


def taken_apart(
    count: int, make: Callable[..., Parts], arguments: Sequence[Any]
) -> tuple[tuple[Tensor | None, ...], tuple[Parts, ...]]:
    """The biases and weights of a batch operator's arguments after x. make: of_arguments or
    of_numbers of the kind of weight."""
    biases, rest = tuple(arguments[:count]), arguments[count:]
    size = len(rest) // count
    return biases, tuple(make(*rest[i * size : (i + 1) * size]) for i in range(count))


def _fake_linear_batch(
    kind: type[Parts], count: int, x: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    biases, weights = taken_apart(count, kind.of_arguments, arguments)
    for bias, weight in zip(biases, weights, strict=True):
        require_operands(x, bias, weight)
    return tuple(x.new_empty((*x.shape[:-1], weight.spec.rows)) for weight in weights)


def _fake_graph_linear_batch(
    kind: type[Parts], count: int, x: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    size = (len(arguments) - count) // count
    rows = arguments[count + len(kind.names) :: size]
    return tuple(x.new_empty((*x.shape[:-1], each)) for each in rows)


def _fake_linear_columns(count: int, x: Tensor, *arguments: Any) -> Tensor:
    outputs = _fake_graph_linear_batch(WeightParts, count, x, *arguments)
    return x.new_empty((*x.shape[:-1], sum(each.shape[-1] for each in outputs)))


for _count, _operator in COLUMNS.items():
    _of_count = functools.partial(_fake_linear_columns, _count)
    torch.library.register_fake(_operator, _of_count, lib=library)
for _kind, _batches in BATCHES.items():
    for _count, (_linear, _graph_linear) in _batches.items():
        for _operator, _fake in (
            (_linear, _fake_linear_batch),
            (_graph_linear, _fake_graph_linear_batch),
        ):
            _of_count = functools.partial(_fake, _kind, _count)
            torch.library.register_fake(_operator, _of_count, lib=library)
for _kind, _operators in OPERATORS.items():
    for _operator, _fake in zip(_operators, _FAKES, strict=True):
        if _operator is not None:
            torch.library.register_fake(_operator, functools.partial(_fake, _kind), lib=library)
