"""quantize_int4: a dense weight to 4-bit integers; reorder: the columns of one with act order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar, cast, overload

import numpy as np

from nf4 import _call, _convert
from nf4._operand import Operand, on_device, read
from nf4._options import QuantizeInt4, Unpack
from nf4._prepared import Prepared, prepare
from nf4._quantize import QUANTIZE_NAMES, part_maker, require_agreement
from nf4.errors import InvalidArgument, kind_of, shown
from nf4.int4 import Int4Tensor, int4_shapes, scales_dtype_of, shape_of
from nf4.typing import Array, ArrayLike, CudaStreamLike, DTypeLike, Int4Layout, MemoryLike
from nf4.weight import Packed, no_weight

Into = TypeVar("Into", bound=Int4Tensor[Any])

_DEFAULT_LAYOUT: dict[str, Any] = {"layout": "gptq", "group_size": 128}
_KIND = "an Int4Tensor"
_SORTED = ("packed", "permutation")  # the parts that reorder writes
# The caller's names for arguments that have others in C.
_REORDER_NAMES = {f"{name} of `to`": f"{name} of out" for name in _SORTED}


def _prepare(weight: Any, name: str) -> Prepared:
    if not isinstance(weight, Int4Tensor):
        raise no_weight(name, weight, _KIND)
    return prepare(weight, name)


def _new_weight(
    source: Operand, given: dict[str, Any], symmetric: bool, stream: int | None
) -> Int4Tensor[Any]:
    """An uninitialised weight where the source is, with the shapes of a checkpoint."""
    empty, dtype = part_maker(source, stream, _KIND), source.require_float()
    given = _DEFAULT_LAYOUT | {key: value for key, value in given.items() if value is not None}
    scales_dtype = given.setdefault("scales_dtype", "fp16" if dtype == "fp32" else dtype)
    _convert.int4_layout(given["layout"])
    shape = source.shape or ()
    experts = shape[:1] if len(shape) == 3 else ()
    rows, cols = shape_of(shape[len(experts) :], "the shape of array")
    given["group_size"] = _convert.integer("group_size", given["group_size"], 32)
    shapes = int4_shapes(given["layout"], (rows, cols), given["group_size"])
    # Checkpoints of GPTQ and AWQ have zeros in any case.
    has_zeros = not symmetric or given["layout"] != "compressed-tensors"
    return Int4Tensor(
        shape=shape,
        packed=empty((*experts, *shapes.packed), "int32"),
        scales=empty((*experts, *shapes.scales), scales_dtype),
        zeros=empty((*experts, *shapes.zeros), "int32") if has_zeros else None,
        **given,
    )


@overload  # the first that fits is taken: tensors are ArrayLike, too
def quantize_int4(  # type: ignore[overload-overlap]
    array: Array, *, out: None = ..., **options: Unpack[QuantizeInt4]
) -> Int4Tensor[Array]: ...


@overload
def quantize_int4(
    array: ArrayLike, *, out: None = ..., **options: Unpack[QuantizeInt4]
) -> Int4Tensor[np.ndarray]: ...


@overload
def quantize_int4(array: MemoryLike, *, out: Into, **options: Unpack[QuantizeInt4]) -> Into: ...


def quantize_int4(
    array: MemoryLike,
    *,
    layout: Int4Layout | None = None,
    group_size: int | None = None,
    symmetric: bool = True,
    scales_dtype: DTypeLike | None = None,
    threads: int = 0,
    out: Int4Tensor[Any] | None = None,
    stream: CudaStreamLike | None = None,
) -> Int4Tensor[Any]:
    """Quantizes a weight [rows, cols], or a stack of experts [experts, rows, cols], in fp32, fp16
    or bf16 to 4-bit integers by rounding to nearest. (The methods GPTQ and AWQ use activations to
    choose better integers.)

    array         as for quantize; an address, with `out`, is of memory in the dtype of out's scales
    layout        "gptq" (the default), "gptq_v2", "awq" or "compressed-tensors"
    group_size    columns that share a scale: a multiple of 8 that divides cols, 128 by default;
                  -1: all columns
    symmetric     True: scale = 2 max|x| / 15 and all zero points are 8; "compressed-tensors" then
                  has no array of zero points. False: scale = (max(x, 0) - min(x, 0)) / 15 and
                  zero = -min(x, 0) / scale
    scales_dtype  "fp16" or "bf16"; by default the dtype of the array, or fp16 for fp32
    threads, stream  as for quantize
    out           where to write, without g_idx and permutation; its layout, group_size and
                  scales_dtype are the defaults. It is required in the same cases as for quantize

    Returns `out`, or a new Int4Tensor. Raises the errors of quantize.
    """
    source = read("array", array).require_contiguous()
    given: dict[str, Any] = {"layout": layout, "group_size": group_size}
    if scales_dtype is not None:
        given["scales_dtype"] = scales_dtype_of(scales_dtype)
    if not isinstance(symmetric, (bool, np.bool_)):
        raise InvalidArgument(f"symmetric is {shown(symmetric)}; expected True or False")
    threads, handle = _call.read_options(threads, stream)
    if out is None:
        out = _new_weight(source, given, bool(symmetric), handle)
    if isinstance(out, Int4Tensor) and out.is_stack:
        require_agreement(out, given | {"shape": source.shape})
        for index, each in enumerate(_experts_of(array, source, out)):
            quantize_int4(
                each, symmetric=symmetric, out=out.expert(index), threads=threads, stream=stream
            )
        return out
    weight = _prepare(out, "out")
    require_agreement(out, given | {"shape": source.shape})
    if out.zeros is None and not symmetric:
        raise InvalidArgument("symmetric is False; expected True, as out has no zeros")
    for name in ("g_idx", "permutation"):
        if getattr(out, name) is not None:
            raise InvalidArgument(f"out has {name}; expected one without")
    written = [part.require_writable() for part in weight.parts]
    dtype = out.dtype if source.dtype is None else source.require_float()
    problem = _call.Problem(
        weight.functions.quantize,
        (source.address, _convert.DTYPES[dtype], weight.argument, int(symmetric)),
        on_device(source, weight.located),
        source.torch or weight.torch,
        out,
        QUANTIZE_NAMES,
        written=tuple(part.owner for part in written),
    )
    return _call.run(problem, threads, handle)


def _experts_of(array: MemoryLike, source: Operand, out: Int4Tensor[Any]) -> Iterable[Any]:
    """Each expert's part of a stack. Raises InvalidArgument."""
    if source.shape is None:  # an address, of 16 bits
        experts, rows, cols = out.shape
        return [source.address + 2 * rows * cols * expert for expert in range(experts)]
    if not hasattr(array, "__getitem__"):
        raise InvalidArgument(
            f"array is {kind_of(array)} of shape {source.shape}; expected an array or tensor that "
            f"can be indexed by expert"
        )
    return cast(Iterable[Any], array)


