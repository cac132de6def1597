"""matmul and matmul_batch: y = x W^T + bias."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, overload

import numpy as np

from nf4 import _abi, _call, _convert, _torch
from nf4._load import check, library
from nf4._operand import Operand, on_device, read
from nf4._prepared import PRODUCT_NAMES, Prepared, prepare
from nf4.errors import InvalidArgument, kind_of
from nf4.tensor import QuantizedTensor
from nf4.typing import Array, ArrayLike, CudaStreamLike, DTypeLike, MemoryLike, Out

_ARGS_SIZE = ctypes.sizeof(_abi.MatmulArgs)


class _Problem(NamedTuple):
    """A product, checked. `operands` keep memory alive until C has been called; `torch` is the
    device of a tensor among them or the weight's parts."""

    weight: Prepared
    args: _abi.MatmulArgs
    y: MemoryLike
    on_device: bool
    torch: _torch.Device | None
    operands: Sequence[Operand]


def _problem(
    weight: Prepared,
    x: ArrayLike,
    bias: MemoryLike | None,
    out: MemoryLike | None,
    stream: int | None,
) -> _Problem:
    """Reads x, out and bias, checks them, and makes y where `out` is None."""
    given = read("x", x, weight.torch)
    torch = weight.torch or given.torch
    x_stride, dtype = _row_stride(given, weight.cols), given.dtype
    if given.shape is None:
        raise InvalidArgument("x is an address; expected an array, for its shape")
    if dtype not in _convert.DTYPES:
        raise InvalidArgument(f"x is of {dtype}; expected fp32, fp16 or bf16")
    m, shape = math.prod(given.shape[:-1]), (*given.shape[:-1], weight.rows)
    if m >> 63:
        raise InvalidArgument(f"the number of rows of x is {m}; expected a 64-bit integer")
    if out is None:
        out = _call.new_output(shape, dtype, given.torch, given.on_device, stream)
    y = read("out", out, torch)
    y_stride = _row_stride(y, weight.rows)
    _require_output(y, shape, dtype)
    operands = [given, y]
    if bias is not None:
        operands.append(read("bias", bias, torch).expect(dtype, weight.rows))
    in_device_memory = on_device(weight.located, *operands)
    if in_device_memory and dtype == "fp32":
        raise InvalidArgument("x is of fp32; expected fp16 or bf16 in device memory")
    bias_address = None if bias is None else operands[2].address
    args = _abi.MatmulArgs(
        _ARGS_SIZE,
        _convert.DTYPES[dtype],
        0,
        m,
        given.address,
        x_stride,
        bias_address,
        y.address,
        y_stride,
    )
    return _Problem(weight, args, out, in_device_memory, torch or y.torch, operands)


def _row_stride(operand: Operand, columns: int) -> int:
    """The distance from one row of an array [..., columns] to the next, in elements. Rows at an
    address have no gaps."""
    name, shape, strides = operand.name, operand.shape, operand.strides
    if shape is None:
        return columns
    if shape[-1:] != (columns,):
        raise InvalidArgument(f"{name} is of shape {shape}; expected [..., {columns}]")
    if strides is None:
        return columns
    stride = _distance(shape, strides)
    if stride is None or stride < columns:
        raise InvalidArgument(
            f"{name} is of shape {shape} and strides {strides}; expected contiguous rows, each at "
            f"one distance of {columns} or more from the next"
        )
    return _convert.integer(f"the stride of {name}", stride, 64)


