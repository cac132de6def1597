"""matmul and matmul_batch: y = x W^T + bias."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from nf4 import _abi, _call, _convert, _torch
from nf4._load import check, library
from nf4._operand import Operand
from nf4._prepared import PRODUCT_NAMES, Prepared, prepare
from nf4._readers import read
from nf4.errors import InvalidArgument, kind_of
from nf4.tensor import QuantizedTensor
from nf4.typing import Array, ArrayLike, CudaStreamLike, DTypeLike, MemoryLike, Out

_ARGS_SIZE = ctypes.sizeof(_abi.MatmulArgs)


class _Product(NamedTuple):
    """A product, checked: its weight, what C gets, and the y to return. `torch` is the device of
    a tensor among its arguments. `operands` keep memory alive until C has been called."""

    weight: Prepared
    args: _abi.MatmulArgs
    y: Any
    on_device: bool
    torch: _torch.Device | None
    operands: tuple[Operand, ...]


def _product(
    weight: Prepared,
    x: ArrayLike,
    bias: MemoryLike | None,
    out: MemoryLike | None,
    stream: CudaStreamLike | None,
) -> _Product:
    """Reads and checks x, out and bias, and makes y where `out` is None."""
    rows = read("x", x, weight.torch)
    x_stride, m = rows.row_stride(weight.cols), _count_rows(rows)
    dtype, torch = rows.dtype, weight.torch or rows.torch
    shape = (*rows.shape[:-1], weight.rows)
    y = out
    if out is None:
        y = _call.new_output(shape, dtype, rows.torch, rows.on_device, stream)
    target = read("out", y, torch)
    y_stride = target.row_stride(weight.rows)
    _require_output(target, shape, dtype)
    operands, bias_address = (rows, target), None
    if bias is not None:
        added = read("bias", bias, torch).expect(dtype, weight.rows)
        operands, bias_address = (rows, target, added), added.address
    on_device = weight.is_on_device(*operands)
    if on_device and dtype == "fp32":
        raise InvalidArgument("x is of fp32; expected fp16 or bf16 in device memory")
    args = _abi.MatmulArgs(
        _ARGS_SIZE,
        _convert.DTYPES[dtype],
        0,
        m,
        rows.address,
        x_stride,
        bias_address,
        target.address,
        y_stride,
    )
    return _Product(weight, args, y, on_device, torch or target.torch, operands)


def _count_rows(x: Operand) -> int:
    """The m of a product."""
    if x.shape is None:
        raise InvalidArgument("x is an address; expected an array, for its shape")
    if x.dtype not in _convert.DTYPES:
        raise InvalidArgument(f"x is of {x.dtype}; expected fp32, fp16 or bf16")
    m = math.prod(x.shape[:-1])
    return m if m >> 63 == 0 else _convert.integer("the number of rows of x", m, 64)


def _require_output(y: Operand, shape: tuple[int, ...], dtype: str) -> None:
    y.require_writable()
    if y.shape is not None and y.shape != shape:
        raise InvalidArgument(f"out is of shape {y.shape}; expected {shape}")
    if y.dtype is not None and y.dtype != dtype:
        raise InvalidArgument(f"out is of {y.dtype}; expected {dtype}, as x is")


def _launch_arguments(
    torch: _torch.Device | None,
    needed: int,
    workspace: MemoryLike | None,
    threads: int,
    stream: CudaStreamLike | None,
) -> tuple[Operand, tuple[int, int, int]]:
    """The workspace, which must live until C has been called, and what a launch gets after its
    operands."""
    enqueued_on = _call.launch_stream(stream, threads, torch)
    scratch, nbytes = _call.workspace(workspace, needed, True, torch, stream)
    if scratch.on_device is False:
        raise InvalidArgument("workspace is in host memory; expected device memory, as x is")
    return scratch, (scratch.address, nbytes, enqueued_on)


def _require_host_arguments(workspace: MemoryLike | None, stream: CudaStreamLike | None) -> None:
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


@overload
def matmul(
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
    threads = _convert.integer("threads", threads, 32)
    product = _product(prepare(weight), x, bias, out, stream)
    argument, args = product.weight.argument, product.args
    if product.on_device:
        needed = product.weight.matmul_workspace(args.dtype, args.m, args.x_stride, args.y_stride)
        scratch, rest = _launch_arguments(product.torch, needed, workspace, threads, stream)
        status = library().nf4_matmul_launch(argument, ctypes.byref(args), *rest)
    else:
        _require_host_arguments(workspace, stream)
        status = library().nf4_matmul_cpu(argument, ctypes.byref(args), threads)
    check(status, PRODUCT_NAMES)
    if out is not None or workspace is not None:
        _torch.tell_of_writes((out, workspace))
    return product.y


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


def _products(
    arguments: Iterable[tuple[Any, Any, Any, Any]], stream: CudaStreamLike | None
) -> list[_Product]:
    """Of (weight, x, bias, out) for each product, all of them in one place."""
    products: list[_Product] = []
    try:
        for weight, x, bias, out in arguments:
            product = _product(prepare(weight), x, bias, out, stream)
            if products and product.on_device != products[0].on_device:
                ours, theirs = ("device", "host") if product.on_device else ("host", "device")
                raise InvalidArgument(f"in {ours} memory, but product 0 is in {theirs} memory")
            products.append(product)
    except InvalidArgument as error:
        raise InvalidArgument(f"product {len(products)}: {error}") from None
    return products


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
def matmul_batch(
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
    out: Sequence[MemoryLike | None] | None = ...,
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
) -> list[Any]:
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
    threads = _convert.integer("threads", threads, 32)
    weights = _listed(weights)
    count = len(weights)
    each_x = _for_each("x", x, count) if isinstance(x, (list, tuple)) else [x] * count
    each_out = _for_each("out", out, count)
    arguments = zip(weights, each_x, _for_each("bias", bias, count), each_out, strict=True)
    products = _products(arguments, stream)
    if not products:
        return []
    batch = _batch([each.weight for each in products], [each.args for each in products])
    if products[0].on_device:
        torch = next((each.torch for each in products if each.torch is not None), None)
        needed = _batch_workspace(batch)
        scratch, rest = _launch_arguments(torch, needed, workspace, threads, stream)
        status = library().nf4_matmul_batch_launch(*batch, *rest)
    else:
        _require_host_arguments(workspace, stream)
        status = library().nf4_matmul_batch_cpu(*batch, threads)
    check(status, PRODUCT_NAMES)
    _torch.tell_of_writes((*each_out, workspace))
    return [each.y for each in products]
