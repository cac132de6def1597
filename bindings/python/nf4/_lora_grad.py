"""lora_grad: the gradients of an adapter's A and B."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat, overload

import numpy as np

from nf4 import _abi, _call, _convert
from nf4._load import functions
from nf4._operand import Operand, on_device, read, read_array
from nf4._options import LoraGrad, Unpack
from nf4.errors import InvalidArgument, kind_of
from nf4.typing import Array, ArrayLike, CudaStreamLike, DTypeLike, MemoryLike

_A, _B = "out[0]", "out[1]"  # the outputs
# The caller's names for what has others in C.
_NAMES = {
    "dy": "grad_y",
    "da": _A,
    "db": _B,
    "m * rank": "rows * columns of p or q",
    "m * x_stride": "rows * stride of x",
    "m * dy_stride": "rows * stride of grad_y",
    "rank * da_stride": f"rank * stride of {_A}",
    "rows * db_stride": f"rows * stride of {_B}",
}


class _Side(NamedTuple):
    """One of the two gradients: the argument of [..., columns] and that of [..., rank] which it is
    made of, its output, and C's names for the number of columns, the first argument and the
    output."""

    wide: str
    narrow: str
    out: str
    columns: str
    wide_in_c: str
    out_in_c: str


_SIDES = (
    _Side("x", "q", _A, "cols", "x", "da"),
    _Side("grad_y", "p", _B, "rows", "dy", "db"),
)


def _read_given(given: Mapping[str, ArrayLike | None]) -> dict[str, Operand]:
    """What is not None: x and q, grad_y and p, or all of them; of one dtype, number of rows and
    rank."""
    for side in _SIDES:
        for name, other in ((side.wide, side.narrow), (side.narrow, side.wide)):
            if given[name] is None and given[other] is not None:
                raise InvalidArgument(f"{name} is None, but {other} is not; expected both or none")
    found: dict[str, Operand] = {}
    torch = None
    for name, value in given.items():
        if value is not None:
            found[name] = read_array(name, value, torch)
            torch = torch or found[name].torch
            if not found[name].shape:
                raise InvalidArgument(f"{name} is of shape (); expected one dimension or more")
    if not found:
        raise InvalidArgument("x and grad_y are None; expected x and q, grad_y and p, or all four")
    like, first = next(iter(found.items()))
    dtype, rows = first.require_float(), math.prod(first.shape[:-1])
    rank = found["p" if "p" in found else "q"].shape[-1]
    for name, each in found.items():
        if each.dtype != dtype:
            raise InvalidArgument(f"{name} is of {each.dtype}; expected {dtype}, as {like} is")
        expected = None
        if math.prod(each.shape[:-1]) != rows:
            expected = f"{rows} rows, as {like} has"
        elif name in ("p", "q") and each.require_contiguous().shape[-1] != rank:
            expected = f"{rank} columns, as p has"
        if expected:
            raise InvalidArgument(f"{name} is of shape {each.shape}; expected {expected}")
    return found


def _outs_of(out: Sequence[MemoryLike | None] | None) -> dict[str, MemoryLike | None]:
    if out is None:
        return {_A: None, _B: None}
    if not isinstance(out, Sequence):
        raise InvalidArgument(f"out is {kind_of(out)}; expected a list of two")
    if len(out) != 2:
        raise InvalidArgument(f"out has {len(out)} elements; expected 2")
    return dict(zip((_A, _B), out, strict=True))


def _grad_dtype(dtype: DTypeLike | None, outs: Iterable[Operand], of_x: str) -> tuple[str, str]:
    """The dtype of the gradients, and the argument that says so."""
    if dtype is not None:
        found, source = _convert.dtype_name(dtype), "dtype"
    else:
        known = ((out.dtype, out.name) for out in outs if out.dtype is not None)
        found, source = next(known, (of_x, "x"))
    if found not in (of_x, "fp32"):
        wanted = "fp32" if of_x == "fp32" else f"fp32 or {of_x}"
        raise InvalidArgument(f"{source} is {found}; expected {wanted}")
    return found, source


def _problem_of(
    given: Mapping[str, ArrayLike | None],
    scale: SupportsFloat,
    dtype: DTypeLike | None,
    outs: Mapping[str, MemoryLike | None],
    stream: int | None,
) -> _call.Problem:
    """Reads and checks the arguments, and makes the gradients that are asked for and not given."""
    found = _read_given(given)
    first, torch = next(iter(found.values())), _torch_of(found.values())
    for side in _SIDES:
        if outs[side.out] is not None and side.wide not in found:
            sources = f"{side.wide} and {side.narrow}"
            raise InvalidArgument(f"{side.out} is given; expected None, as {sources} are")
    written = {name: read(name, out, torch) for name, out in outs.items() if out is not None}
    grad_dtype, source = _grad_dtype(dtype, written.values(), str(first.dtype))
    args = _abi.LoraGradArgs(
        struct_size=ctypes.sizeof(_abi.LoraGradArgs),
        dtype=_convert.DTYPES[str(first.dtype)],
        grad_dtype=_convert.DTYPES[grad_dtype],
        rank=_convert.integer("the rank", found["p" if "p" in found else "q"].shape[-1], 32),
        scale=_convert.real("scale", scale),
        m=_convert.integer("the number of rows", math.prod(first.shape[:-1]), 64),
    )
    where, operands, grads = (torch, first.on_device, stream), list(found.values()), []
    for side in _SIDES:
        grads.append(outs[side.out])
        if side.wide not in found:
            continue
        wide, narrow = found[side.wide], found[side.narrow]
        columns = _convert.integer(f"the number of columns of {side.wide}", wide.shape[-1], 64)
        shape = (args.rank, columns) if side.out is _A else (columns, args.rank)
        out, stride = _call.output(
            written.get(side.out), shape, grad_dtype, source, *where, side.out
        )
        operands.append(out)
        if grads[-1] is None:
            grads[-1] = out.owner
        _fill_side(args, side, wide, narrow, out, stride)
    return _call.Problem(
        functions("nf4_").lora_grad,
        (ctypes.byref(args),),
        on_device(*operands),
        _torch_of(operands),
        tuple(grads),
        _NAMES,
        None,
        tuple(outs.values()),
        args,
        operands,
    )


def _fill_side(
    args: _abi.LoraGradArgs,
    side: _Side,
    wide: Operand,
    narrow: Operand,
    out: Operand,
    out_stride: int,
) -> None:
    columns = wide.shape[-1]
    fields = {
        side.columns: columns,
        side.wide_in_c: wide.address,
        f"{side.wide_in_c}_stride": wide.row_stride(columns),
        side.narrow: narrow.address,
        side.out_in_c: out.address,
        f"{side.out_in_c}_stride": out_stride,
    }
    for name, value in fields.items():
        setattr(args, name, value)


def _torch_of(operands: Iterable[Operand]) -> Any:
    return next((each.torch for each in operands if each.torch is not None), None)


@overload  # the first that fits is taken: tensors are ArrayLike, too
def lora_grad(  # type: ignore[overload-overlap]
    x: Array,
    grad_y: Array,
    p: Array,
    q: Array,
    scale: SupportsFloat = ...,
    *,
    out: None = ...,
    **options: Unpack[LoraGrad],
) -> tuple[Array, Array]: ...


@overload
def lora_grad(
    x: ArrayLike,
    grad_y: ArrayLike,
    p: ArrayLike,
    q: ArrayLike,
    scale: SupportsFloat = ...,
    *,
    out: None = ...,
    **options: Unpack[LoraGrad],
) -> tuple[np.ndarray, np.ndarray]: ...


@overload
def lora_grad(
    x: ArrayLike,
    grad_y: ArrayLike,
    p: ArrayLike,
    q: ArrayLike,
    scale: SupportsFloat = ...,
    *,
    out: Sequence[MemoryLike | None],
    **options: Unpack[LoraGrad],
) -> tuple[MemoryLike, MemoryLike]: ...


@overload
def lora_grad(
    x: ArrayLike,
    grad_y: None,
    p: None,
    q: ArrayLike,
    scale: SupportsFloat = ...,
    *,
    out: Sequence[MemoryLike | None] | None = ...,
    **options: Unpack[LoraGrad],
) -> tuple[MemoryLike, None]: ...


@overload
def lora_grad(
    x: None,
    grad_y: ArrayLike,
    p: ArrayLike,
    q: None,
    scale: SupportsFloat = ...,
    *,
    out: Sequence[MemoryLike | None] | None = ...,
    **options: Unpack[LoraGrad],
) -> tuple[None, MemoryLike]: ...


def lora_grad(
    x: ArrayLike | None,
    grad_y: ArrayLike | None,
    p: ArrayLike | None,
    q: ArrayLike | None,
    scale: SupportsFloat = 1.0,
    *,
    dtype: DTypeLike | None = None,
    out: Sequence[MemoryLike | None] | None = None,
    threads: int = 0,
    stream: CudaStreamLike | None = None,
) -> tuple[MemoryLike | None, MemoryLike | None]:
    """Computes the gradients of an adapter's A and B, for y = x (W + scale B A)^T and grad_y, the
    gradient of y: grad_a = scale q^T x and grad_b = scale grad_y^T p. Each element is summed and
    multiplied by the scale in float32, then rounded to the dtype of the gradients.

    x        an array [..., cols] in fp16, bf16 or fp32, as for matmul: rows are contiguous and have
             one stride
    grad_y   an array [..., rows] with such rows, with as many rows as x and in the dtype of x
    p        x A^T, [..., rank], which matmul writes to nf4.Lora.product: contiguous, with as many
             rows as x and in the dtype of x. The rank is 1 to 128
    q        grad_y B, [..., rank], which matmul_grad writes, like p
    scale    a finite number; in LoRA, alpha / rank
    dtype    of both gradients: the dtype of x, or "fp32". The default is the dtype of `out`, or
             without `out` the dtype of x
    out      a list or tuple of two, each an array or None: where to write grad_a, [rank, cols], and
             grad_b, [rows, rank]. For None the gradient is new memory, as for matmul. Neither
             overlaps anything else
    threads  as for matmul
    stream   as for quantize

    If x and q are None, grad_a is None. If grad_y and p are None, grad_b is None.

    Returns (grad_a, grad_b): the arrays of `out`, or the new memory. Raises the errors of quantize;
    every `out` is then unchanged.
    """
    threads, handle = _call.read_options(threads, stream)
    given, outs = {"x": x, "grad_y": grad_y, "p": p, "q": q}, _outs_of(out)
    return _call.run(_problem_of(given, scale, dtype, outs, handle), threads, handle)
