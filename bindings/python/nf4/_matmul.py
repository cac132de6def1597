"""matmul: y = x W^T + bias, and its gradient, grad_y W."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, overload

import numpy as np

from nf4 import _abi, _call, _convert
from nf4._args import GRAD_NAMES, PRODUCT_NAMES
from nf4._call import Problem
from nf4._lora import Lora, read_lora
from nf4._operand import on_device, read, read_array
from nf4._options import Matmul, MatmulGrad, Unpack
from nf4._prepared import prepare
from nf4.errors import InvalidArgument, shown
from nf4.tensor import QuantizedTensor
from nf4.typing import Array, ArrayLike, CudaStreamLike, DTypeLike, MemoryLike, Out
from nf4.weight import Weight

_ARGS_SIZE = ctypes.sizeof(_abi.MatmulArgs)


def problem_of(
    weight: Weight[Any],
    x: ArrayLike,
    bias: MemoryLike | None,
    out: MemoryLike | None,
    stream: int | None,
    lora: Lora | None = None,
    gradient: bool = False,
) -> Problem:
    """Reads x, out, bias and lora, checks them, and makes y where `out` is None. For the gradient,
    x is grad_y."""
    prepared = prepare(weight)
    if lora is not None:
        require_codebook(weight, "adapters")
    if gradient:
        name, names, operation = "grad_y", GRAD_NAMES, prepared.functions.matmul_grad
        columns, rows = prepared.rows, prepared.cols
    else:
        name, names, operation = "x", PRODUCT_NAMES, prepared.functions.matmul
        columns, rows = prepared.cols, prepared.rows
    given = read_array(name, x, prepared.torch)
    torch = prepared.torch or given.torch
    x_stride, dtype = given.row_stride(columns), given.require_float()
    leading = given.shape[:-1]
    m = math.prod(leading)
    if m >> 63:
        raise InvalidArgument(f"the number of rows of {name} is {m}; expected a 64-bit integer")
    y = None if out is None else read("out", out, torch)
    where = given.torch, given.on_device, stream
    y, y_stride = _call.output(y, (*leading, rows), dtype, name, *where)
    operands = [given, y]
    if bias is not None:
        operands.append(read("bias", bias, torch).expect(dtype, prepared.rows))
    in_device_memory = on_device(prepared.located, *operands)
    torch = torch or y.torch
    adapter = None
    if lora is not None:
        adapter, parts = read_lora(lora, prepared, dtype, m, torch, in_device_memory)
        operands += parts
        on_device(prepared.located, *operands)
    args = _abi.MatmulArgs(
        _ARGS_SIZE,
        _convert.DTYPES[dtype],
        0,
        m,
        given.address,
        x_stride,
        None if bias is None else operands[2].address,
        y.address,
        y_stride,
        None if adapter is None else ctypes.addressof(adapter),
    )
    needed = None
    if in_device_memory:
        rank = 0 if adapter is None else adapter.rank
        sizes = args.dtype, m, x_stride, y_stride, rank, gradient
        needed = functools.partial(prepared.matmul_workspace, *sizes)
    product = None if lora is None else lora.product
    return Problem(
        operation,
        (prepared.argument, ctypes.byref(args)),
        in_device_memory,
        torch,
        y.owner if out is None else out,
        names,
        needed,
        () if out is None and product is None else (out, product),
        args,
        (prepared, adapter, operands),
    )


def matmul_workspace_bytes(
    weight: Weight[Any], m: int, dtype: DTypeLike, *, rank: int = 0, gradient: bool = False
) -> int:
    """Returns the bytes of workspace that `matmul` needs for m rows of x in device memory. For up
    to 8 rows it is 0, unless the weight has a permutation, there is an adapter, or it is for the
    gradient. Fewer rows never need more.

    dtype     of x: "fp16", "bf16", or a numpy or torch dtype
    rank      of an adapter; 0: no adapter
    gradient  return the bytes that matmul_grad needs instead

    Raises InvalidArgument.
    """
    prepared = prepare(weight)
    if gradient:
        require_codebook(weight)
    number = _convert.DTYPES[_convert.dtype_name(dtype)]
    x_stride, y_stride = prepared.cols, prepared.rows
    if gradient:
        x_stride, y_stride = y_stride, x_stride
    rank = _convert.integer("rank", rank, 32)
    m = _convert.count("m", m)
    return prepared.matmul_workspace(number, m, x_stride, y_stride, rank, bool(gradient))


def require_codebook(weight: Weight[Any], what: str = "a gradient") -> None:
    if not isinstance(weight, QuantizedTensor):
        raise InvalidArgument(
            f"weight is {shown(weight)}; expected a QuantizedTensor; only it has {what}"
        )


@overload  # the first that fits is taken: tensors are ArrayLike, too
def matmul(  # type: ignore[overload-overlap]
    x: Array, weight: Weight[Any], *, out: None = ..., **options: Unpack[Matmul]
) -> Array: ...


@overload
def matmul(
    x: ArrayLike, weight: Weight[Any], *, out: None = ..., **options: Unpack[Matmul]
) -> np.ndarray: ...


@overload
def matmul(x: ArrayLike, weight: Weight[Any], *, out: Out, **options: Unpack[Matmul]) -> Out: ...


def matmul(
    x: ArrayLike,
    weight: Weight[Any],
    *,
    bias: MemoryLike | None = None,
    lora: Lora | None = None,
    out: MemoryLike | None = None,
    workspace: MemoryLike | None = None,
    threads: int = 0,
    stream: CudaStreamLike | None = None,
) -> MemoryLike:
    """Computes y = x W^T + bias for a quantized weight W, which is never dequantized as a whole.
    Each sum is computed in float32 and rounded once. With an adapter, y = x (W + scale B A)^T +
    bias, where x A^T is rounded to the dtype of x.

    x          an array [..., cols] in fp16, bf16 or fp32: a numpy array, a torch tensor, or an
               object with __cuda_array_interface__ or __dlpack__. Each row is contiguous, and all
               rows have one stride of at least cols elements. In device memory fp32 has at most 16
               rows, and needs a QuantizedTensor
    weight     a QuantizedTensor of shape [..., rows, cols], whose leading dimensions count as rows,
               or an Int4Tensor
    bias       a contiguous array with an element for each row of the weight, in the dtype of x
    lora       an nf4.Lora: an adapter; only with a QuantizedTensor
    out        an array [..., rows] with the leading dimensions and the dtype of x, and with strides
               like x's; or the address of contiguous memory. Memory between its rows is not
               written. By default the result is new memory: a torch tensor on the device of x if x
               is a torch tensor, or else a numpy array in host memory. Required for device memory
               that is not in torch tensors
    workspace  uint8 in device memory, of at least `matmul_workspace_bytes()` bytes, aligned to 16
               bytes. Allocated for torch tensors; otherwise required if that size is not 0. Calls
               that may run at the same time must not share a workspace: they could hang
    threads    on the CPU: the most threads to use; 0: one for each processor. The result does not
               depend on it
    stream     for device memory, as for quantize

    A NaN or an infinity in a row of x affects only the same row of y. torch is told that an `out`
    has changed, as by quantize.

    Returns `out`, or the new memory. Raises the errors of quantize; `out` is then unchanged.
    """
    threads, handle = _call.read_options(threads, stream)
    problem = problem_of(weight, x, bias, out, handle, lora)
    return _call.run(problem, threads, handle, workspace)


@overload  # the first that fits is taken: tensors are ArrayLike, too
def matmul_grad(  # type: ignore[overload-overlap]
    grad_y: Array, weight: Weight[Any], *, out: None = ..., **options: Unpack[MatmulGrad]
) -> Array: ...


@overload
def matmul_grad(
    grad_y: ArrayLike,
    weight: Weight[Any],
    *,
    out: None = ...,
    **options: Unpack[MatmulGrad],
) -> np.ndarray: ...


@overload
def matmul_grad(
    grad_y: ArrayLike, weight: Weight[Any], *, out: Out, **options: Unpack[MatmulGrad]
) -> Out: ...


def matmul_grad(
    grad_y: ArrayLike,
    weight: Weight[Any],
    *,
    lora: Lora | None = None,
    out: MemoryLike | None = None,
    workspace: MemoryLike | None = None,
    threads: int = 0,
    stream: CudaStreamLike | None = None,
) -> MemoryLike:
    """Computes the gradient of matmul with respect to x: grad_y W, for a QuantizedTensor W, which
    is never dequantized as a whole. With an adapter it is grad_y (W + scale B A), where grad_y B is
    rounded to the dtype of grad_y.

    grad_y  an array [..., rows], like x of matmul; in device memory fp32 may have any number of
            rows
    weight  a QuantizedTensor of shape [..., rows, cols]
    lora    an nf4.Lora: an adapter
    out     an array [..., cols] with the leading dimensions and the dtype of grad_y, as for matmul

    workspace, threads and stream are as for matmul; matmul_workspace_bytes(..., gradient=True)
    returns the size of the workspace. Returns `out`, or the new memory. Raises the errors of
    quantize; `out` is then unchanged.
    """
    require_codebook(weight)
    threads, handle = _call.read_options(threads, stream)
    problem = problem_of(weight, grad_y, None, out, handle, lora, gradient=True)
    return _call.run(problem, threads, handle, workspace)
