"""What an object is, as memory: its address, size, element type, and host or device.

Nothing is copied. What does not lie in memory as it should, or is of the wrong type or size, or
read-only where it will be written, is an InvalidArgument that names the argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from nf4 import _convert, _dlpack, _torch
from nf4.errors import InvalidArgument, kind_of

_HUGE_PAGE = 2 << 20
# From so many bytes on numpy asks the kernel for huge pages.
_HUGE_PAGES_FROM = 4 << 20


@dataclass(slots=True)
class Buffer:
    """Elements in row-major order without gaps, or as far apart, in elements, as `strides` says.
    Of a raw address only `address` is known, and the rest is None. `owner` keeps the memory
    alive."""

    name: str
    address: int
    owner: Any
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    on_device: bool | None = None
    writable: bool = True
    strides: tuple[int, ...] | None = None

    @property
    def elements(self) -> int | None:
        return None if self.shape is None else math.prod(self.shape)

    def expect(self, dtype: str, elements: int, written: bool = False) -> Buffer:
        """Itself, if it holds so many elements of this dtype. A raw address is trusted."""
        if self.dtype is not None and self.dtype != dtype:
            raise InvalidArgument(f"{self.name} is of {self.dtype}; expected {dtype}")
        if self.elements is not None and self.elements != elements:
            raise InvalidArgument(f"{self.name} has {self.elements} elements; expected {elements}")
        if written:
            self.require_writable()
        return self

    def require_writable(self) -> None:
        # numpy's flag may have been changed since the array was looked at.
        array = isinstance(self.owner, np.ndarray)
        if not (self.owner.flags.writeable if array else self.writable):
            raise InvalidArgument(f"{self.name} is read-only")


class Matrix(NamedTuple):
    """Dense rows, each `stride` elements from the next, in an array whose last dimension they
    are. Of a raw address dtype, shape and on_device are None. `torch` is the device of a tensor,
    and `owner` keeps the memory alive."""

    address: int
    dtype: str | None
    shape: tuple[int, ...] | None
    stride: int
    on_device: bool | None
    torch: _torch.Device | None
    owner: Any


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, item: int) -> bool:
    """Row-major, where strides are in units of `item` of an element."""
    if strides is None or 0 in shape:
        return True
    expected = item
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def _gaps(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...] | None, item: int
) -> tuple[int, ...] | None:
    """Buffer.strides, from strides in units of `item` of an element."""
    if _is_contiguous(shape, strides, item):
        return None
    if item == 0 or any(stride % item for stride in strides):
        raise InvalidArgument(f"{name} has strides of {strides} bytes, for elements of {item}")
    return tuple(stride // item for stride in strides)


def numpy_address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def aligned_array(shape: tuple[int, ...], dtype: np.dtype, alignment: int) -> np.ndarray:
    """A new array at a multiple of `alignment` bytes: a view of a larger one, for numpy's own are
    at multiples of 16. Raises ValueError for a shape that numpy cannot have."""
    raw = np.empty(math.prod(shape) * dtype.itemsize + alignment, np.uint8)
    return np.ndarray(shape, dtype, raw, offset=-numpy_address(raw) % alignment)


def new_output(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A new array, for all of it to be written at once: the kernel provides memory fastest in
    huge pages, and of those an array that begins with one takes no part of another. Raises
    ValueError for a shape that numpy cannot have."""
    if math.prod(shape) * dtype.itemsize < _HUGE_PAGES_FROM:
        return np.empty(shape, dtype)
    return aligned_array(shape, dtype, _HUGE_PAGE)


def _from_numpy(name: str, array: np.ndarray) -> Buffer:
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidArgument(f"{name} is a masked array; expected one without a mask")
    return Buffer(
        name=name,
        address=numpy_address(array),
        owner=array,
        dtype=_convert.numpy_dtype_name(array.dtype),
        shape=array.shape,
        on_device=False,
        writable=array.flags.writeable,
        strides=None
        if array.flags.c_contiguous
        else _gaps(name, array.shape, array.strides, array.itemsize),
    )


def _from_torch(name: str, tensor: Any) -> Buffer:
    fault = _torch.fault(tensor)
    address = 0 if fault else tensor.data_ptr()
    if not fault and address == 0 and tensor.numel() != 0:
        fault = "has no memory"
    if fault:
        raise InvalidArgument(f"{name} {fault}")
    return Buffer(
        name=name,
        address=address,
        owner=tensor,
        dtype=_torch.dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        on_device=tensor.is_cuda,
        strides=None if tensor.is_contiguous() else tuple(tensor.stride()),
    )


