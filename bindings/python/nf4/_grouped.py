"""matmul_grouped: the products of a stack of experts, each with the rows that are routed to it, and
matmul_grouped_grad, their gradient."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, overload

import numpy as np

from nf4 import _call, _convert
from nf4._args import GROUPED_GRAD_NAMES, GROUPED_NAMES, SOME, grouped_args
from nf4._load import Operation
from nf4._matmul import require_codebook
from nf4._operand import on_device, read, read_array
from nf4._options import Grouped, GroupedGrad, Unpack
from nf4._prepared import Prepared, prepare_stack
from nf4.errors import InvalidArgument
from nf4.typing import Array, ArrayLike, CudaStreamLike, DTypeLike, MemoryLike, Out
from nf4.weight import Weight, no_weight


class _Stack(NamedTuple):
    """A weight of experts, and the operation on it: x has `columns` columns, and y `outputs`."""

    prepared: Prepared
    experts: int
    rows: int
    columns: int
    outputs: int
    operation: Operation
    names: Mapping[str, str]


def _stack_of(weight: Weight[Any], gradient: bool) -> _Stack:
    if not isinstance(weight, Weight):
        raise no_weight("weight", weight)
    if gradient:
        require_codebook(weight)
    if len(weight.shape) != 3:
        raise InvalidArgument(
            f"weight is of shape {weight.shape}; expected 3 dimensions: experts, rows and columns"
        )
    prepared, (experts, rows, cols) = prepare_stack(weight), weight.shape
    experts = _convert.integer("the number of experts", experts, 32)
    of_kind = prepared.functions
    if gradient:
        operation, names = of_kind.matmul_grouped_grad, GROUPED_GRAD_NAMES
        return _Stack(prepared, experts, rows, rows, cols, operation, names)
    return _Stack(prepared, experts, rows, cols, rows, of_kind.matmul_grouped, GROUPED_NAMES)


def matmul_grouped_workspace_bytes(
    weight: Weight[Any],
    m: int,
    dtype: DTypeLike,
    *,
    indexed: bool = True,
    gradient: bool = False,
) -> int:
    """Returns the bytes of workspace that `matmul_grouped` needs for m rows of y in device memory.
    Fewer rows never need more.

    dtype     of x, as for `matmul_workspace_bytes`
    indexed   whether there is an x_index
    gradient  return the bytes that matmul_grouped_grad needs instead

    Raises InvalidArgument.
    """
    stack = _stack_of(weight, gradient)
    number, m = _convert.DTYPES[_convert.dtype_name(dtype)], _convert.count("m", m)
    args = grouped_args(number, stack.experts, m, m, stack.columns, stack.outputs, indexed)
    arguments = stack.prepared.argument, ctypes.byref(args)
    return _call.workspace_bytes(stack.operation, arguments, stack.names)


@overload  # the first that fits is taken: tensors are ArrayLike, too
def matmul_grouped(  # type: ignore[overload-overlap]
    x: Array, weight: Weight[Any], ends: MemoryLike, *, out: None = ..., **options: Unpack[Grouped]
) -> Array: ...


@overload
def matmul_grouped(
    x: ArrayLike,
    weight: Weight[Any],
    ends: MemoryLike,
    *,
    out: None = ...,
    **options: Unpack[Grouped],
) -> np.ndarray: ...


@overload
def matmul_grouped(
    x: ArrayLike, weight: Weight[Any], ends: MemoryLike, *, out: Out, **options: Unpack[Grouped]
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
    """Multiplies a stack of experts (mixture of experts), each by its own rows of x:
    y[i] = row_scale[i] * (x[x_index[i]] W[e]^T + bias[e]), where e is the expert of row i. The
    rows of y are sorted by expert: the rows of expert e end before ends[e] and begin where the rows
    of the previous expert end, like the offs of torch.nn.functional.grouped_mm. No weight is
    dequantized as a whole. In device memory the host reads no value of ends, x_index or row_scale,
    so a CUDA graph may be replayed with other values.

    x          an array [x_rows, cols], as for matmul; in device memory fp16 or bf16
    weight     a QuantizedTensor of shape [experts, rows, cols], where rows * cols is a multiple of
               the blocksize if there are several experts; or an Int4Tensor of this shape, in device
               memory without g_idx and permutation
    ends       int32 [experts]. An expert whose end is below the previous end has no rows, and an
               end beyond y counts as the end of y. Rows of y past the last end are unspecified
    x_index    int32 [m], the row of x for each row of y; an index out of range stands for a row of
               zeros. None: row i of x for row i of y
    bias       an array [experts, rows] in the dtype of x, contiguous
    row_scale  fp32 [m], such as the router's weights
    out        an array [m, rows] in the dtype of x, as for matmul. By default new memory

    workspace, threads and stream are as for matmul; `matmul_grouped_workspace_bytes()` returns the
    size of the workspace. Returns `out`, or the new memory. Raises the errors of quantize; `out` is
    then unchanged.
    """
    return _products(x, weight, ends, x_index, bias, row_scale, out, workspace, threads, stream)


@overload  # the first that fits is taken: tensors are ArrayLike, too
def matmul_grouped_grad(  # type: ignore[overload-overlap]
    grad_y: Array,
    weight: Weight[Any],
    ends: MemoryLike,
    *,
    out: None = ...,
    **options: Unpack[GroupedGrad],
) -> Array: ...


@overload
def matmul_grouped_grad(
    grad_y: ArrayLike,
    weight: Weight[Any],
    ends: MemoryLike,
    *,
    out: None = ...,
    **options: Unpack[GroupedGrad],
) -> np.ndarray: ...


@overload
def matmul_grouped_grad(
    grad_y: ArrayLike,
    weight: Weight[Any],
    ends: MemoryLike,
    *,
    out: Out,
    **options: Unpack[GroupedGrad],
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
    """Computes the gradient of matmul_grouped with respect to the row of x of each row of y:
    grad_x[i] = row_scale[i] * grad_y[y_index[i]] W[e], where e is the expert of row i. If x_index
    gave one row of x to several rows of y, the gradient of this row of x is the sum of their rows
    of grad_x, which the caller adds up. No weight is dequantized as a whole.

    grad_y     an array [y_rows, rows], like x of matmul_grouped
    weight     a QuantizedTensor of shape [experts, rows, cols]
    y_index    int32 [m], the row of grad_y for each row of grad_x; an index out of range stands for
               a row of zeros. None: row i of grad_y for row i
    row_scale  fp32 [m], as for matmul_grouped
    out        an array [m, cols] in the dtype of grad_y, as for matmul. By default new memory

    ends, workspace, threads and stream are as for matmul_grouped;
    matmul_grouped_workspace_bytes(..., gradient=True) returns the size of the workspace. Returns
    `out`, or the new memory. Raises the errors of quantize; `out` is then unchanged.
    """
    beside = y_index, None, row_scale, out, workspace, threads, stream
    return _products(grad_y, weight, ends, *beside, gradient=True)


def _products(
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
    gradient: bool = False,
) -> Any:
    """Both operations. For the gradient, x is grad_y and x_index is y_index."""
    threads, handle = _call.read_options(threads, stream)
    stack = _stack_of(weight, gradient)
    prepared, experts, rows, columns, outputs, operation, names = stack
    name, name_of_index = ("grad_y", "y_index") if gradient else ("x", "x_index")
    given = read_array(name, x, prepared.torch, 2)
    torch = prepared.torch or given.torch
    x_stride, dtype, m = given.row_stride(columns), given.require_float(), given.shape[0]
    operands = {"x": given, "ends": read("ends", ends, torch).expect("int32", experts)}
    if x_index is not None:
        index = read_array(name_of_index, x_index, torch, 1)
        m = index.shape[0]
        operands["x_index"] = index.expect("int32", m)
    _convert.integer("rows of " + name, max(m, given.shape[0]), 64)
    y = None if out is None else read("out", out, torch)
    where = given.torch, given.on_device, handle
    operands["y"], y_stride = _call.output(y, (m, outputs), dtype, name, *where)
    if bias is not None:
        operands["bias"] = read("bias", bias, torch).expect(dtype, experts * rows)
    if row_scale is not None:
        operands["row_scale"] = read("row_scale", row_scale, torch).expect("fp32", m)
    number, indexed = _convert.DTYPES[dtype], x_index is not None
    args = grouped_args(number, experts, m, given.shape[0], x_stride, y_stride, indexed)
    args.bias_stride = rows
    for field, operand in operands.items():
        # The address of an empty x_index may be 0, which would say that there is none.
        setattr(args, field, operand.address or (SOME if field == "x_index" else None))
    arguments = prepared.argument, ctypes.byref(args)
    problem = _call.Problem(
        operation,
        arguments,
        on_device(prepared.located, *operands.values()),
        torch or operands["y"].torch,
        operands["y"].owner if out is None else out,
        names,
        functools.partial(_call.workspace_bytes, operation, arguments, names),
        () if out is None else (out,),
        args,
        (prepared, operands),
    )
    return _call.run(problem, threads, handle, workspace)
