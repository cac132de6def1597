"""quantize and dequantize: what users call."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from nf4 import _abi, _convert, _memory
from nf4._load import check, library
from nf4._memory import Buffer
from nf4.errors import InvalidArgument
from nf4.info import scale_code
from nf4.tensor import QuantizedTensor, Sizes, sizes

_WORKSPACE_ALIGNMENT = 16
_DEFAULT_LAYOUT = {"format": "nf4", "blocksize": 64, "nested_blocksize": 256}


def _parts(tensor: QuantizedTensor, counts: Sizes, written: bool) -> list[Buffer]:
    """The buffers of a weight, each checked for type and size."""
    expected = [
        ("packed", "uint8", counts.packed_bytes, written),
        ("absmax", "uint8" if tensor.nested else "fp32", counts.blocks, written),
    ]
    if tensor.nested:
        expected += [
            ("nested_absmax", "fp32", counts.nested_blocks, written),
            ("nested_code", "fp32", 256, False),
            ("nested_offset", "fp32", 1, written),
        ]
    if tensor.codebook is not None:
        expected.append(("codebook", "fp32", 16, False))
    return [
        _memory.buffer(name, getattr(tensor, name)).expect(dtype, elements, is_written)
        for name, dtype, elements, is_written in expected
    ]


def _descriptor(tensor: QuantizedTensor, parts: list[Buffer]) -> _abi.Tensor:
    descriptor = tensor.descriptor()
    for part in parts:
        setattr(descriptor, part.name, part.address)
    return descriptor


def _check_resources(on_device: bool, threads: int, stream: Any) -> int:
    """threads, checked; each of threads and stream means something in one place only."""
    threads = _convert.integer("threads", threads, 32)
    if on_device and threads != 0:
        raise InvalidArgument(f"threads is {threads}; expected 0 for device memory")
    if not on_device and stream is not None:
        raise InvalidArgument(f"stream is {stream!r}; expected None for host memory")
    return threads


def _allocate(source: Buffer, layout: dict[str, Any]) -> QuantizedTensor:
    """A weight of uninitialised numpy arrays for a source in host memory."""
    if source.on_device is not False:
        place = "device memory" if source.on_device else "a raw address"
        raise InvalidArgument(f"out is None; expected a QuantizedTensor for {place}")
    if source.dtype not in _convert.DTYPES:
        raise InvalidArgument(f"array is of {source.dtype}; expected fp32, fp16 or bf16")
    layout = _DEFAULT_LAYOUT | {key: value for key, value in layout.items() if value is not None}
    codebook = layout.pop("codebook", None)
    counts = sizes(source.shape, **layout)
    nested = layout["nested_blocksize"] != 0
    return QuantizedTensor(
        packed=np.empty(counts.packed_bytes, np.uint8),
        absmax=np.empty(counts.blocks, np.uint8 if nested else np.float32),
        nested_absmax=np.empty(counts.nested_blocks, np.float32) if nested else None,
        nested_code=scale_code() if nested else None,
        nested_offset=np.zeros((), np.float32) if nested else None,
        codebook=codebook,
        shape=source.shape,
        dtype=source.dtype,
        **layout,
    )


def _require_agreement(out: QuantizedTensor, source: Buffer, layout: dict[str, Any]) -> None:
    """What is given beside `out`, if anything, must be what `out` says."""
    given = layout | {"shape": source.shape, "dtype": source.dtype}
    for name, value in given.items():
        expected = getattr(out, name)
        agrees = value is expected if name == "codebook" else value == expected
        if value is not None and not agrees:
            raise InvalidArgument(f"{name} is {value!r}, but that of out is {expected!r}")


def _aligned_scratch(nbytes: int) -> np.ndarray:
    raw = np.empty(nbytes + _WORKSPACE_ALIGNMENT - 1, np.uint8)
    start = -raw.ctypes.data % _WORKSPACE_ALIGNMENT
    return raw[start : start + nbytes]


def _workspace(value: Any, needed: int, on_device: bool) -> tuple[list[Buffer], int]:
    """The scratch of quantize as a list of at most one buffer, and its size in bytes."""
    if value is None:
        if needed == 0:
            return [], 0
        if on_device:
            raise InvalidArgument(f"workspace is None; expected {needed} bytes of device memory")
        return [_memory.buffer("workspace", _aligned_scratch(needed))], needed
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

    array             a contiguous numpy array, an object with __cuda_array_interface__ or
                      __dlpack__, or, with `out`, the address of such memory
    format            "nf4" (the default) or "fp4"
    blocksize         elements for each scale: a power of two, 32..4096; 64 by default
    nested_blocksize  scales for each nested scale, a power of two; 256 by default, 0: flat
    codebook          float32 [16] in place of the format's own
    threads           on the CPU: how many at most; 0: one for each processor
    out               where to write; its format, blocksizes and codebook are the defaults.
                      Needed for device memory
    workspace         uint8 scratch, of `out.sizes.workspace_bytes` or more, 16-byte aligned.
                      Needed for device memory if nested
    stream            for device memory: an int, a torch, cupy or cuda.core stream, or None,
                      the legacy default stream. The work is enqueued, and all memory must
                      live until it has finished

    Returns `out`, or a QuantizedTensor of numpy arrays. Raises InvalidArgument, and for
    device memory NoCuda, NoDevice, UnsupportedDevice and CudaError.
    """
    source = _memory.buffer("array", array)
    layout = {
        "format": format,
        "blocksize": blocksize,
        "nested_blocksize": nested_blocksize,
        "codebook": codebook,
    }
    if out is None:
        out = _allocate(source, layout)
    else:
        _require_agreement(out, source, layout)
    counts = out.sizes
    parts = _parts(out, counts, written=True)
    on_device = _memory.on_device([source, *parts])
    threads = _check_resources(on_device, threads, stream)
    scratch, scratch_bytes = _workspace(workspace, counts.workspace_bytes, on_device)
    _memory.on_device([source, *parts, *scratch])
    function = library().nf4_quantize_launch if on_device else library().nf4_quantize_cpu
    check(
        function(
            source.address,
            _convert.DTYPES[out.dtype],
            ctypes.byref(_descriptor(out, parts)),
            scratch[0].address if scratch else None,
            scratch_bytes,
            _convert.stream_address(stream) if on_device else threads,
        )
    )
    return out


