"""quantize, dequantize and matmul: what users call."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from nf4 import _abi, _convert, _memory, _torch
from nf4._bound import Bound, bound
from nf4._load import check, library
from nf4._memory import Buffer, Matrix
from nf4.errors import InvalidArgument
from nf4.info import scale_code
from nf4.tensor import QuantizedTensor, sizes

_WORKSPACE_ALIGNMENT = 16
_DEFAULT_LAYOUT = {"format": "nf4", "blocksize": 64, "nested_blocksize": 256}


def _launch_stream(stream: Any, threads: int, torch: _torch.Device | None) -> int:
    """The stream of a call on device memory, where threads mean nothing."""
    if threads != 0:
        raise InvalidArgument(f"threads is {threads}; expected 0 for device memory")
    if stream is None and torch is not None:
        return torch.current_stream()
    return _convert.stream_address(stream)


def _require_no_stream(stream: Any) -> None:
    """For a call on host memory, where a stream means nothing."""
    if stream is not None:
        raise InvalidArgument(f"stream is {stream!r}; expected None for host memory")


def _empty(shape: Any, dtype: str, torch: _torch.Device | None, stream: Any) -> Any:
    if torch is None:
        return np.empty(shape, _convert.NUMPY_DTYPES[dtype])
    return torch.empty(shape, dtype, stream)


def _allocate(
    source: Buffer, layout: dict[str, Any], torch: _torch.Device | None, stream: Any
) -> QuantizedTensor:
    """An uninitialised weight: of torch tensors for a tensor, of numpy arrays for all else in
    host memory."""
    if torch is None and source.on_device is not False:
        place = "device memory" if source.on_device else "a raw address"
        raise InvalidArgument(f"out is None; expected a QuantizedTensor for {place}")
    if source.dtype not in _convert.DTYPES:
        raise InvalidArgument(f"array is of {source.dtype}; expected fp32, fp16 or bf16")
    layout = _DEFAULT_LAYOUT | {key: value for key, value in layout.items() if value is not None}
    codebook = layout.pop("codebook", None)
    counts = sizes(source.shape, **layout)
    nested = {}
    if layout["nested_blocksize"] != 0:
        nested = {
            "nested_absmax": _empty(counts.nested_blocks, "fp32", torch, stream),
            "nested_code": scale_code() if torch is None else torch.scale_code,
            "nested_offset": _empty((), "fp32", torch, stream),
        }
    if nested and counts.elements == 0:
        nested["nested_offset"].fill(0) if torch is None else nested["nested_offset"].zero_()
    return QuantizedTensor(
        packed=_empty(counts.packed_bytes, "uint8", torch, stream),
        absmax=_empty(counts.blocks, "uint8" if nested else "fp32", torch, stream),
        codebook=codebook,
        shape=source.shape,
        dtype=source.dtype,
        **nested,
        **layout,
    )


def _require_agreement(out: QuantizedTensor, source: Buffer, layout: dict[str, Any]) -> None:
    """What is given beside `out`, if anything, must be what `out` says."""
    given = layout | {"shape": source.shape, "dtype": source.dtype}
    for name, value in given.items():
        if value is None:
            continue
        # An array that is compared with a number gives another array.
        if name == "format":
            _convert.format_code(value)
        elif name in ("blocksize", "nested_blocksize"):
            value = _convert.integer(name, value, 32)
        expected = getattr(out, name)
        agrees = value is expected if name == "codebook" else value == expected
        if not agrees:
            raise InvalidArgument(f"{name} is {value!r}, but that of out is {expected!r}")


def _workspace(
    value: Any, needed: int, on_device: bool, torch: _torch.Device | None, stream: Any
) -> tuple[list[Buffer], int]:
    """The scratch of a call as a list of at most one buffer, and its size in bytes. What is
    made here may go back to torch before the work is done: to the stream that it is done on."""
    if value is None:
        if needed == 0:
            return [], 0
        if torch is not None:
            return [_memory.buffer("workspace", torch.empty(needed, "uint8", stream))], needed
        if on_device:
            raise InvalidArgument(f"workspace is None; expected {needed} bytes of device memory")
        made = _memory.aligned_array((needed,), np.dtype(np.uint8), _WORKSPACE_ALIGNMENT)
        return [_memory.buffer("workspace", made)], needed
    scratch = _memory.buffer("workspace", value)
    if scratch.elements is None:
        return [scratch], needed
    return [scratch.expect("uint8", scratch.elements, written=True)], scratch.elements


def quantize(
    array: Any,
    *,
    format: str | None = None,
    blocksize: int | None = None,
    nested_blocksize: int | None = None,
    codebook: Any = None,
    threads: int = 0,
    out: QuantizedTensor | None = None,
    workspace: Any = None,
    stream: Any = None,
) -> QuantizedTensor:
    """Quantizes a weight of fp32, fp16 or bf16, of any shape, to 4 bits.

    array             a contiguous numpy array, a torch tensor, an object with
                      __cuda_array_interface__ or __dlpack__, or, with `out`, the address of such
                      memory
    format            "nf4" (the default) or "fp4"
    blocksize         elements for each scale: a power of two, 32..4096; 64 by default
    nested_blocksize  scales for each nested scale, a power of two; 256 by default, 0: flat
    codebook          float32 [16] in place of the format's own
    threads           on the CPU: how many at most; 0: one for each processor
    out               where to write; its format, blocksizes and codebook are the defaults. By
                      default new memory: torch tensors for a torch tensor, on its device, and
                      numpy arrays for all else in host memory. Needed for all else in device
                      memory
    workspace         uint8 scratch, of `out.sizes.workspace_bytes` or more, 16-byte aligned.
                      Made where `out` could be; else needed for device memory if nested
    stream            for device memory: an int, a torch, cupy or cuda.core stream, or None:
                      torch's current stream if the memory is in torch tensors, the legacy
                      default stream if not. The work is enqueued, and all memory that was
                      given must live until it has finished

    torch is told that what is written to has changed, where that is a tensor: a backward pass
    that needs it as it was before raises torch's RuntimeError.

    Returns `out`, or a new QuantizedTensor. Raises InvalidArgument, and for device memory
    NoCuda, NoDevice, UnsupportedDevice and CudaError; what torch raises where it cannot
    allocate is let through.
    """
    source = _memory.buffer("array", array)
    layout = {
        "format": format,
        "blocksize": blocksize,
        "nested_blocksize": nested_blocksize,
        "codebook": codebook,
    }
    threads = _convert.integer("threads", threads, 32)
    torch = _torch.device_of(array)
    if out is None:
        out = _allocate(source, layout, torch, stream)
    else:
        bound(out)  # or it is no weight at all
        _require_agreement(out, source, layout)
    weight = bound(out)
    written = weight.written()
    torch = torch or weight.torch
    on_device = _memory.on_device([source, *weight.parts])
    needed = out.sizes.workspace_bytes
    scratch, scratch_bytes = _workspace(workspace, needed, on_device, torch, stream)
    _memory.on_device([source, *weight.parts, *scratch])
    arguments = (
        source.address,
        _convert.DTYPES[out.dtype],
        weight.argument,
        scratch[0].address if scratch else None,
        scratch_bytes,
    )
    if on_device:
        enqueued_on = _launch_stream(stream, threads, torch)
        status = library().nf4_quantize_launch(*arguments, enqueued_on)
    else:
        _require_no_stream(stream)
        status = library().nf4_quantize_cpu(*arguments, threads)
    check(status)
    _torch.tell_of_writes(buffer.owner for buffer in (*written, *scratch))
    return out


def _dequantize(weight: Bound, out: Any, dtype: Any, threads: Any, stream: Any) -> int:
    """Checks every argument, and gives the status."""
    threads = _convert.integer("threads", threads, 32)
    address, code, on_device, torch = weight.target(out, dtype)
    if on_device:
        enqueued_on = _launch_stream(stream, threads, torch)
        return library().nf4_dequant_launch(weight.argument, address, code, enqueued_on)
    _require_no_stream(stream)
    return library().nf4_dequant_cpu(weight.argument, address, code, threads)


def dequantize(
    tensor: QuantizedTensor,
    dtype: Any = None,
    *,
    out: Any = None,
    threads: int = 0,
    stream: Any = None,
) -> Any:
    """The numbers of a quantized weight, in fp32, fp16 or bf16.

    dtype    "fp32", "fp16", "bf16", or a numpy or torch dtype. By default that of `out`,
             or else that of the weight before it was quantized
    out      a contiguous array of as many elements, or an address. By default new memory of
             the weight's shape: a torch tensor where `packed` is one, on its device; a numpy
             array for all else in host memory (a large one is a view, that begins with a huge
             page; torch uses those if THP_MEM_ALLOC_ENABLE=1 is in the environment). Needed for
             all else in device memory
    threads  on the CPU: how many at most; 0: one for each processor
    stream   for device memory, as for quantize

    torch is not told that an `out` has changed, since telling it takes a sixth of the time of a
    call. Where autograd may have saved `out` for a backward pass, which would use what is
    written here, say so: torch.autograd.graph.increment_version(out).

    Returns `out`, or what was made. Raises what quantize raises.
    """
    weight = bound(tensor)
    if out is None:
        out = weight.new_output(dtype, stream)
    # 0.0 equals 0 and is no number of threads; of an array that cannot even be said.
    usual = type(threads) is int and threads == 0
    status = weight.launch(out, dtype, stream) if usual else None
    if status is None:
        status = _dequantize(weight, out, dtype, threads, stream)
    check(status)
    return out


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


def _product(weight: Bound, x: Matrix, out: Any) -> Matrix:
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


def matmul_workspace_bytes(weight: QuantizedTensor, m: int, dtype: Any = None) -> int:
    """Bytes of scratch that `matmul` needs for m rows of x in device memory, often 0.

    dtype  "fp16", "bf16", or a numpy or torch dtype: that of x; that of the weight by default

    Raises InvalidArgument.
    """
    found = bound(weight)
    name = weight.dtype if dtype is None else _convert.dtype_name(dtype)
    return found.matmul_workspace(name, _convert.integer("m", m, 64), found.cols, found.rows)


def _matmul(
    weight: Bound, x: Matrix, y: Matrix, bias: Any, workspace: Any, threads: Any, stream: Any
) -> int:
    """Checks what is left of the arguments, and gives the status."""
    threads = _convert.integer("threads", threads, 32)
    places = {"x": x.on_device, "out": y.on_device}
    if bias is not None:
        bias = _memory.buffer("bias", bias).expect(x.dtype, weight.rows)
        places["bias"] = bias.on_device
    on_device = _in_one_place(weight, places)
    m = math.prod(x.shape[:-1])
    args = _abi.MatmulArgs(
        ctypes.sizeof(_abi.MatmulArgs),
        _convert.DTYPES[x.dtype],
        0,
        m,
        x.address,
        x.stride,
        None if bias is None else bias.address,
        y.address,
        y.stride,
    )
    if not on_device:
        _require_no_stream(stream)
        if workspace is not None:
            raise InvalidArgument("workspace is given; expected None for host memory")
        return library().nf4_matmul_cpu(weight.argument, ctypes.byref(args), threads)
    if x.dtype == "fp32":
        raise InvalidArgument("x is of fp32; expected fp16 or bf16 in device memory")
    torch = x.torch or weight.torch or y.torch
    enqueued_on = _launch_stream(stream, threads, torch)
    needed = weight.matmul_workspace(x.dtype, m, x.stride, y.stride)
    scratch, scratch_bytes = _workspace(workspace, needed, True, torch, stream)
    if workspace is not None:
        _in_one_place(weight, places | {"workspace": scratch[0].on_device})
    address = scratch[0].address if scratch else None
    return library().nf4_matmul_launch(
        weight.argument, ctypes.byref(args), address, scratch_bytes, enqueued_on
    )


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
               tensor, or an object with __cuda_array_interface__ or __dlpack__. Its rows are
               contiguous, and each is at the same distance from the next, cols elements or more
    weight     of shape [..., rows, cols]: the leading dimensions are rows as well, as many as
               their product
    bias       an array of as many elements as the weight has rows, in the dtype of x; contiguous
    out        an array [..., rows], with the leading dimensions and the dtype of x and with rows
               as those of x are; or the address of such memory without gaps. What is between its
               rows is not written. By default new memory: a torch tensor for a torch tensor, on
               its device, and a numpy array for all else in host memory. Needed for all else in
               device memory
    workspace  uint8 scratch in device memory, of `matmul_workspace_bytes()` or more, 16-byte
               aligned. Made for torch tensors; else needed unless that is 0
    threads    on the CPU: how many at most; 0: one for each processor. No bit depends on it
    stream     for device memory, as for quantize

    An x that is not finite spoils its own row of y only. torch is told that an `out` has changed,
    as quantize tells it.

    Returns `out`, or what was made. Raises what quantize raises; then `out` is as it was.
    """
    prepared = bound(weight)
    factor = _factor(prepared, x)
    if out is None:
        result = _new_product(factor, (*factor.shape[:-1], prepared.rows), stream)
    else:
        result = out
    product = _product(prepared, factor, result)
    check(_matmul(prepared, factor, product, bias, workspace, threads, stream))
    if out is not None or workspace is not None:
        _torch.tell_of_writes((out, workspace))
    return result