def _from_cuda_array_interface(name: str, owner: Any, interface: dict[str, Any]) -> Buffer:
    if interface.get("mask") is not None:
        raise InvalidArgument(f"{name} has a mask")
    typestr = interface["typestr"]
    # There is no type string for bfloat16; torch writes it as two opaque bytes.
    dtype = "bf16" if typestr == "<V2" else _convert.numpy_dtype_name(np.dtype(typestr))
    shape = tuple(interface["shape"])
    data, read_only = interface["data"]
    return Buffer(
        name=name,
        address=_convert.address(name, data or 0),
        owner=owner,
        dtype=dtype,
        shape=shape,
        on_device=True,
        writable=not read_only,
        strides=_gaps(name, shape, interface.get("strides"), np.dtype(typestr).itemsize),
    )


def _from_dlpack(name: str, owner: Any) -> Buffer:
    view = _dlpack.view(owner)
    if view.on_device is None:
        raise InvalidArgument(
            f"{name} is on DLPack device type {view.device_type}; expected the CPU or CUDA"
        )
    return Buffer(
        name=name,
        address=view.address,
        owner=view,
        dtype=view.dtype,
        shape=view.shape,
        on_device=view.on_device,
        writable=view.writable,
        strides=_gaps(name, view.shape, view.strides, 1),
    )


def _with_any_strides(name: str, value: Any) -> Buffer:
    """As `buffer`, and of arrays that are not contiguous as well."""
    if isinstance(value, np.ndarray):
        return _from_numpy(name, value)
    try:
        if _torch.is_tensor(value):
            return _from_torch(name, value)
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is not None:
            return _from_cuda_array_interface(name, value, interface)
        if hasattr(value, "__dlpack__"):
            return _from_dlpack(name, value)
    except (RuntimeError, BufferError, TypeError, KeyError, ValueError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{name}: {type(error).__name__}: {error}") from error
    if hasattr(value, "__index__") and not isinstance(value, bool):
        return Buffer(name=name, address=_convert.address(name, value), owner=None)
    raise InvalidArgument(
        f"{name} is {kind_of(value)}; expected a numpy array, an object with "
        f"__cuda_array_interface__ or __dlpack__, or an address"
    )


def buffer(name: str, value: Any) -> Buffer:
    """The memory of a contiguous numpy array, torch tensor or object with
    __cuda_array_interface__ or __dlpack__, or at a raw address. `name` is the argument's, for
    messages."""
    found = _with_any_strides(name, value)
    if found.strides is not None:
        raise InvalidArgument(f"{name} is not contiguous in row-major order")
    return found


def _distance(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> int | None:
    """How far apart rows of the last dimension are, in elements, if they are contiguous and all
    of them one distance apart; else None. That of a single row is its length."""
    if strides is None:
        return shape[-1]
    if shape[-1] != 1 and strides[-1] != 1:
        return None
    leading = [each for each in zip(shape[:-1], strides[:-1], strict=True) if each[0] != 1]
    if any(outer != extent * inner for (_, outer), (extent, inner) in pairwise(leading)):
        return None
    return leading[-1][1] if leading else shape[-1]


def _row_stride(found: Buffer, columns: int) -> int:
    """That of an array of shape [..., columns]; all its numbers fit 64 bits."""
    name, shape = found.name, found.shape
    if shape[-1:] != (columns,) or min(shape) < 0:
        raise InvalidArgument(f"{name} is of shape {shape}; expected [..., {columns}]")
    stride = _distance(shape, found.strides)
    if stride is None or stride < columns:
        raise InvalidArgument(
            f"{name} is of shape {shape} and strides {found.strides}; expected contiguous rows, "
            f"each at one distance of {columns} or more from the next"
        )
    _convert.integer(f"the number of rows of {name}", math.prod(shape[:-1]), 64)
    return _convert.integer(f"the stride of {name}", stride, 64)


def matrix(name: str, value: Any, columns: int, written: bool = False) -> Matrix:
    """The rows of an array of shape [..., columns], as `buffer` knows arrays; there may be gaps
    between them. An address is one of rows without gaps."""
    found = _with_any_strides(name, value)
    if written:
        found.require_writable()
    stride = columns if found.shape is None else _row_stride(found, columns)
    torch = _torch.device_of(value)
    return Matrix(
        found.address, found.dtype, found.shape, stride, found.on_device, torch, found.owner
    )


def place(buffers: list[Buffer]) -> bool | None:
    """Where the buffers are, all of them: True on a device, False on the host, and None if all
    are raw addresses. A raw address is where the others are."""
    known = [each for each in buffers if each.on_device is not None]
    for each in known:
        if each.on_device != known[0].on_device:
            places = [
                f"{b.name} is in {'device' if b.on_device else 'host'} memory"
                for b in (known[0], each)
            ]
            raise InvalidArgument("; ".join(places) + "; expected all of them in one place")
    return known[0].on_device if known else None


def on_device(buffers: list[Buffer]) -> bool:
    """As `place`; addresses alone are device memory, for host memory has objects."""
    return place(buffers) is not False
