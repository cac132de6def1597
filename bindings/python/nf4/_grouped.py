"""matmul_grouped: the products of a stack of experts, each with the rows that are routed to it."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple, overload

import numpy as np

from nf4 import _abi, _call, _convert, _torch
from nf4._load import check, functions
from nf4._matmul import device_workspace, require_host_arguments
from nf4._operand import Operand, on_device, read
from nf4._prepared import PRODUCT_NAMES, Prepared, prepare
from nf4.errors import InvalidArgument, shown
from nf4.tensor import QuantizedTensor
from nf4.typing import Array, ArrayLike, CudaStreamLike, DTypeLike, MemoryLike, Out
from nf4.weight import Weight

_NAMES = {
    **PRODUCT_NAMES,
    "x_rows * x_stride": "rows * stride of x",
}


class _Problem(NamedTuple):
    """As nf4._matmul.Problem."""

    weight: Prepared
    args: _abi.GroupedArgs
    y: MemoryLike
    on_device: bool
    torch: _torch.Device | None
    operands: list[Operand]


def _prepare(weight: Weight[Any]) -> tuple[Prepared, int, int]:
    """A weight, how many experts it has, and how many rows each."""
    if not isinstance(weight, QuantizedTensor):
        raise InvalidArgument(f"weight is {shown(weight)}; expected a QuantizedTensor of experts")
    if len(weight.shape) != 3:
        raise InvalidArgument(
            f"weight is of shape {weight.shape}; expected 3 dimensions: experts, rows and columns"
        )
    return prepare(weight), weight.shape[0], weight.shape[1]


def _matrix(name: str, value: ArrayLike, columns: int, torch: _torch.Device | None) -> Operand:
    found = read(name, value, torch)
    if found.shape is None:
        raise InvalidArgument(f"{name} is an address; expected an array, for its shape")
    if len(found.shape) != 2:
        raise InvalidArgument(f"{name} is of shape {found.shape}; expected [rows, {columns}]")
    return found


def _problem_of(
    weight: Weight[Any],
    x: ArrayLike,
    ends: MemoryLike,
    x_index: ArrayLike | None,
    bias: MemoryLike | None,
    row_scale: MemoryLike | None,
    out: MemoryLike | None,
    stream: int | None,
) -> _Problem:
    """Reads and checks the arguments, and makes y where `out` is None."""
    prepared, experts, rows = _prepare(weight)
    given = _matrix("x", x, prepared.cols, prepared.torch)
    torch = prepared.torch or given.torch
    x_stride, dtype = given.row_stride(prepared.cols), given.dtype
    if dtype not in _convert.DTYPES:
        raise InvalidArgument(f"x is of {dtype}; expected fp32, fp16 or bf16")
    x_rows = m = given.shape[0]
    operands = [given, read("ends", ends, torch).expect("int32", experts)]
    index = None
    if x_index is not None:
        index = read("x_index", x_index, torch)
        if index.shape is None or len(index.shape) != 1:
            what = "an address" if index.shape is None else f"of shape {index.shape}"
            raise InvalidArgument(f"x_index is {what}; expected an array of one dimension")
        m = index.shape[0]
        operands.append(index.expect("int32", m))
    if out is None:
        out = _call.new_output((m, rows), dtype, given.torch, given.on_device, stream)
    y = read("out", out, torch)
    y_stride = y.row_stride(rows)
    if y.torch is None:
        y.require_writable()
    if y.shape not in (None, (m, rows)):
        raise InvalidArgument(f"out is of shape {y.shape}; expected {(m, rows)}")
    if y.dtype not in (None, dtype):
        raise InvalidArgument(f"out is of {y.dtype}; expected {dtype}, as x is")
    optional: dict[str, Operand] = {}
    if bias is not None:
        optional["bias"] = read("bias", bias, torch).expect(dtype, experts * rows)
    if row_scale is not None:
        optional["row_scale"] = read("row_scale", row_scale, torch).expect("fp32", m)
    operands += [y, *optional.values()]
    in_device_memory = on_device(prepared.located, *operands)
    if in_device_memory and dtype == "fp32":
        raise InvalidArgument("x is of fp32; expected fp16 or bf16 in device memory")
    address = {name: found.address for name, found in optional.items()}
    args = _abi.GroupedArgs(
        struct_size=ctypes.sizeof(_abi.GroupedArgs),
        dtype=_convert.DTYPES[dtype],
        experts=_convert.integer("the number of experts", experts, 32),
        m=m,
        x=given.address,
        x_stride=x_stride,
        x_rows=x_rows,
        y=y.address,
        y_stride=y_stride,
        ends=operands[1].address,
        x_index=None if index is None else _not_null(index),
        bias=address.get("bias"),
        bias_stride=rows,
        row_scale=address.get("row_scale"),
    )
    return _Problem(prepared, args, out, in_device_memory, torch or y.torch, operands)


_NOWHERE = 4  # an address that is not NULL, where nothing is read


def _not_null(index: Operand) -> int:
    """Its address; of an empty one, which may have none, any."""
    return index.address or _NOWHERE


@functools.lru_cache(maxsize=64)
def _workspace(weight: tuple[int, ...], dtype: int, experts: int, m: int) -> int:
    """Of a weight of this format, blocksize, nested_blocksize, rows and cols, with x_index."""
    format, blocksize, nested_blocksize, rows, cols = weight
    tensor = _abi.Tensor(
        struct_size=ctypes.sizeof(_abi.Tensor),
        format=format,
        blocksize=blocksize,
        nested_blocksize=nested_blocksize,
        rows=rows,
        cols=cols,
    )
    args = _abi.GroupedArgs(
        struct_size=ctypes.sizeof(_abi.GroupedArgs),
        dtype=dtype,
        experts=experts,
        m=m,
        x_stride=cols,
        x_rows=m,
        y_stride=rows,
        x_index=_NOWHERE,
    )
    needed = ctypes.c_size_t()
    size_of = functions("nf4_").matmul_grouped_workspace_size
    check(size_of(ctypes.byref(tensor), ctypes.byref(args), ctypes.byref(needed)), _NAMES)
    return needed.value


def _needed(weight: QuantizedTensor[Any], dtype: int, m: int) -> int:
    descriptor = weight.descriptor()
    key = tuple(
        getattr(descriptor, name)
        for name in ("format", "blocksize", "nested_blocksize", "rows", "cols")
    )
    return _workspace(key, dtype, weight.shape[0], m)


def matmul_grouped_workspace_bytes(weight: Weight[Any], m: int, dtype: DTypeLike) -> int:
    """Bytes of workspace that `matmul_grouped` needs for m rows of y in device memory with x_index,
    and never more for fewer rows; without x_index it needs none. dtype: of x, as for
    `matmul_workspace_bytes`.

    Raises InvalidArgument.
    """
    _prepare(weight)
    number = _convert.DTYPES[_convert.dtype_name(dtype)]
    return _needed(weight, number, _convert.count("m", m))


@overload  # of which the first that fits is taken: tensors are ArrayLike as well
def matmul_grouped(  # type: ignore[overload-overlap]
    x: Array,
    weight: Weight[Any],
    ends: MemoryLike,
    *,
    x_index: ArrayLike | None = ...,
    bias: MemoryLike | None = ...,
    row_scale: MemoryLike | None = ...,
    out: None = ...,
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> Array: ...


@overload
def matmul_grouped(
    x: ArrayLike,
    weight: Weight[Any],
    ends: MemoryLike,
    *,
    x_index: ArrayLike | None = ...,
    bias: MemoryLike | None = ...,
    row_scale: MemoryLike | None = ...,
    out: None = ...,
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> np.ndarray: ...


@overload
def matmul_grouped(
    x: ArrayLike,
    weight: Weight[Any],
    ends: MemoryLike,
    *,
    x_index: ArrayLike | None = ...,
    bias: MemoryLike | None = ...,
    row_scale: MemoryLike | None = ...,
    out: Out,
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> Out: ...


def matmul_grouped(
    x: ArrayLike,
    weight: Weight[Any],
    ends: MemoryLike,
    *,
    x_index: ArrayLike | None = None,
    bias: MemoryLike | None = None,
    row_scale: MemoryLike | None = None,
    out: MemoryLike | None = None,
    workspace: MemoryLike | None = None,
    threads: int = 0,
    stream: CudaStreamLike | None = None,
) -> MemoryLike:
    """The products of a stack of experts (mixture of experts), each with its own rows:
    y[i] = row_scale[i] * (x[x_index[i]] W[e]^T + bias[e]), for the expert e of row i. The rows of
    y are sorted by expert; those of e end before ends[e] and begin where those of the expert before
    it end, as the offs of torch.nn.functional.grouped_mm. Nothing is dequantized as a whole, and in
    device memory no value of ends, x_index or row_scale is read on the host: a CUDA graph may be
    replayed with others.

    x          an array [x_rows, cols], as matmul takes; in device memory fp16 or bf16
    weight     a QuantizedTensor of shape [experts, rows, cols], in which rows * cols is a multiple
               of the blocksize unless there is one expert
    ends       int32 [experts]. Ends that decrease give an expert no rows, those beyond y no more
               than there are. Rows of y behind the last are unspecified
    x_index    int32 [m], the row of x for each row of y; one out of range stands for zeros. None:
               row i of x for row i of y
    bias       an array [experts, rows] in the dtype of x, contiguous
    row_scale  fp32 [m], such as the router's weights
    out        an array [m, rows] in the dtype of x, as matmul takes. By default new memory

    workspace, threads and stream are as matmul's; `matmul_grouped_workspace_bytes()` says how much
    workspace. Returns `out`, or what was made. Raises what quantize raises; then `out` is as it
    was.
    """
    threads = _convert.integer("threads", threads, 32)
    handle = None if stream is None else _call.stream_handle(stream)
    problem = _problem_of(weight, x, ends, x_index, bias, row_scale, out, handle)
    args, operands = problem.args, (problem.weight.argument, ctypes.byref(problem.args))
    if problem.on_device:
        needed = 0 if x_index is None else _needed(weight, args.dtype, args.m)
        enqueued_on = _call.launch_stream(handle, threads, problem.torch)
        space, nbytes = device_workspace(workspace, needed, problem.torch, handle)
        launch = problem.weight.functions.matmul_grouped_launch
        status = launch(*operands, space.address, nbytes, enqueued_on)
    else:
        require_host_arguments(stream, workspace)
        status = problem.weight.functions.matmul_grouped_cpu(*operands, threads)
    check(status, _NAMES)
    if out is not None or workspace is not None:
        _torch.tell_of_writes((out, workspace))
    return problem.y
