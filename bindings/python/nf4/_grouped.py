"""matmul_grouped: the products of a stack of experts, each with the rows that are routed to it, and
matmul_grouped_grad, their gradient."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, overload

import numpy as np

from nf4 import _abi, _call, _convert, _torch
from nf4._load import check
from nf4._matmul import (
    device_workspace,
    require_codebook,
    require_host_arguments,
    require_output,
)
from nf4._operand import Operand, on_device, read
from nf4._prepared import GRAD_NAMES, PRODUCT_NAMES, Prepared, prepare_stack
from nf4.errors import InvalidArgument, shown
from nf4.typing import Array, ArrayLike, CudaStreamLike, DTypeLike, MemoryLike, Out
from nf4.weight import Weight

_NAMES = {**PRODUCT_NAMES, "x_rows * x_stride": "rows * stride of x"}
_GRAD_NAMES = {
    **GRAD_NAMES,
    "x_rows * x_stride": "rows * stride of grad_y",
    "x_rows": "rows of grad_y",
    "x_index": "y_index",
}


class _Problem(NamedTuple):
    """As nf4._matmul.Problem."""

    weight: Prepared
    args: _abi.GroupedArgs
    y: MemoryLike
    on_device: bool
    torch: _torch.Device | None
    operands: list[Operand]


def _prepare(weight: Weight[Any], gradient: bool = False) -> tuple[Prepared, int, int]:
    """A weight, how many experts it has, and how many rows each."""
    if not isinstance(weight, Weight):
        kind = "a QuantizedTensor or an Int4Tensor of experts"
        raise InvalidArgument(f"weight is {shown(weight)}; expected {kind}")
    if gradient:
        require_codebook(weight)
    if len(weight.shape) != 3:
        raise InvalidArgument(
            f"weight is of shape {weight.shape}; expected 3 dimensions: experts, rows and columns"
        )
    return prepare_stack(weight), weight.shape[0], weight.shape[1]


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
    gradient: bool,
) -> _Problem:
    """Reads and checks the arguments, and makes y where `out` is None. Of the gradient x is
    grad_y."""
    prepared, experts, rows = _prepare(weight, gradient)
    name, name_of_index = ("grad_y", "y_index") if gradient else ("x", "x_index")
    x_columns, y_columns = (rows, prepared.cols) if gradient else (prepared.cols, rows)
    given = _matrix(name, x, x_columns, prepared.torch)
    torch = prepared.torch or given.torch
    x_stride, dtype = given.row_stride(x_columns), given.dtype
    if dtype not in _convert.DTYPES:
        raise InvalidArgument(f"{name} is of {dtype}; expected fp32, fp16 or bf16")
    x_rows = m = given.shape[0]
    operands = [given, read("ends", ends, torch).expect("int32", experts)]
    index = None
    if x_index is not None:
        index = read(name_of_index, x_index, torch)
        if index.shape is None or len(index.shape) != 1:
            what = "an address" if index.shape is None else f"of shape {index.shape}"
            raise InvalidArgument(f"{name_of_index} is {what}; expected an array of one dimension")
        m = index.shape[0]
        operands.append(index.expect("int32", m))
    if out is None:
        out = _call.new_output((m, y_columns), dtype, given.torch, given.on_device, stream)
    y = read("out", out, torch)
    y_stride = y.row_stride(y_columns)
    require_output(y, (m, y_columns), dtype, name)
    optional: dict[str, Operand] = {}
    if bias is not None:
        optional["bias"] = read("bias", bias, torch).expect(dtype, experts * rows)
    if row_scale is not None:
        optional["row_scale"] = read("row_scale", row_scale, torch).expect("fp32", m)
    operands += [y, *optional.values()]
    in_device_memory = on_device(prepared.located, *operands)
    if in_device_memory and dtype == "fp32":
        raise InvalidArgument(f"{name} is of fp32; expected fp16 or bf16 in device memory")
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
    where = torch or y.torch
    return _Problem(prepared, args, out, in_device_memory, where, operands)


_ANY_ADDRESS = 4


def _not_null(index: Operand) -> int:
    """Its address; of an empty one, which may have none, any."""
    return index.address or _ANY_ADDRESS


def _workspace(weight: Prepared, args: _abi.GroupedArgs, gradient: bool) -> int:
    of_kind, needed = weight.functions, ctypes.c_size_t()
    size_of = of_kind.matmul_grouped_workspace_size
    if gradient:
        size_of = of_kind.matmul_grouped_grad_workspace_size
    status = size_of(weight.argument, ctypes.byref(args), ctypes.byref(needed))
    check(status, _GRAD_NAMES if gradient else _NAMES)
    return needed.value


def matmul_grouped_workspace_bytes(
    weight: Weight[Any],
    m: int,
    dtype: DTypeLike,
    *,
    indexed: bool = True,
    gradient: bool = False,
) -> int:
    """Bytes of workspace that `matmul_grouped` needs for m rows of y in device memory, and never
    more for fewer rows.

    dtype     of x, as for `matmul_workspace_bytes`
    indexed   whether there is an x_index
    gradient  of matmul_grouped_grad instead

    Raises InvalidArgument.
    """
    prepared, experts, rows = _prepare(weight, gradient)
    number = _convert.DTYPES[_convert.dtype_name(dtype)]
    m = _convert.count("m", m)
    args = _abi.GroupedArgs(
        struct_size=ctypes.sizeof(_abi.GroupedArgs),
        dtype=number,
        experts=experts,
        m=m,
        x_stride=rows if gradient else prepared.cols,
        x_rows=m,
        y_stride=prepared.cols if gradient else rows,
        x_index=_ANY_ADDRESS if indexed else None,
    )
    return _workspace(prepared, args, gradient)


@overload  # the first that fits is taken: tensors are ArrayLike, too
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
               of the blocksize unless there is one expert; or an Int4Tensor of such a shape, in
               device memory without g_idx and permutation
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
    return _run(
        x, weight, ends, x_index, bias, row_scale, out, workspace, threads, stream, gradient=False
    )


@overload  # the first that fits is taken: tensors are ArrayLike, too
def matmul_grouped_grad(  # type: ignore[overload-overlap]
    grad_y: Array,
    weight: Weight[Any],
    ends: MemoryLike,
    *,
    y_index: ArrayLike | None = ...,
    row_scale: MemoryLike | None = ...,
    out: None = ...,
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> Array: ...


@overload
def matmul_grouped_grad(
    grad_y: ArrayLike,
    weight: Weight[Any],
    ends: MemoryLike,
    *,
    y_index: ArrayLike | None = ...,
    row_scale: MemoryLike | None = ...,
    out: None = ...,
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> np.ndarray: ...


@overload
def matmul_grouped_grad(
    grad_y: ArrayLike,
    weight: Weight[Any],
    ends: MemoryLike,
    *,
    y_index: ArrayLike | None = ...,
    row_scale: MemoryLike | None = ...,
    out: Out,
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> Out: ...


def matmul_grouped_grad(
    grad_y: ArrayLike,
    weight: Weight[Any],
    ends: MemoryLike,
    *,
    y_index: ArrayLike | None = None,
    row_scale: MemoryLike | None = None,
    out: MemoryLike | None = None,
    workspace: MemoryLike | None = None,
    threads: int = 0,
    stream: CudaStreamLike | None = None,
) -> MemoryLike:
    """The gradient of matmul_grouped with respect to the rows of x that each row of y was made of:
    grad_x[i] = row_scale[i] * grad_y[y_index[i]] W[e], for the expert e of row i. Where x_index
    gave one row of x to several rows of y, its gradient is the sum of theirs, which is the
    caller's to form. Nothing is dequantized as a whole.

    grad_y     an array [y_rows, rows], as x of matmul_grouped is one of [x_rows, cols]
    weight     a QuantizedTensor of shape [experts, rows, cols]
    y_index    int32 [m], the row of grad_y for each row of grad_x; one out of range stands for
               zeros. None: row i for row i
    row_scale  fp32 [m], as matmul_grouped's
    out        an array [m, cols] in the dtype of grad_y, as matmul takes. By default new memory

    ends, workspace, threads and stream are as matmul_grouped's;
    matmul_grouped_workspace_bytes(..., gradient=True) says how much workspace. Returns `out`, or
    what was made. Raises what quantize raises; then `out` is as it was.
    """
    return _run(
        grad_y,
        weight,
        ends,
        y_index,
        None,
        row_scale,
        out,
        workspace,
        threads,
        stream,
        gradient=True,
    )


def _run(
    x: ArrayLike,
    weight: Weight[Any],
    ends: MemoryLike,
    x_index: ArrayLike | None,
    bias: MemoryLike | None,
    row_scale: MemoryLike | None,
    out: MemoryLike | None,
    workspace: MemoryLike | None,
    threads: int,
    stream: CudaStreamLike | None,
    gradient: bool,
) -> MemoryLike:
    threads = _convert.integer("threads", threads, 32)
    handle = None if stream is None else _call.stream_handle(stream)
    problem = _problem_of(weight, x, ends, x_index, bias, row_scale, out, handle, gradient)
    prepared, args = problem.weight, problem.args
    operands, of_kind = (prepared.argument, ctypes.byref(args)), prepared.functions
    if problem.on_device:
        needed = _workspace(prepared, args, gradient)
        enqueued_on = _call.launch_stream(handle, threads, problem.torch)
        space, nbytes = device_workspace(workspace, needed, problem.torch, handle)
        launch = of_kind.matmul_grouped_launch
        if gradient:
            launch = of_kind.matmul_grouped_grad_launch
        status = launch(*operands, space.address, nbytes, enqueued_on)
    else:
        require_host_arguments(stream, workspace)
        run = of_kind.matmul_grouped_grad_cpu if gradient else of_kind.matmul_grouped_cpu
        status = run(*operands, threads)
    check(status, _GRAD_NAMES if gradient else _NAMES)
    if out is not None or workspace is not None:
        _torch.tell_of_writes((out, workspace))
    return problem.y
