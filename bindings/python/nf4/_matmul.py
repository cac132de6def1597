"""matmul: y = x W^T + bias, and its gradient, grad_y W."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from nf4 import _abi, _call, _convert, _torch
from nf4._load import check
from nf4._lora import Lora, read_lora
from nf4._operand import Operand, on_device, read
from nf4._prepared import GRAD_NAMES, PRODUCT_NAMES, Prepared, prepare
from nf4.errors import InvalidArgument, shown
from nf4.tensor import QuantizedTensor
from nf4.typing import Array, ArrayLike, CudaStreamLike, DTypeLike, MemoryLike, Out
from nf4.weight import Weight

ARGS_SIZE = ctypes.sizeof(_abi.MatmulArgs)


class Problem(NamedTuple):
    """A product, checked. `lora`, which args points to, and `operands` are kept until C has been
    called; `torch` is the device of a tensor among them or the weight's parts."""

    weight: Prepared
    args: _abi.MatmulArgs
    lora: _abi.Lora | None
    y: MemoryLike
    on_device: bool
    torch: _torch.Device | None
    operands: Sequence[Operand]


def problem_of(
    weight: Prepared,
    x: ArrayLike,
    bias: MemoryLike | None,
    out: MemoryLike | None,
    stream: int | None,
    lora: Lora | None = None,
    gradient: bool = False,
) -> Problem:
    """Reads x, out, bias and lora, checks them, and makes y where `out` is None. Of the gradient x
    is grad_y."""
    name = "grad_y" if gradient else "x"
    columns, rows = (weight.rows, weight.cols) if gradient else (weight.cols, weight.rows)
    given = read(name, x, weight.torch)
    torch = weight.torch or given.torch
    x_stride, dtype = given.row_stride(columns), given.dtype
    if given.shape is None:
        raise InvalidArgument(f"{name} is an address; expected an array, for its shape")
    if dtype not in _convert.DTYPES:
        raise InvalidArgument(f"{name} is of {dtype}; expected fp32, fp16 or bf16")
    m, shape = math.prod(given.shape[:-1]), (*given.shape[:-1], rows)
    if m >> 63:
        raise InvalidArgument(f"the number of rows of {name} is {m}; expected a 64-bit integer")
    if out is None:
        out = _call.new_output(shape, dtype, given.torch, given.on_device, stream)
    y = read("out", out, torch)
    y_stride = y.row_stride(rows)
    require_output(y, shape, dtype, name)
    operands = [given, y]
    if bias is not None:
        operands.append(read("bias", bias, torch).expect(dtype, weight.rows))
    in_device_memory = on_device(weight.located, *operands)
    if in_device_memory and not gradient and dtype == "fp32" and m > weight.fp32_rows:
        few = f", or at most {weight.fp32_rows} rows of x," if weight.fp32_rows > 0 else ""
        raise InvalidArgument(f"x is of fp32; expected fp16 or bf16{few} in device memory")
    adapter = None
    if lora is not None:
        where = torch or y.torch
        adapter, parts = read_lora(lora, weight, dtype, m, where, in_device_memory)
        operands += parts
        on_device(weight.located, *operands)
    bias_address = None if bias is None else operands[2].address
    args = _abi.MatmulArgs(
        ARGS_SIZE,
        _convert.DTYPES[dtype],
        0,
        m,
        given.address,
        x_stride,
        bias_address,
        y.address,
        y_stride,
        None if adapter is None else ctypes.addressof(adapter),
    )
    return Problem(weight, args, adapter, out, in_device_memory, torch or y.torch, operands)


def require_output(y: Operand, shape: tuple[int, ...], dtype: str, like: str) -> None:
    if y.torch is None:  # every tensor may be written
        y.require_writable()
    if y.shape is not None and y.shape != shape:
        raise InvalidArgument(f"{y.name} is of shape {y.shape}; expected {shape}")
    if y.dtype is not None and y.dtype != dtype:
        raise InvalidArgument(f"{y.name} is of {y.dtype}; expected {dtype}, as {like} is")


def device_workspace(
    value: MemoryLike | None,
    needed: int,
    torch: _torch.Device | None,
    stream: int | None,
) -> tuple[Operand, int]:
    """_call.workspace for a product in device memory."""
    found, nbytes = _call.workspace(value, needed, True, torch, stream)
    if found.on_device is False:
        raise InvalidArgument("workspace is in host memory; expected device memory, as x is")
    return found, nbytes


def require_host_arguments(stream: CudaStreamLike | None, workspace: MemoryLike | None) -> None:
    """For a product in host memory, where neither means anything."""
    _call.require_no_stream(stream)
    if workspace is not None:
        raise InvalidArgument("workspace is given; expected None for host memory")