def reorder(
    weight: Int4Tensor[Packed],
    *,
    out: Int4Tensor[Packed] | None = None,
    threads: int = 0,
    stream: CudaStreamLike | None = None,
) -> Int4Tensor[Packed]:
    """Sorts the columns of a weight with g_idx (act order) by their group, once, so that `matmul`
    reads whole groups. matmul takes the same x as before, and gathers its columns by `permutation`.

    out              where to write its packed and permutation. Its scales and zeros are those of
                     the weight or equal to them, and it has no g_idx. By default packed and
                     permutation are new memory, and the other parts are those of the weight. It is
                     required in the same cases as for quantize
    threads, stream  as for quantize

    Returns `out`, or a new Int4Tensor. Raises the errors of quantize.
    """
    source = _prepare(weight, "weight")
    if weight.g_idx is None or weight.permutation is not None:
        has = "no g_idx" if weight.g_idx is None else "a permutation"
        raise InvalidArgument(f"weight has {has}; expected g_idx alone")
    threads, handle = _call.read_options(threads, stream)
    if out is None:
        empty = part_maker(source.parts[0], handle, _KIND)
        packed = empty(weight.shapes.packed, "int32")
        permutation = empty(weight.shape[1:], "int32")
        out = dataclasses.replace(weight, packed=packed, g_idx=None, permutation=permutation)
    target = _prepare(out, "out")
    require_agreement(
        out, {name: getattr(weight, name) for name in ("layout", "shape", "group_size", "dtype")}
    )
    if out.g_idx is not None or out.permutation is None:
        has = "no permutation" if out.permutation is None else "g_idx"
        raise InvalidArgument(f"out has {has}; expected a permutation alone")
    if (out.zeros is None) != (weight.zeros is None):
        raise InvalidArgument("only one of out and weight has zeros; expected both or neither")
    written = [part.require_writable() for part in target.parts if part.name in _SORTED]
    problem = _call.Problem(
        source.functions.reorder,
        (source.argument, target.argument),
        on_device(source.located, target.located),
        source.torch or target.torch,
        out,
        _REORDER_NAMES,
        written=tuple(part.owner for part in written),
    )
    return _call.run(problem, threads, handle)
