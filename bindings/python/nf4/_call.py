"""What a call makes when its operands are checked: the output, the workspace, the stream."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import numpy as np

from nf4 import _convert
from nf4._operand import Operand, address, read
from nf4._torch import Device
from nf4.errors import InvalidArgument, shown
from nf4.typing import CudaStreamLike, MemoryLike

if TYPE_CHECKING:
    from torch import Tensor

_NO_WORKSPACE = Operand("workspace", 0)
_WORKSPACE_ALIGNMENT = 16
_HUGE_PAGE = 2 << 20
# numpy asks the kernel for huge pages from this many bytes on.
_HUGE_PAGES_FROM = 4 << 20


def _aligned_array(shape: tuple[int, ...], dtype: np.dtype, alignment: int) -> np.ndarray:
    """A new array at a multiple of `alignment` bytes: a view of a larger one, as numpy's own are
    at multiples of 16. Raises ValueError for a shape that numpy cannot have."""
    raw = np.empty(math.prod(shape) * dtype.itemsize + alignment, np.uint8)
    begin = raw.__array_interface__["data"][0]  # raw.ctypes.data takes ten times as long
    return np.ndarray(shape, dtype, raw, offset=-begin % alignment)


def _new_array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A new array, all of which will be written at once. The kernel provides memory fastest in
    huge pages, so a large array begins with one."""
    if math.prod(shape) * dtype.itemsize < _HUGE_PAGES_FROM:
        return np.empty(shape, dtype)
    return _aligned_array(shape, dtype, _HUGE_PAGE)


def new_output(
    shape: tuple[int, ...],
    dtype: str,
    torch: Device | None,
    on_device: bool | None,
    stream: int | None,
    name: str = "out",
) -> np.ndarray | Tensor:
    """An uninitialised output for work on `stream`: a tensor on a device of torch, a numpy array
    for all else in host memory. `name` is the argument's, for messages."""
    if torch is not None:
        return torch.new(shape, dtype, stream)
    if on_device is not False:
        raise InvalidArgument(f"{name} is None; expected an array of device memory")
    try:
        return _new_array(shape, _convert.NUMPY_DTYPES[dtype])
    except ValueError as error:
        raise InvalidArgument(f"{name} of shape {shown(shape)}: {error}") from None


def workspace(
    value: MemoryLike | None,
    needed: int,
    on_device: bool,
    torch: Device | None,
    stream: int | None,
) -> tuple[Operand, int]:
    """The workspace of a call and its size in bytes; at address 0 where none is needed. One that
    is made here belongs to `stream`, as it may go back to torch before the work has run."""
    if value is None:
        if needed == 0:
            return _NO_WORKSPACE, 0
        if torch is not None:
            value = torch.empty(needed, "uint8", stream)
        elif on_device:
            raise InvalidArgument(f"workspace is None; expected {needed} bytes of device memory")
        else:
            value = _aligned_array((needed,), np.dtype(np.uint8), _WORKSPACE_ALIGNMENT)
    found = read("workspace", value, torch)
    if found.elements is None:
        return found, needed
    found.expect("uint8", found.elements).require_writable()
    if found.elements < needed:
        raise InvalidArgument(f"workspace has {found.elements} bytes; expected {needed} or more")
    return found, found.elements


def launch_stream(stream: int | None, threads: int, torch: Device | None) -> int:
    """The cudaStream_t of a call on device memory, where threads mean nothing: the current one
    of torch where `stream` is None, else the legacy default stream."""
    if threads != 0:
        raise InvalidArgument(f"threads is {threads}; expected 0 for device memory")
    if stream is not None:
        return stream
    return 0 if torch is None else torch.current_stream()


def stream_handle(stream: CudaStreamLike) -> int:
    """The cudaStream_t of an int, a ctypes.c_void_p, or a torch, CuPy or cuda.core stream."""
    if type(stream) is int:
        return address("stream", stream)
    if isinstance(stream, ctypes.c_void_p):
        return stream.value or 0
    for attribute in ("cuda_stream", "ptr"):
        if hasattr(stream, attribute):
            return address("stream", getattr(stream, attribute))
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        given = protocol() if callable(protocol) else protocol
        try:
            _version, handle = given
            return address("stream", int(handle))
        except (TypeError, ValueError):
            raise InvalidArgument(
                f"stream.__cuda_stream__ is {shown(given)}; expected a version and an address"
            ) from None
    if isinstance(stream, bool) or not hasattr(stream, "__index__"):
        raise InvalidArgument(
            f"stream is {shown(stream)}; expected None, an int, or an object with cuda_stream, ptr "
            f"or __cuda_stream__"
        )
    return address("stream", stream)


def require_no_stream(stream: CudaStreamLike | None) -> None:
    """For a call on host memory, where a stream means nothing."""
    if stream is not None:
        raise InvalidArgument(f"stream is {shown(stream)}; expected None for host memory")