def _distance(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """How far apart rows of the last dimension are, if each is contiguous and all are at one
    distance; else None. That of a single row is its length."""
    if shape[-1] != 1 and strides[-1] != 1:
        return None
    leading = [each for each in zip(shape[:-1], strides[:-1], strict=True) if each[0] != 1]
    if any(outer != extent * inner for (_, outer), (extent, inner) in pairwise(leading)):
        return None
    return leading[-1][1] if leading else shape[-1]


def _require_output(y: Operand, shape: tuple[int, ...], dtype: str) -> None:
    y.require_writable()
    if y.shape is not None and y.shape != shape:
        raise InvalidArgument(f"out is of shape {y.shape}; expected {shape}")
    if y.dtype is not None and y.dtype != dtype:
        raise InvalidArgument(f"out is of {y.dtype}; expected {dtype}, as x is")


def _workspace(
    value: MemoryLike | None,
    needed: int,
    torch: _torch.Device | None,
    stream: int | None,
) -> tuple[Operand, int]:
    found, nbytes = _call.workspace(value, needed, True, torch, stream)
    if found.on_device is False:
        raise InvalidArgument("workspace is in host memory; expected device memory, as x is")
    return found, nbytes


def _require_host_arguments(stream: CudaStreamLike | None, workspace: MemoryLike | None) -> None:
    _call.require_no_stream(stream)
    if workspace is not None:
        raise InvalidArgument("workspace is given; expected None for host memory")


def matmul_workspace_bytes(weight: QuantizedTensor[Any], m: int, dtype: DTypeLike) -> int:
    """Bytes of workspace that `matmul` needs for m rows of x in device memory: 0 for up to 64,
    and never more for fewer rows.

    dtype  of x: "fp16", "bf16", or a numpy or torch dtype

    Raises InvalidArgument.
    """
    prepared = prepare(weight)
    code = _convert.DTYPES[_convert.dtype_name(dtype)]
    return prepared.matmul_workspace(code, _convert.count("m", m), prepared.cols, prepared.rows)


@overload  # of which the first that fits is taken: tensors are ArrayLike as well
def matmul(  # type: ignore[overload-overlap]
    x: Array,
    weight: QuantizedTensor[Any],
    *,
    bias: MemoryLike | None = ...,
    out: None = ...,
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> Array: ...


@overload
def matmul(
    x: ArrayLike,
    weight: QuantizedTensor[Any],
    *,
    bias: MemoryLike | None = ...,
    out: None = ...,
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> np.ndarray: ...


@overload
def matmul(
    x: ArrayLike,
    weight: QuantizedTensor[Any],
    *,
    bias: MemoryLike | None = ...,
    out: Out,
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> Out: ...


def matmul(
    x: ArrayLike,
    weight: QuantizedTensor[Any],
    *,
    bias: MemoryLike | None = None,
    out: MemoryLike | None = None,
    workspace: MemoryLike | None = None,
    threads: int = 0,
    stream: CudaStreamLike | None = None,
) -> MemoryLike:
    """y = x W^T + bias for a quantized weight W, which is never dequantized as a whole. Sums are
    in binary32 and each is rounded once.

    x          an array [..., cols] of fp16 or bf16, or of fp32 on the CPU: a numpy array, a torch
               tensor, or an object with __cuda_array_interface__ or __dlpack__. Each row is
               contiguous, and rows are at one distance of cols elements or more
    weight     of shape [..., rows, cols]: leading dimensions count as rows
    bias       a contiguous array of one element for each row of the weight, in the dtype of x
    out        an array [..., rows] with the leading dimensions and the dtype of x and strides as
               x may have them, or the address of such memory without gaps. Nothing is written
               between its rows. By default new memory: a torch tensor for a torch tensor, on its
               device, and a numpy array for all else in host memory. Required for all else in
               device memory
    workspace  uint8 in device memory, of `matmul_workspace_bytes()` or more, 16-byte aligned.
               Made for torch tensors; else required unless that is 0, as it is for up to 64 rows
               of x. Calls that may run at the same time must not share one: they could hang
    threads    on the CPU: how many at most; 0: one for each processor. The result does not
               depend on it
    stream     for device memory, as for quantize

    A row of x that has a NaN or an infinity spoils its own row of y only. torch is told that an
    `out` has changed, as by quantize.

    Returns `out`, or what was made. Raises what quantize raises; then `out` is as it was.
    """
    threads, handle = _convert.integer("threads", threads, 32), _call.stream_handle(stream)
    prepared = prepare(weight)
    problem = _problem(prepared, x, bias, out, handle)
    args, operands = problem.args, (prepared.argument, ctypes.byref(problem.args))
    if problem.on_device:
        needed = prepared.matmul_workspace(args.dtype, args.m, args.x_stride, args.y_stride)
        enqueued_on = _call.launch_stream(handle, threads, problem.torch)
        scratch, nbytes = _workspace(workspace, needed, problem.torch, handle)
        status = library().nf4_matmul_launch(*operands, scratch.address, nbytes, enqueued_on)
    else:
        _require_host_arguments(stream, workspace)
        status = library().nf4_matmul_cpu(*operands, threads)
    check(status, PRODUCT_NAMES)
    if out is not None or workspace is not None:
        _torch.tell_of_writes((out, workspace))
    return problem.y


def _listed(weights: Iterable[QuantizedTensor[Any]]) -> list[QuantizedTensor[Any]]:
    try:
        listed = list(weights)
    except TypeError:
        kind = kind_of(weights)
        raise InvalidArgument(f"weights is {kind}; expected a list of QuantizedTensor") from None
    most = _abi.MATMUL_BATCH_MAX
    if len(listed) > most:
        raise InvalidArgument(f"weights has {len(listed)} elements; expected at most {most}")
    return listed


def _for_each(name: str, values: Sequence[Any] | None, count: int) -> Sequence[Any]:
    """What is given for each of `count` products; None: nothing for any."""
    if values is None:
        return [None] * count
    if not isinstance(values, Sequence):
        kind = kind_of(values)
        raise InvalidArgument(f"{name} is {kind}; expected a list of {count}, as of weights")
    if len(values) != count:
        raise InvalidArgument(f"{name} has {len(values)} elements; expected {count}, as weights")
    return values


def _problems(arguments: Iterable[tuple[Any, Any, Any, Any]], stream: int | None) -> list[_Problem]:
    """Of (weight, x, bias, out) for each product, all of them in one place."""
    problems: list[_Problem] = []
    try:
        for weight, x, bias, out in arguments:
            problem = _problem(prepare(weight), x, bias, out, stream)
            if problems and problem.on_device != problems[0].on_device:
                ours, theirs = ("device", "host") if problem.on_device else ("host", "device")
                raise InvalidArgument(f"in {ours} memory, but product 0 is in {theirs} memory")
            problems.append(problem)
    except InvalidArgument as error:
        raise InvalidArgument(f"product {len(problems)}: {error}") from None
    return problems


def _batch(
    weights: Iterable[Prepared], args: Sequence[_abi.MatmulArgs]
) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[_abi.MatmulArgs], int]:
    """The products as C takes them."""
    count = len(args)
    descriptors = (ctypes.c_void_p * count)(*(weight.argument.value for weight in weights))
    return descriptors, (_abi.MatmulArgs * count)(*args), count


def _batch_workspace(batch: tuple[Any, Any, int]) -> int:
    needed = ctypes.c_size_t()
    status = library().nf4_matmul_batch_workspace_size(*batch, ctypes.byref(needed))
    check(status, PRODUCT_NAMES)
    return needed.value


def matmul_batch_workspace_bytes(
    weights: Iterable[QuantizedTensor[Any]], m: int, dtype: DTypeLike
) -> int:
    """Bytes of workspace that `matmul_batch` needs for m rows of x in device memory, the same x
    for all weights: the most that any weight needs. m and dtype: as for
    `matmul_workspace_bytes`.

    Raises InvalidArgument.
    """
    rows = _convert.count("m", m)
    code = _convert.DTYPES[_convert.dtype_name(dtype)]
    prepared = [prepare(each, f"weights[{i}]") for i, each in enumerate(_listed(weights))]
    args = [
        _abi.MatmulArgs(
            struct_size=_ARGS_SIZE, dtype=code, m=rows, x_stride=weight.cols, y_stride=weight.rows
        )
        for weight in prepared
    ]
    return _batch_workspace(_batch(prepared, args))


@overload
def matmul_batch(  # type: ignore[overload-overlap]
    x: Array | Sequence[Array],
    weights: Iterable[QuantizedTensor[Any]],
    *,
    bias: Sequence[MemoryLike | None] | None = ...,
    out: Sequence[Array | None] | None = ...,
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> list[Array]: ...


@overload
def matmul_batch(
    x: ArrayLike | Sequence[ArrayLike],
    weights: Iterable[QuantizedTensor[Any]],
    *,
    bias: Sequence[MemoryLike | None] | None = ...,
    out: None = ...,
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> list[np.ndarray]: ...


@overload
def matmul_batch(
    x: ArrayLike | Sequence[ArrayLike],
    weights: Iterable[QuantizedTensor[Any]],
    *,
    bias: Sequence[MemoryLike | None] | None = ...,
    out: Sequence[MemoryLike | None],
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> list[MemoryLike]: ...


def matmul_batch(
    x: ArrayLike | Sequence[ArrayLike],
    weights: Iterable[QuantizedTensor[Any]],
    *,
    bias: Sequence[MemoryLike | None] | None = None,
    out: Sequence[MemoryLike | None] | None = None,
    workspace: MemoryLike | None = None,
    threads: int = 0,
    stream: CudaStreamLike | None = None,
) -> Sequence[MemoryLike]:
    """`matmul` for each of several weights, with the same bits, in one call: the products of q,
    k and v, say, or of gate and up. On a GPU and for few rows of x weights share launches, which
    saves the fixed cost of a launch.

        gate, up = nf4.matmul_batch(x, [gate_weight, up_weight])

    x          what matmul takes, for all weights; or a list or tuple of one for each
    weights    up to 64
    bias       a list or tuple of one for each weight, of which any may be None
    out        the same for where to write. Two may be columns of one matrix, as of
               y.split([...], dim=-1). Otherwise none overlaps another, nor any x, bias or weight
    workspace  as for matmul, of `matmul_batch_workspace_bytes()` or more
    threads    as for matmul
    stream     as for quantize

    Returns a list of what matmul returns. Raises what quantize raises, and names the product,
    counted from 0; then every `out` is as it was, unless it is CudaError.
    """
    threads, handle = _convert.integer("threads", threads, 32), _call.stream_handle(stream)
    weights = _listed(weights)
    count = len(weights)
    each_x = _for_each("x", x, count) if isinstance(x, (list, tuple)) else [x] * count
    each_out = _for_each("out", out, count)
    arguments = zip(weights, each_x, _for_each("bias", bias, count), each_out, strict=True)
    problems = _problems(arguments, handle)
    if not problems:
        return []
    batch = _batch([each.weight for each in problems], [each.args for each in problems])
    if problems[0].on_device:
        torch = next((each.torch for each in problems if each.torch is not None), None)
        enqueued_on = _call.launch_stream(handle, threads, torch)
        scratch, nbytes = _workspace(workspace, _batch_workspace(batch), torch, handle)
        status = library().nf4_matmul_batch_launch(*batch, scratch.address, nbytes, enqueued_on)
    else:
        _require_host_arguments(stream, workspace)
        status = library().nf4_matmul_batch_cpu(*batch, threads)
    check(status, PRODUCT_NAMES)
    _torch.tell_of_writes((*each_out, workspace))
    return [each.y for each in problems]
