"""What the operations share: outputs, workspaces and streams, and the call of the library."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nf4 import _convert, _torch
from nf4._load import Operation, check
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


def output(
    given: Operand | None,
    shape: tuple[int, ...],
    dtype: str,
    like: str,
    torch: Device | None,
    on_device: bool | None,
    stream: int | None,
    name: str = "out",
) -> tuple[Operand, int]:
    """Checks an output of [..., columns] that the caller gave, or makes it. Returns it and the
    distance between its rows. `like` is the argument that its dtype comes from, for messages."""
    if given is None:
        # A mode of torch, or a patched function, may make another tensor than it is asked for.
        given = read(name, new_output(shape, dtype, torch, on_device, stream, name), torch)
    stride = given.row_stride(shape[-1])
    if not given.writable:
        given.require_writable()
    if given.shape != shape:
        given.expect_shape(shape)
    if given.dtype != dtype and given.dtype is not None:
        raise InvalidArgument(f"{name} is of {given.dtype}; expected {dtype}, as {like} is")
    return given, stride


def workspace_bytes(
    operation: Operation, arguments: Sequence[Any], names: Mapping[str, str] | None
) -> int:
    """The size of the workspace that the library asks for. `names` are those of Problem."""
    needed = ctypes.c_size_t()
    check(operation.workspace_size(*arguments, ctypes.byref(needed)), names)
    return needed.value


def workspace(
    value: MemoryLike | None,
    needed: Callable[[], int],
    on_device: bool,
    torch: Device | None,
    stream: int | None,
) -> tuple[Operand, int]:
    """The workspace of a call and its size in bytes; at address 0 where none is needed. The library
    checks the size of one that the caller gives. One that is made here belongs to `stream`, as it
    may go back to torch before the work has run."""
    if value is None:
        nbytes = needed()
        if nbytes == 0:
            return _NO_WORKSPACE, 0
        if torch is not None:
            value = torch.empty(nbytes, "uint8", stream)
        elif on_device:
            raise InvalidArgument(f"workspace is None; expected {nbytes} bytes of device memory")
        else:
            value = _aligned_array((nbytes,), np.dtype(np.uint8), _WORKSPACE_ALIGNMENT)
    found = read("workspace", value, torch)
    if found.elements is None:
        return found, needed()
    found.expect("uint8", found.elements).require_writable()
    return found, found.elements


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


def read_options(threads: int, stream: CudaStreamLike | None) -> tuple[int, int | None]:
    """The number of threads, and the cudaStream_t of a stream that is not None."""
    if type(threads) is not int or threads >> 31:  # the common case takes less time
        threads = _convert.integer("threads", threads, 32)
    return threads, None if stream is None else stream_handle(stream)


class Problem(NamedTuple):
    """A call of the library whose arguments are read and checked.

    arguments  the first arguments of both functions of the operation
    on_device  whether the operands are in device memory
    torch      the device of a tensor among the operands
    result     what `run` returns
    names      the caller's names for arguments that have others in C
    needed     gives the size of the workspace in device memory; None: the operation takes none
    written    the caller's objects that the call writes to; tensors are reported to autograd
    args       the struct that `arguments` point to, if any, which has to outlive the call
    operands   what else has to outlive the call
    """

    operation: Operation
    arguments: tuple[Any, ...]
    on_device: bool
    torch: Device | None
    result: Any
    names: Mapping[str, str] | None = None
    needed: Callable[[], int] | None = None
    written: tuple[object, ...] = ()
    args: Any = None
    operands: object = None


def run(
    problem: Problem, threads: int, stream: int | None, workspace_given: MemoryLike | None = None
) -> Any:
    """Launches the operation on a GPU, or computes it on the CPU, as the operands are in device
    memory or in host memory."""
    operation, arguments, on_device, torch, result, names, needed, written, _, _ = problem
    if on_device:
        if threads != 0:
            raise InvalidArgument(f"threads is {threads}; expected 0 for device memory")
        if needed is not None:
            found, nbytes = workspace(workspace_given, needed, True, torch, stream)
            if found.on_device is False:
                raise InvalidArgument("workspace is in host memory; expected device memory")
            arguments = (*arguments, found.address, nbytes)
        if stream is None:  # torch's current stream, or the legacy default stream
            stream = 0 if torch is None else torch.current_stream()
        status = operation.launch(*arguments, stream)
    else:
        if stream is not None:
            raise InvalidArgument(f"stream is {stream}; expected None for host memory")
        if workspace_given is not None:
            raise InvalidArgument("workspace is given; expected None for host memory")
        status = operation.cpu(*arguments, threads)
    check(status, names)
    if written or workspace_given is not None:
        _torch.tell_of_writes((*written, workspace_given))
    return result
