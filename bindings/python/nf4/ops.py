"""quantize and dequantize: what users call."""

from __future__ import annotations

from typing import Any

import numpy as np

from nf4 import _call, _convert, _memory, _torch
from nf4._bound import Bound, bound
from nf4._load import check, library
from nf4._memory import Buffer
from nf4.errors import InvalidArgument, shown
from nf4.info import scale_code
from nf4.tensor import QuantizedTensor, sizes

_NAMES = {"in": "array"}  # of arguments that have others in C
_DEFAULT_LAYOUT = {"format": "nf4", "blocksize": 64, "nested_blocksize": 256}


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
            raise InvalidArgument(f"{name} is {shown(value)}, but that of out is {shown(expected)}")


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
        bound(out, "out")  # or it is no weight at all
        _require_agreement(out, source, layout)
    weight = bound(out)
    written = weight.written()
    torch = torch or weight.torch
    on_device = _memory.on_device([source, *weight.parts])
    needed = out.sizes.workspace_bytes
    scratch, scratch_bytes = _call.workspace(workspace, needed, on_device, torch, stream)
    _memory.on_device([source, *weight.parts, *scratch])
    arguments = (
        source.address,
        _convert.DTYPES[out.dtype],
        weight.argument,
        scratch[0].address if scratch else None,
        scratch_bytes,
    )
    if on_device:
        enqueued_on = _call.launch_stream(stream, threads, torch)
        status = library().nf4_quantize_launch(*arguments, enqueued_on)
    else:
        _call.require_no_stream(stream)
        status = library().nf4_quantize_cpu(*arguments, threads)
    check(status, _NAMES)
    _torch.tell_of_writes(buffer.owner for buffer in (*written, *scratch))
    return out


def _dequantize(weight: Bound, out: Any, dtype: Any, threads: Any, stream: Any) -> int:
    """Checks every argument, and gives the status."""
    threads = _convert.integer("threads", threads, 32)
    address, code, on_device, torch = weight.target(out, dtype)
    if on_device:
        enqueued_on = _call.launch_stream(stream, threads, torch)
        return library().nf4_dequant_launch(weight.argument, address, code, enqueued_on)
    _call.require_no_stream(stream)
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
    weight = bound(tensor, "tensor")
    if out is None:
        out = weight.new_output(dtype, stream)
    # 0.0 equals 0 and is no number of threads; of an array that cannot even be said.
    usual = type(threads) is int and threads == 0
    status = weight.launch(out, dtype, stream) if usual else None
    if status is None:
        status = _dequantize(weight, out, dtype, threads, stream)
    check(status)
    return out
