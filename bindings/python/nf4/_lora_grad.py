"""lora_grad: the gradients of an adapter's A and B."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple, SupportsFloat, overload

import numpy as np

from nf4 import _abi, _call, _convert, _torch
from nf4._load import check, functions
from nf4._matmul import require_output
from nf4._operand import Operand, on_device, read
from nf4.errors import InvalidArgument, kind_of
from nf4.typing import Array, ArrayLike, CudaStreamLike, DTypeLike, MemoryLike

_A, _B = "out[0]", "out[1]"  # the outputs
_SOURCES = {_A: "x and q", _B: "grad_y and p"}
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


class _Matrix(NamedTuple):
    """An array [..., columns], whose leading dimensions count as rows."""

    operand: Operand
    rows: int
    columns: int
    stride: int


class _Problem(NamedTuple):
    """As nf4._matmul.Problem. `grads` are by the names of their outputs; one that is not asked for
    is None."""

    args: _abi.LoraGradArgs
    grads: dict[str, MemoryLike | None]
    on_device: bool
    torch: _torch.Device | None
    operands: list[Operand]


def _read_matrix(name: str, value: ArrayLike, torch: _torch.Device | None) -> _Matrix:
    found = read(name, value, torch)
    if found.shape is None:
        raise InvalidArgument(f"{name} is an address; expected an array, for its shape")
    if not found.shape:
        raise InvalidArgument(f"{name} is of shape (); expected one dimension or more")
    columns = _convert.integer(f"the number of columns of {name}", found.shape[-1], 64)
    rows = _convert.integer(f"the number of rows of {name}", math.prod(found.shape[:-1]), 64)
    return _Matrix(found, rows, columns, found.row_stride(columns))


def _read_given(given: Mapping[str, ArrayLike | None]) -> dict[str, _Matrix]:
    """What is not None: x and q, grad_y and p, or all of them; of one dtype, number of rows and
    rank."""
    for name, other in (("x", "q"), ("q", "x"), ("grad_y", "p"), ("p", "grad_y")):
        if given[name] is None and given[other] is not None:
            raise InvalidArgument(f"{name} is None, but {other} is not; expected both or none")
    found: dict[str, _Matrix] = {}
    torch = None
    for name, value in given.items():
        if value is not None:
            found[name] = _read_matrix(name, value, torch)
            torch = torch or found[name].operand.torch
    if not found:
        raise InvalidArgument("x is None, as grad_y is; expected x and q, grad_y and p, or all")
    like, first = next(iter(found.items()))
    if first.operand.dtype not in _convert.DTYPES:
        raise InvalidArgument(f"{like} is of {first.operand.dtype}; expected fp32, fp16 or bf16")
    for name, each in found.items():
        _, _, _, dtype, shape, *_ = each.operand
        if dtype != first.operand.dtype:
            expected = f"{first.operand.dtype}, as {like} is"
            raise InvalidArgument(f"{name} is of {dtype}; expected {expected}")
        if each.rows != first.rows:
            expected = f"{first.rows} rows, as {like} has"
            raise InvalidArgument(f"{name} is of shape {shape}; expected {expected}")
        if name in ("p", "q"):
            each.operand.require_contiguous()
        if name == "q" and "p" in found and each.columns != found["p"].columns:
            expected = f"{found['p'].columns} columns, as p has"
            raise InvalidArgument(f"q is of shape {shape}; expected {expected}")
    return found


def _outs_of(out: Sequence[MemoryLike | None] | None) -> dict[str, MemoryLike | None]:
    if out is None:
        return {_A: None, _B: None}
    if not isinstance(out, Sequence):
        raise InvalidArgument(f"out is {kind_of(out)}; expected a list of two")
    if len(out) != 2:
        raise InvalidArgument(f"out has {len(out)} elements; expected 2")
    return dict(zip((_A, _B), out, strict=True))


def _shapes(given: Mapping[str, _Matrix]) -> dict[str, tuple[int, int]]:
    """Of the gradients that are asked for, by the names of their outputs."""
    shapes = {}
    if "x" in given:
        shapes[_A] = given["q"].columns, given["x"].columns
    if "grad_y" in given:
        shapes[_B] = given["grad_y"].columns, given["p"].columns
    return shapes


def _grad_dtype(dtype: DTypeLike | None, outs: Iterable[Operand], of_x: str) -> tuple[str, str]:
    """The dtype of the gradients, and the argument that says so."""
    found, source = of_x, "x"
    if dtype is not None:
        found, source = _convert.dtype_name(dtype), "dtype"
    else:
        for out in outs:
            if out.dtype is not None:
                found, source = out.dtype, out.name
                break
    if found not in (of_x, "fp32"):
        wanted = "fp32" if of_x == "fp32" else f"fp32 or {of_x}"
        raise InvalidArgument(f"{source} is {found}; expected {wanted}")
    return found, source


def _read_outputs(
    outs: Mapping[str, MemoryLike | None], wanted: Container[str], torch: _torch.Device | None
) -> dict[str, Operand]:
    """Those that are given."""
    given = {name: out for name, out in outs.items() if out is not None}
    for name in given:
        if name not in wanted:
            raise InvalidArgument(f"{name} is given; expected None, as {_SOURCES[name]} are")
    return {name: read(name, out, torch) for name, out in given.items()}


def _problem_of(
    given: Mapping[str, ArrayLike | None],
    scale: SupportsFloat,
    dtype: DTypeLike | None,
    outs: Mapping[str, MemoryLike | None],
    stream: int | None,
) -> _Problem:
    """Reads and checks the arguments, and makes the gradients that are asked for and not given."""
    matrices = _read_given(given)
    operands = [each.operand for each in matrices.values()]
    first, torch = operands[0], _torch_of(operands)
    shapes = _shapes(matrices)
    written = _read_outputs(outs, shapes, torch)
    grad_dtype, source = _grad_dtype(dtype, written.values(), str(first.dtype))
    grads, strides = dict(outs), {}
    for name, shape in shapes.items():
        if name not in written:
            grads[name] = _call.new_output(shape, grad_dtype, torch, first.on_device, stream, name)
            written[name] = read(name, grads[name], torch)
        strides[name] = written[name].row_stride(shape[1])
        require_output(written[name], shape, grad_dtype, source)
    operands += written.values()
    args = _args_of(matrices, written, strides)
    args.dtype, args.grad_dtype = _convert.DTYPES[str(first.dtype)], _convert.DTYPES[grad_dtype]
    args.scale = _convert.real("scale", scale)
    return _Problem(args, grads, on_device(*operands), _torch_of(operands), operands)


def _torch_of(operands: Iterable[Operand]) -> _torch.Device | None:
    return next((each.torch for each in operands if each.torch is not None), None)


def _args_of(
    matrices: Mapping[str, _Matrix], written: Mapping[str, Operand], strides: Mapping[str, int]
) -> _abi.LoraGradArgs:
    """All but the dtypes and the scale."""
    args = _abi.LoraGradArgs(struct_size=ctypes.sizeof(_abi.LoraGradArgs))
    if "x" in matrices:
        x, q = matrices["x"], matrices["q"]
        args.m, args.cols, rank = x.rows, x.columns, q.columns
        args.x, args.x_stride, args.q = x.operand.address, x.stride, q.operand.address
        args.da, args.da_stride = written[_A].address, strides[_A]
    if "grad_y" in matrices:
        dy, p = matrices["grad_y"], matrices["p"]
        args.m, args.rows, rank = dy.rows, dy.columns, p.columns
        args.dy, args.dy_stride, args.p = dy.operand.address, dy.stride, p.operand.address
        args.db, args.db_stride = written[_B].address, strides[_B]
    args.rank = _convert.integer("the rank", rank, 32)
    return args


@overload  # the first that fits is taken: tensors are ArrayLike, too
def lora_grad(  # type: ignore[overload-overlap]
    x: Array,
    grad_y: Array,
    p: Array,
    q: Array,
    scale: SupportsFloat = ...,
    *,
    dtype: DTypeLike | None = ...,
    out: None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> tuple[Array, Array]: ...


@overload
def lora_grad(
    x: ArrayLike,
    grad_y: ArrayLike,
    p: ArrayLike,
    q: ArrayLike,
    scale: SupportsFloat = ...,
    *,
    dtype: DTypeLike | None = ...,
    out: None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> tuple[np.ndarray, np.ndarray]: ...


@overload
def lora_grad(
    x: ArrayLike,
    grad_y: ArrayLike,
    p: ArrayLike,
    q: ArrayLike,
    scale: SupportsFloat = ...,
    *,
    dtype: DTypeLike | None = ...,
    out: Sequence[MemoryLike | None],
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> tuple[MemoryLike, MemoryLike]: ...


@overload
def lora_grad(
    x: ArrayLike,
    grad_y: None,
    p: None,
    q: ArrayLike,
    scale: SupportsFloat = ...,
    *,
    dtype: DTypeLike | None = ...,
    out: Sequence[MemoryLike | None] | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> tuple[MemoryLike, None]: ...


@overload
def lora_grad(
    x: None,
    grad_y: ArrayLike,
    p: ArrayLike,
    q: None,
    scale: SupportsFloat = ...,
    *,
    dtype: DTypeLike | None = ...,
    out: Sequence[MemoryLike | None] | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
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
    """The gradients of an adapter's A and B, for y = x (W + scale B A)^T of which grad_y is the
    gradient: grad_a = scale q^T x and grad_b = scale grad_y^T p. Each element is summed and
    multiplied by the scale in binary32, then rounded to the dtype of the gradients.

    x        an array [..., cols] of fp16, bf16 or fp32, as matmul takes it: rows are contiguous and
             at one distance
    grad_y   an array [..., rows], likewise, of as many rows in the dtype of x
    p        x A^T, [..., rank], as matmul writes it to nf4.Lora.product: contiguous, of as many
             rows in the dtype of x. The rank is 1 to 128
    q        grad_y B, [..., rank], as matmul_grad writes it, likewise
    scale    a finite number; of LoRA, alpha / rank
    dtype    of both gradients: that of x, or "fp32". By default that of what is given as `out`, or
             else that of x
    out      a list or tuple of two, of which either may be None: where to write grad_a, an array
             [rank, cols], and grad_b, [rows, rank]; else each is as matmul's `out`. Neither
             overlaps anything else
    threads  as for matmul
    stream   as for quantize

    Where x and q are None, grad_a is not made, and where grad_y and p are, grad_b is not: it is
    None.

    Returns (grad_a, grad_b): what was given for each, or what was made. Raises what quantize
    raises; then every `out` is as it was.
    """
    threads = _convert.integer("threads", threads, 32)
    handle = None if stream is None else _call.stream_handle(stream)
    given, outs = {"x": x, "grad_y": grad_y, "p": p, "q": q}, _outs_of(out)
    problem = _problem_of(given, scale, dtype, outs, handle)
    args, of_c = ctypes.byref(problem.args), functions("nf4_")
    if problem.on_device:
        enqueued_on = _call.launch_stream(handle, threads, problem.torch)
        status = of_c.lora_grad_launch(args, enqueued_on)
    else:
        _call.require_no_stream(stream)
        status = of_c.lora_grad_cpu(args, threads)
    check(status, _NAMES)
    _torch.tell_of_writes(outs.values())
    return problem.grads[_A], problem.grads[_B]