def _output(tensor: QuantizedTensor, dtype: Any, out: Any) -> tuple[Any, Buffer, str]:
    """Where to dequantize to: the object to return, its memory, and its dtype."""
    wanted = None if dtype is None else _convert.dtype_name(dtype)
    if out is None:
        wanted = wanted or tensor.dtype
        try:
            out = np.empty(tensor.shape, _convert.NUMPY_DTYPES[wanted])
        except ValueError as error:
            raise InvalidArgument(f"shape of {len(tensor.shape)} dimensions: {error}") from None
    target = _memory.buffer("out", out)
    if wanted is None:
        wanted = target.dtype if target.dtype in _convert.DTYPES else tensor.dtype
    return out, target.expect(wanted, tensor.elements, written=True), wanted


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
    out      a contiguous array of as many elements, or an address. By default a numpy array
             of the weight's shape; needed for device memory
    threads  on the CPU: how many at most; 0: one for each processor
    stream   for device memory, as for quantize

    Returns `out`, or the numpy array. Raises what quantize raises.
    """
    parts = _parts(tensor, tensor.sizes, written=False)
    if out is None and _memory.on_device(parts):
        raise InvalidArgument("out is None; expected an array of device memory")
    result, target, name = _output(tensor, dtype, out)
    on_device = _memory.on_device([*parts, target])
    threads = _check_resources(on_device, threads, stream)
    function = library().nf4_dequant_launch if on_device else library().nf4_dequant_cpu
    check(
        function(
            ctypes.byref(_descriptor(tensor, parts)),
            target.address,
            _convert.DTYPES[name],
            _convert.stream_address(stream) if on_device else threads,
        )
    )
    return result
