"""quantize: a dense weight to 4 bits."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable
from typing import Any, TypeVar, overload

import numpy as np

from nf4 import _abi, _call, _convert
from nf4._formats import SCALE_RULES, has_global_scales
from nf4._global_scales import write_global_scales
from nf4._operand import Operand, on_device, read
from nf4._options import Quantize, Unpack
from nf4._prepared import prepare
from nf4.errors import InvalidArgument, shown
from nf4.info import scale_code
from nf4.tensor import QuantizedTensor, sizes
from nf4.typing import (
    Array,
    ArrayLike,
    CudaStreamLike,
    FormatName,
    MemoryLike,
    ScaleRuleName,
)
from nf4.weight import Weight, no_weight

Into = TypeVar("Into", bound=QuantizedTensor[Any])

# The caller's names for arguments that have others in C.
QUANTIZE_NAMES = {"in": "array", "workspace_bytes": "the size of workspace in bytes"}
_WRITTEN = ("packed", "absmax", "nested_absmax", "nested_offset")


def part_maker(
    source: Operand, stream: int | None, kind: str
) -> Callable[[int | tuple[int, ...], str], Any]:
    """A function of a shape and a dtype that gives an uninitialised part of a weight for work on
    `stream`: a torch tensor for a tensor, a numpy array for all else in host memory."""
    torch = source.torch
    if torch is not None:
        return lambda shape, dtype: torch.empty(shape, dtype, stream)
    if source.on_device is not False:
        place = "device memory" if source.on_device else "a raw address"
        raise InvalidArgument(f"out is None; expected {kind} for {place}")
    return lambda shape, dtype: np.empty(shape, _convert.NUMPY_DTYPES[dtype])


def _new_weight(
    source: Operand, layout: dict[str, Any], stream: int | None
) -> QuantizedTensor[Any]:
    """An uninitialised weight where the source is."""
    torch, empty = source.torch, part_maker(source, stream, "a QuantizedTensor")
    dtype = source.require_float()
    codebook, scale_rule = layout["codebook"], layout["scale_rule"]
    format = "nf4" if layout["format"] is None else layout["format"]
    blocksize, nested_blocksize = _convert.blocksizes(
        format, layout["blocksize"], layout["nested_blocksize"]
    )
    counts = sizes(
        source.shape, format=format, blocksize=blocksize, nested_blocksize=nested_blocksize
    )
    scale_bytes = format in SCALE_RULES
    nested = {}
    if has_global_scales(format):
        divides = _convert.scale_rule(format, scale_rule) == _abi.GLOBAL_DIVISOR
        nested["nested_absmax"] = scales = empty(counts.nested_blocks, "fp32")
        if counts.elements != 0:
            rows = nested_blocksize or counts.elements
            with contextlib.nullcontext() if torch is None else torch.working_on(stream):
                write_global_scales(_array(source), rows, divides, scales)
    elif not scale_bytes and nested_blocksize != 0:
        offset = empty((), "fp32")
        if counts.elements == 0:  # no mean of scales is written then
            offset[...] = 0
        nested = {
            "nested_absmax": empty(counts.nested_blocks, "fp32"),
            "nested_code": scale_code() if torch is None else torch.scale_code,
            "nested_offset": offset,
        }
    return QuantizedTensor(
        packed=empty(counts.packed_bytes, "uint8"),
        absmax=empty(counts.blocks, "uint8" if nested or scale_bytes else "fp32"),
        codebook=codebook,
        scale_rule=scale_rule,
        shape=source.shape,
        dtype=dtype,
        format=format,
        blocksize=blocksize,
        nested_blocksize=nested_blocksize,
        **nested,
    )


def _array(source: Operand) -> Any:
    """A tensor, or the host memory of all else as a numpy array."""
    if source.torch is not None:
        return source.owner
    assert source.dtype is not None and source.shape is not None
    dtype = _convert.NUMPY_DTYPES[source.dtype]
    count = math.prod(source.shape)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(source.address)
    return np.frombuffer(memory, dtype).reshape(source.shape)


def require_agreement(out: Weight[Any], given: dict[str, Any]) -> None:
    """What is given beside `out` must be what `out` says; None is not given."""
    for name, value in given.items():
        if value is None:
            continue
        # Checked first, as an array compared with a number gives another array.
        if name == "format":
            _convert.format_code(value)
        elif name == "layout":
            _convert.int4_layout(value)
        elif name == "scale_rule":
            value = _convert.scale_rule(out.format, value)
        elif name in ("blocksize", "nested_blocksize", "group_size"):
            value = _convert.integer(name, value, 32)
        expected = getattr(out, name)
        if name == "scale_rule":
            expected = _convert.scale_rule(out.format, expected)
        agrees = value is expected if name == "codebook" else value == expected
        if not agrees:
            raise InvalidArgument(f"{name} is {shown(value)}, but that of out is {shown(expected)}")


@overload  # the first that fits is taken: tensors are ArrayLike, too
def quantize(  # type: ignore[overload-overlap]
    array: Array, *, out: None = ..., **options: Unpack[Quantize]
) -> QuantizedTensor[Array]: ...


@overload
def quantize(
    array: ArrayLike, *, out: None = ..., **options: Unpack[Quantize]
) -> QuantizedTensor[np.ndarray]: ...


@overload
def quantize(array: MemoryLike, *, out: Into, **options: Unpack[Quantize]) -> Into: ...


def quantize(
    array: MemoryLike,
    *,
    format: FormatName | None = None,
    blocksize: int | None = None,
    nested_blocksize: int | None = None,
    scale_rule: ScaleRuleName | None = None,
    codebook: MemoryLike | None = None,
    threads: int = 0,
    out: QuantizedTensor[Any] | None = None,
    workspace: MemoryLike | None = None,
    stream: CudaStreamLike | None = None,
) -> QuantizedTensor[Any]:
    """Quantizes a weight of any shape, in fp32, fp16 or bf16, to 4 bits.

    array             a contiguous numpy array, a torch tensor, an object with
                      __cuda_array_interface__ or __dlpack__, or, with `out`, the address of such
                      memory
    format            "nf4" (the default), "fp4", "mxfp4" or "nvfp4"
    blocksize         elements that share a scale: a power of two, 32..4096; 64 by default. "mxfp4":
                      32; "nvfp4": 16 (the default) or 32
    nested_blocksize  scales that share a nested scale: a power of two, 256 by default; 0: flat.
                      "nvfp4": rows that share a global scale; 0 (the default): all rows
    scale_rule        "mxfp4": "floor" (the default), "even" or "ceil": how the scale of a block
                      follows from its largest magnitude (nf4.h). "nvfp4": whether the global scale
                      is a "factor" (the default) or a "divisor"; it is chosen so that the largest
                      scale of a block is 448. With `out`, the global scales of `out` are used
    codebook          float32 [16] that replaces the format's own
    threads           on the CPU: the most threads to use; 0: one for each processor
    out               where to write; its format, blocksizes and codebook are the defaults. By
                      default the result is new memory: torch tensors on the device of a torch
                      tensor, or else numpy arrays in host memory. Required for device memory that
                      is not in torch tensors
    workspace         uint8, of at least `out.sizes.workspace_bytes` bytes, aligned to 16 bytes.
                      Allocated for torch tensors and host memory; otherwise required if nested
    stream            for device memory: an int, a torch, CuPy or cuda.core stream, or None. None
                      means torch's current stream for torch tensors, and the legacy default stream
                      for other memory. The call enqueues the work, and all memory that was passed
                      must live until the work has finished

    torch is told that tensors which are written to have changed: a backward pass that needs their
    earlier values raises torch's RuntimeError.

    Returns `out`, or a new QuantizedTensor. Raises InvalidArgument, and for device memory
    NoCuda, NoDevice, UnsupportedDevice and CudaError. torch's own errors, such as out of memory,
    are not changed.
    """
    source = read("array", array).require_contiguous()
    layout = {
        "format": format,
        "blocksize": blocksize,
        "nested_blocksize": nested_blocksize,
        "scale_rule": scale_rule,
        "codebook": codebook,
    }
    threads, handle = _call.read_options(threads, stream)
    if out is None:
        out = _new_weight(source, layout, handle)
    else:
        if not isinstance(out, QuantizedTensor):
            raise no_weight("out", out, "a QuantizedTensor")
        prepare(out, "out")
        require_agreement(out, layout | {"shape": source.shape, "dtype": source.dtype})
    weight = prepare(out)
    names = [name for name in _WRITTEN if name != "nested_absmax" or out.nested]
    written = [part.require_writable() for part in weight.parts if part.name in names]
    torch = source.torch or weight.torch
    in_device_memory = on_device(source, weight.located)
    space, nbytes = _call.workspace(
        workspace, lambda: out.sizes.workspace_bytes, in_device_memory, torch, handle
    )
    on_device(source, weight.located, space)
    dtype = _convert.DTYPES[out.dtype]
    problem = _call.Problem(
        weight.functions.quantize,
        (source.address, dtype, weight.argument, space.address, nbytes),
        in_device_memory,
        torch,
        out,
        QUANTIZE_NAMES,
        written=tuple(part.owner for part in (*written, space)),
    )
    return _call.run(problem, threads, handle)
