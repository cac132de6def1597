"""matmul and matmul_batch: what users call."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from nf4 import _abi, _call, _convert, _memory, _torch
from nf4._bound import PRODUCT_NAMES, Bound, bound
from nf4._load import check, library
from nf4._memory import Buffer, Matrix
from nf4.errors import InvalidArgument, kind_of
from nf4.tensor import QuantizedTensor


def _new_product(x: Matrix, shape: tuple[int, ...], stream: Any) -> Any:
    """An uninitialised y beside x: a tensor for a tensor, a numpy array for all else in host
    memory."""
    if x.torch is not None:
        if stream is None or not x.torch.is_cuda:
            return x.torch.known_maker(shape, x.dtype)()
        return x.torch.empty(shape, x.dtype, stream)
    if x.on_device:
        raise InvalidArgument("out is None; expected an array of device memory")
    try:
        return _memory.new_output(shape, _convert.NUMPY_DTYPES[x.dtype])
    except ValueError as error:
        raise InvalidArgument(f"out of shape {shape}: {error}") from None


def _factor(weight: Bound, x: Any) -> Matrix:
    """The x of a product, checked."""
    found = weight.matrix("x", x, weight.cols)
    if found.shape is None:
        raise InvalidArgument("x is an address; expected an array, for its shape")
    if found.dtype not in _convert.DTYPES:
        raise InvalidArgument(f"x is of {found.dtype}; expected fp32, fp16 or bf16")
    return found


def _output(weight: Bound, x: Matrix, out: Any) -> Matrix:
    """The y of a product, checked."""
    shape = (*x.shape[:-1], weight.rows)
    found = weight.matrix("out", out, weight.rows, written=True)
    if found.shape is not None and found.shape != shape:
        raise InvalidArgument(f"out is of shape {found.shape}; expected {shape}")
    if found.dtype not in (None, x.dtype):
        raise InvalidArgument(f"out is of {found.dtype}; expected {x.dtype}, as x is")
    return found


def _in_one_place(weight: Bound, places: dict[str, bool | None]) -> bool:
    """Is all of this, and the weight, device memory? It is all in one place."""
    if set(places.values()) == {weight.on_device}:
        return weight.on_device is not False
    others = [Buffer(name, 0, None, on_device=place) for name, place in places.items()]
    return _memory.on_device([*weight.parts, *others])


class _Product(NamedTuple):
    """A product, checked: its weight, what C gets, and the y to return. `torch` is the device of
    a tensor among them, and `keep` what must live until C has been called."""

    weight: Bound
    args: _abi.MatmulArgs
    result: Any
    on_device: bool
    torch: _torch.Device | None
    keep: Any


def _prepare(weight: QuantizedTensor, x: Any, bias: Any, out: Any, stream: Any) -> _Product:
    """Checks the operands of a product, and makes y where `out` is None."""
    prepared = bound(weight)
    factor = _factor(prepared, x)
    result = out
    if out is None:
        result = _new_product(factor, (*factor.shape[:-1], prepared.rows), stream)
    y = _output(prepared, factor, result)
    places = {"x": factor.on_device, "out": y.on_device}
    if bias is not None:
        bias = _memory.buffer("bias", bias).expect(factor.dtype, prepared.rows)
        places["bias"] = bias.on_device
    on_device = _in_one_place(prepared, places)
    if on_device and factor.dtype == "fp32":
        raise InvalidArgument("x is of fp32; expected fp16 or bf16 in device memory")
    args = _abi.MatmulArgs(
        ctypes.sizeof(_abi.MatmulArgs),
        _convert.DTYPES[factor.dtype],
        0,
        math.prod(factor.shape[:-1]),
        factor.address,
        factor.stride,
        None if bias is None else bias.address,
        y.address,
        y.stride,
    )
    torch = factor.torch or prepared.torch or y.torch
    return _Product(prepared, args, result, on_device, torch, (factor, y, bias))


def _launch_arguments(
    torch: _torch.Device | None, needed: int, workspace: Any, threads: int, stream: Any
) -> tuple[list[Buffer], tuple[int | None, int, int]]:
    """The scratch, which must live until C has been called, and what a launch gets after its
    operands."""
    enqueued_on = _call.launch_stream(stream, threads, torch)
    scratch, scratch_bytes = _call.workspace(workspace, needed, True, torch, stream)
    if scratch and scratch[0].on_device is False:
        raise InvalidArgument("workspace is in host memory; expected device memory, as x is")
    return scratch, (scratch[0].address if scratch else None, scratch_bytes, enqueued_on)


def _require_host_arguments(workspace: Any, stream: Any) -> None:
    _call.require_no_stream(stream)
    if workspace is not None:
        raise InvalidArgument("workspace is given; expected None for host memory")


def matmul_workspace_bytes(weight: QuantizedTensor, m: int, dtype: Any) -> int:
    """Bytes of scratch that `matmul` needs for m rows of x in device memory: 0 for up to 64, and
    never more for fewer rows.

    dtype  of x: "fp16", "bf16", or a numpy or torch dtype

    Raises InvalidArgument.
    """
    found = bound(weight)
    code = _convert.DTYPES[_convert.dtype_name(dtype)]
    return found.matmul_workspace(code, _convert.count("m", m), found.cols, found.rows)


def matmul(
    x: Any,
    weight: QuantizedTensor,
    *,
    bias: Any = None,
    out: Any = None,
    workspace: Any = None,
    threads: int = 0,
    stream: Any = None,
) -> Any:
    """x times the transpose of a quantized weight, plus a bias: y = x W^T + bias, without W ever
    being dequantized as a whole. Sums are in binary32, each is rounded once.

    x          an array [..., cols] of fp16 or bf16, or of fp32 on the CPU: a numpy array, a torch
               tensor, or an object with __cuda_array_interface__ or __dlpack__. The elements of a
               row are contiguous, and rows follow each other at one distance, of cols or more
    weight     of shape [..., rows, cols]: the leading dimensions are rows as well, as many as
               their product
    bias       an array of as many elements as the weight has rows, in the dtype of x; contiguous
    out        an array [..., rows], with the leading dimensions and the dtype of x and with rows
               as those of x are; or the address of such memory without gaps. What is between its
               rows is not written. By default new memory: a torch tensor for a torch tensor, on
               its device, and a numpy array for all else in host memory. Needed for all else in
               device memory
    workspace  uint8 scratch in device memory, of `matmul_workspace_bytes()` or more, 16-byte
               aligned. Made for torch tensors; else needed unless that is 0, as it is for up to
               64 rows of x. Calls that may run at the same time must not share it: they may
               never end
    threads    on the CPU: how many at most; 0: one for each processor. No bit depends on it
    stream     for device memory, as for quantize

    An x that is not finite spoils its own row of y only. torch is told that an `out` has changed,
    as quantize tells it.

    Returns `out`, or what was made. Raises what quantize raises; then `out` is as it was.
    """
    threads = _convert.integer("threads", threads, 32)
    product = _prepare(weight, x, bias, out, stream)
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
    return product.result


def _listed(weights: Any) -> list[Any]:
    try:
        listed = list(weights)
    except TypeError:
        kind = kind_of(weights)
        raise InvalidArgument(f"weights is {kind}; expected a list of QuantizedTensor") from None
    most = _abi.MATMUL_BATCH_MAX
    if len(listed) > most:
        raise InvalidArgument(f"weights has {len(listed)} elements; expected at most {most}")
    return listed


def _for_each(name: str, values: Any, count: int) -> list[Any]:
    """What is given for each of `count` products; None: nothing for any."""
    if values is None:
        return [None] * count
    if not isinstance(values, Sequence):
        kind = kind_of(values)
        raise InvalidArgument(f"{name} is {kind}; expected a list of {count}, as of weights")
    if len(values) != count:
        raise InvalidArgument(f"{name} has {len(values)} elements; expected {count}, as weights")
    return list(values)


def _prepare_all(operands: Iterable[tuple[Any, Any, Any, Any]], stream: Any) -> list[_Product]:
    """Of (weight, x, bias, out) for each product, all of them in one place."""
    products: list[_Product] = []
    try:
        for weight, x, bias, out in operands:
            product = _prepare(weight, x, bias, out, stream)
            if products and product.on_device != products[0].on_device:
                ours, theirs = ("device", "host") if product.on_device else ("host", "device")
                raise InvalidArgument(f"in {ours} memory, but product 0 is in {theirs} memory")
            products.append(product)
    except InvalidArgument as error:
        raise InvalidArgument(f"product {len(products)}: {error}") from None
    return products


def _weights_and_args(
    weights: Iterable[Bound], args: Sequence[_abi.MatmulArgs]
) -> tuple[ctypes.Array, ctypes.Array, int]:
    """As C takes them."""
    count = len(args)
    descriptors = (ctypes.c_void_p * count)(*(weight.argument.value for weight in weights))
    return descriptors, (_abi.MatmulArgs * count)(*args), count


def _batch_workspace(batch: tuple[ctypes.Array, ctypes.Array, int]) -> int:
    needed = ctypes.c_size_t()
    status = library().nf4_matmul_batch_workspace_size(*batch, ctypes.byref(needed))
    check(status, PRODUCT_NAMES)
    return needed.value


def matmul_batch_workspace_bytes(weights: Iterable[QuantizedTensor], m: int, dtype: Any) -> int:
    """Bytes of scratch that `matmul_batch` needs for m rows of x in device memory, the same for
    all weights: what the weight that needs most does. m and dtype: as for
    `matmul_workspace_bytes`.

    Raises InvalidArgument.
    """
    rows = _convert.count("m", m)
    code = _convert.DTYPES[_convert.dtype_name(dtype)]
    prepared = [bound(each, f"weights[{i}]") for i, each in enumerate(_listed(weights))]
    args = [
        _abi.MatmulArgs(
            struct_size=ctypes.sizeof(_abi.MatmulArgs),
            dtype=code,
            m=rows,
            x_stride=weight.cols,
            y_stride=weight.rows,
        )
        for weight in prepared
    ]
    return _batch_workspace(_weights_and_args(prepared, args))


def matmul_batch(
    x: Any,
    weights: Iterable[QuantizedTensor],
    *,
    bias: Sequence[Any] | None = None,
    out: Sequence[Any] | None = None,
    workspace: Any = None,
    threads: int = 0,
    stream: Any = None,
) -> list[Any]:
    """What `matmul` gives for each of several weights, to the bit, in one call: the products of q,
    k and v, say, or of gate and up. For few rows of x on a GPU weights share launches, which saves
    the fixed cost of the others'.

        gate, up = nf4.matmul_batch(x, [gate_weight, up_weight])

    x          what matmul takes, for all weights; or a list or tuple of one for each
    weights    up to 64
    bias       a list or tuple of one for each weight, of which any may be None
    out        the same of where to write. Two may be columns of one matrix, as of
               y.split([...], dim=-1); else none overlaps another, nor any x, bias or weight
    workspace  as for matmul, of `matmul_batch_workspace_bytes()` or more
    threads    as for matmul
    stream     as for quantize

    Returns a list of what matmul returns. Raises what quantize raises, of a product of those that
    are counted from 0; then every `out` is as it was, unless it is CudaError.
    """
    threads = _convert.integer("threads", threads, 32)
    weights = _listed(weights)
    count = len(weights)
    each_x = _for_each("x", x, count) if isinstance(x, (list, tuple)) else [x] * count
    each_out = _for_each("out", out, count)
    operands = zip(weights, each_x, _for_each("bias", bias, count), each_out, strict=True)
    products = _prepare_all(operands, stream)
    if not products:
        return []
    batch = _weights_and_args([each.weight for each in products], [each.args for each in products])
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
    return [each.result for each in products]