def matmul_workspace_bytes(
    weight: Weight[Any], m: int, dtype: DTypeLike, *, rank: int = 0, gradient: bool = False
) -> int:
    """Bytes of workspace that `matmul` needs for m rows of x in device memory: 0 for up to 8,
    unless the weight has a permutation, there is an adapter, or it is a gradient; and never more
    for fewer rows.

    dtype     of x: "fp16", "bf16", or a numpy or torch dtype
    rank      of an adapter; 0: none
    gradient  of matmul_grad instead

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
            f"weight is {shown(weight)}; expected a QuantizedTensor, which alone has {what}"
        )


@overload  # the first that fits is taken: tensors are ArrayLike, too
def matmul(  # type: ignore[overload-overlap]
    x: Array,
    weight: Weight[Any],
    *,
    bias: MemoryLike | None = ...,
    lora: Lora | None = ...,
    out: None = ...,
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> Array: ...


@overload
def matmul(
    x: ArrayLike,
    weight: Weight[Any],
    *,
    bias: MemoryLike | None = ...,
    lora: Lora | None = ...,
    out: None = ...,
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> np.ndarray: ...


@overload
def matmul(
    x: ArrayLike,
    weight: Weight[Any],
    *,
    bias: MemoryLike | None = ...,
    lora: Lora | None = ...,
    out: Out,
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> Out: ...


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
    """y = x W^T + bias for a quantized weight W, which is never dequantized as a whole. Sums are
    in binary32 and each is rounded once. With an adapter, y = x (W + scale B A)^T + bias, where
    x A^T is rounded to the dtype of x.

    x          an array [..., cols] of fp16, bf16 or fp32: a numpy array, a torch tensor, or an
               object with __cuda_array_interface__ or __dlpack__. Each row is contiguous, and rows
               are at one distance of cols elements or more. In device memory fp32 is of up to 16
               rows, and not with an Int4Tensor
    weight     a QuantizedTensor of shape [..., rows, cols], whose leading dimensions count as rows,
               or an Int4Tensor
    bias       a contiguous array of one element for each row of the weight, in the dtype of x
    lora       an nf4.Lora: an adapter; not with an Int4Tensor
    out        an array [..., rows] with the leading dimensions and the dtype of x and strides as
               x may have them, or the address of such memory without gaps. Nothing is written
               between its rows. By default new memory: a torch tensor for a torch tensor, on its
               device, and a numpy array for all else in host memory. Required for all else in
               device memory
    workspace  uint8 in device memory, of `matmul_workspace_bytes()` or more, 16-byte aligned.
               Made for torch tensors; else required unless that is 0, as it is for up to 8 rows
               of x where the weight has no permutation. Calls that may run at the same time must
               not share one: they could hang
    threads    on the CPU: how many at most; 0: one for each processor. The result does not
               depend on it
    stream     for device memory, as for quantize

    A row of x that has a NaN or an infinity spoils its own row of y only. torch is told that an
    `out` has changed, as by quantize.

    Returns `out`, or what was made. Raises what quantize raises; then `out` is as it was.
    """
    return _run(x, weight, bias, lora, out, workspace, threads, stream)


@overload  # the first that fits is taken: tensors are ArrayLike, too
def matmul_grad(  # type: ignore[overload-overlap]
    grad_y: Array,
    weight: Weight[Any],
    *,
    lora: Lora | None = ...,
    out: None = ...,
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> Array: ...


@overload
def matmul_grad(
    grad_y: ArrayLike,
    weight: Weight[Any],
    *,
    lora: Lora | None = ...,
    out: None = ...,
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
) -> np.ndarray: ...


@overload
def matmul_grad(
    grad_y: ArrayLike,
    weight: Weight[Any],
    *,
    lora: Lora | None = ...,
    out: Out,
    workspace: MemoryLike | None = ...,
    threads: int = ...,
    stream: CudaStreamLike | None = ...,
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
    """The gradient of matmul with respect to x: grad_y W, for a QuantizedTensor W, which is never
    dequantized as a whole. With an adapter grad_y (W + scale B A), where grad_y B is rounded to
    the dtype of grad_y.

    grad_y  an array [..., rows], as x of matmul is one of [..., cols]; in device memory fp32 is of
            any number of rows
    weight  a QuantizedTensor of shape [..., rows, cols]
    lora    an nf4.Lora: an adapter
    out     an array [..., cols] with the leading dimensions and the dtype of grad_y; else as
            matmul's

    workspace, threads and stream are as matmul's; matmul_workspace_bytes(..., gradient=True) says
    how much workspace. Returns `out`, or what was made. Raises what quantize raises; then `out` is
    as it was.
    """
    require_codebook(weight)
    return _run(grad_y, weight, None, lora, out, workspace, threads, stream, gradient=True)


def _run(
    x: ArrayLike,
    weight: Weight[Any],
    bias: MemoryLike | None,
    lora: Lora | None,
    out: MemoryLike | None,
    workspace: MemoryLike | None,
    threads: int,
    stream: CudaStreamLike | None,
    gradient: bool = False,
) -> MemoryLike:
    threads = _convert.integer("threads", threads, 32)
    handle = None if stream is None else _call.stream_handle(stream)
    prepared = prepare(weight)
    if lora is not None:
        require_codebook(weight, "adapters")
    problem = problem_of(prepared, x, bias, out, handle, lora, gradient)
    args, operands = problem.args, (prepared.argument, ctypes.byref(problem.args))
    names = GRAD_NAMES if gradient else PRODUCT_NAMES
    of_kind = prepared.functions
    if problem.on_device:
        rank = 0 if problem.lora is None else problem.lora.rank
        needed = prepared.matmul_workspace(
            args.dtype, args.m, args.x_stride, args.y_stride, rank, gradient
        )
        enqueued_on = _call.launch_stream(handle, threads, problem.torch)
        space, nbytes = device_workspace(workspace, needed, problem.torch, handle)
        launch = of_kind.matmul_grad_launch if gradient else of_kind.matmul_launch
        status = launch(*operands, space.address, nbytes, enqueued_on)
    else:
        require_host_arguments(stream, workspace)
        on_cpu = of_kind.matmul_grad_cpu if gradient else of_kind.matmul_cpu
        status = on_cpu(*operands, threads)
    check(status, names)
    product = None if lora is None else lora.product
    if out is not None or workspace is not None or product is not None:
        _torch.tell_of_writes((out, workspace, product))
    return problem.y
