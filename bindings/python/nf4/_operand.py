"""Arguments as memory: numpy arrays, torch tensors, objects with __cuda_array_interface__ or
__dlpack__, and addresses, each read into an Operand. Nothing is copied.

What is wrong with one is an InvalidArgument that names it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from nf4 import _convert, _dlpack, _torch
from nf4.errors import InvalidArgument, kind_of, shown

_ADDRESSES = 1 << 64
_new = tuple.__new__  # makes a record in a third of the time of its own constructor


class Operand(NamedTuple):
    """The memory of one argument. Of a raw address only `address` is known and the rest is None;
    it is trusted.

    owner      keeps the memory alive
    dtype      "fp32", "fp16", "bf16", "uint8", "int32", or another dtype by its library's name
    strides    in elements; None: row-major without gaps
    on_device  True: device memory, False: host memory
    torch      the device of a torch tensor; None for all else
    """

    name: str
    address: int
    owner: object = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    on_device: bool | None = None
    writable: bool = True
    torch: _torch.Device | None = None

    @property
    def elements(self) -> int | None:
        return None if self.shape is None else math.prod(self.shape)

    def require_contiguous(self) -> Operand:
        """Returns itself."""
        if self.strides is not None:
            raise InvalidArgument(
                f"{self.name} is not contiguous in row-major order; expected memory without gaps, "
                f"as numpy.ascontiguousarray or a tensor's .contiguous() makes"
            )
        return self

    def require_writable(self) -> Operand:
        """Returns itself."""
        # numpy's flag may have changed since the array was read.
        array = self.owner
        writable = array.flags.writeable if isinstance(array, np.ndarray) else self.writable
        if not writable:
            raise InvalidArgument(f"{self.name} is read-only; expected memory that can be written")
        return self

    def require_float(self) -> str:
        """Returns the dtype, if it is fp32, fp16 or bf16."""
        dtype = self.dtype
        if dtype is None or dtype not in _convert.DTYPES:
            raise InvalidArgument(f"{self.name} is of {dtype}; expected fp32, fp16 or bf16")
        return dtype

    def expect(self, dtype: str, elements: int) -> Operand:
        """Returns itself, if it is contiguous and of this dtype and number of elements."""
        name, shape = self.name, self.shape
        if self.strides is not None:
            self.require_contiguous()
        if self.dtype not in (None, dtype):
            raise InvalidArgument(f"{name} is of {self.dtype}; expected {dtype}")
        if shape is not None and math.prod(shape) != elements:
            raise InvalidArgument(f"{name} has {self.elements} elements; expected {elements}")
        return self

    def expect_shape(self, shape: tuple[int, ...]) -> Operand:
        """Returns itself, if it is of this shape."""
        if self.shape not in (None, shape):
            raise InvalidArgument(f"{self.name} is of shape {self.shape}; expected {shape}")
        return self

    def row_stride(self, columns: int) -> int:
        """The distance from one row of an array [..., columns] to the next, in elements. Rows at
        an address have no gaps."""
        name, shape, strides = self.name, self.shape, self.strides
        if shape is None:
            return columns
        if shape[-1:] != (columns,):
            raise InvalidArgument(f"{name} is of shape {shape}; expected [..., {columns}]")
        if strides is None:
            return columns
        stride = _distance(shape, strides)
        if stride is None or stride < columns:
            raise InvalidArgument(
                f"{name} is of shape {shape} and strides {strides}; expected contiguous rows, "
                f"at one distance of {columns} elements or more"
            )
        return _convert.integer(f"the stride of {name}", stride, 64)


def _distance(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """How far apart rows of the last dimension are, if each is contiguous and all are at one
    distance; else None. That of a single row is its length."""
    if shape[-1] != 1 and strides[-1] != 1:
        return None
    leading = [each for each in zip(shape[:-1], strides[:-1], strict=True) if each[0] != 1]
    if any(outer != extent * inner for (_, outer), (extent, inner) in pairwise(leading)):
        return None
    return leading[-1][1] if leading else shape[-1]


def locate(operands: Sequence[Operand]) -> Operand:
    """The first operand that is known to be in host or in device memory, where all others are as
    well; else the first. A raw address is where the others are."""
    found = None
    for each in operands:
        if each.on_device is None:
            continue
        if found is None:
            found = each
        elif each.on_device is not found.on_device:
            places = "; ".join(
                f"{one.name} is in {'device' if one.on_device else 'host'} memory"
                for one in (found, each)
            )
            raise InvalidArgument(f"{places}; expected all of them in one place")
    return found or operands[0]


def on_device(first: Operand, *others: Operand) -> bool:
    """Are the operands, all in one place, in device memory? Raw addresses alone are."""
    for each in others:
        if each.on_device is not first.on_device:
            return locate((first, *others)).on_device is not False
    return first.on_device is not False


def address(name: str, value: Any) -> int:
    """An int that fits a pointer."""
    try:
        number = operator.index(value)
    except TypeError:  # such as of a class, which has an __index__ for what it makes
        raise InvalidArgument(f"{name} is {shown(value)}; expected an address") from None
    if not 0 <= number < _ADDRESSES:
        raise InvalidArgument(f"{name} is {number}; expected an address")
    return number


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> bool:
    """Is this row-major without gaps? An element is `item` units of the strides."""
    if 0 in shape:
        return True
    expected = item
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def _strides(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...] | None, item: int = 1
) -> tuple[int, ...] | None:
    """Operand.strides, from strides of which an element is `item` units."""
    if any(extent < 0 for extent in shape):
        raise InvalidArgument(f"{name} is of shape {shape}; expected dimensions of 0 or more")
    if strides is None or _contiguous(shape, strides, item):
        return None
    if item == 0 or any(stride % item for stride in strides):
        raise InvalidArgument(
            f"{name} has strides of {strides} bytes; expected multiples of an element's {item}"
        )
    return tuple(stride // item for stride in strides)


def _from_numpy(name: str, array: np.ndarray) -> Operand:
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidArgument(f"{name} is a masked array; expected one without a mask")
    shape, flags = array.shape, array.flags
    return Operand(
        name,
        array.__array_interface__["data"][0],
        array,
        _convert.numpy_dtype_name(array.dtype),
        shape,
        None if flags.c_contiguous else _strides(name, shape, array.strides, array.itemsize),
        False,
        flags.writeable,
    )


def _from_cuda_array_interface(name: str, owner: object, interface: dict[str, Any]) -> Operand:
    if interface.get("mask") is not None:
        raise InvalidArgument(f"{name} has a mask; expected an array without one")
    typestr = interface["typestr"]
    dtype = np.dtype(typestr)
    shape = tuple(interface["shape"])
    data, read_only = interface["data"]
    return Operand(
        name=name,
        address=address(name, data or 0),
        owner=owner,
        # There is no type string for bfloat16; torch writes it as two opaque bytes.
        dtype="bf16" if typestr == "<V2" else _convert.numpy_dtype_name(dtype),
        shape=shape,
        strides=_strides(name, shape, interface.get("strides"), dtype.itemsize),
        on_device=True,
        writable=not read_only,
    )


def _from_dlpack(name: str, value: object) -> Operand:
    view = _dlpack.view(value)
    if view.on_device is None:
        raise InvalidArgument(
            f"{name} is on DLPack device type {view.device_type}; expected the CPU or CUDA"
        )
    return Operand(
        name=name,
        address=view.address,
        owner=view.capsule,
        dtype=view.dtype,
        shape=view.shape,
        strides=_strides(name, view.shape, view.strides),
        on_device=view.on_device,
        writable=view.writable,
    )


def _from_address(name: str, value: object) -> Operand:
    if not hasattr(value, "__index__") or isinstance(value, bool):
        raise InvalidArgument(
            f"{name} is {kind_of(value)}; expected a numpy array, an object with "
            f"__cuda_array_interface__ or __dlpack__, or an address"
        )
    return Operand(name, address(name, value))


def plain_memory(tensor: Any, device: _torch.Device) -> tuple[int, str] | None:
    """The address and dtype of a contiguous tensor on `device`, of no subclass and without
    faults. None for everything else, which _torch.memory_of knows more of and takes longer."""
    if type(tensor) is not device.tensor_type:
        return None
    try:
        dtype = device.names.get(tensor.dtype)
        if (
            dtype is not None
            and tensor.device == device.device
            and tensor.is_contiguous()
            and not tensor.requires_grad
            and not tensor.is_neg()
        ):
            address = tensor.data_ptr()
            return (address, dtype) if address else None
    except RuntimeError:  # no storage
        pass
    return None


def read(name: str, value: Any, device: _torch.Device | None = None) -> Operand:
    """The memory of an argument, of any strides. `name` is the argument's, for messages. Plain
    tensors on `device` take less time. Raises InvalidArgument."""
    if isinstance(value, np.ndarray):
        return _from_numpy(name, value)
    plain = None if device is None else plain_memory(value, device)
    if device is not None and plain is not None:
        address, dtype = plain
        shape = tuple(value.shape)
        fields = (name, address, value, dtype, shape, None, device.is_cuda, True, device)
        return _new(Operand, fields)
    try:
        tensor = _torch.memory_of(name, value)
        if tensor is not None:
            address, dtype, shape, strides, is_cuda, where = tensor
            return Operand(name, address, value, dtype, shape, strides, is_cuda, True, where)
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is not None:
            return _from_cuda_array_interface(name, value, interface)
        if hasattr(value, "__dlpack__"):
            return _from_dlpack(name, value)
    except InvalidArgument:
        raise
    except (RuntimeError, BufferError, TypeError, KeyError, ValueError) as error:
        raise InvalidArgument(f"{name}: {type(error).__name__}: {error}") from error
    return _from_address(name, value)


def read_array(
    name: str, value: Any, device: _torch.Device | None = None, dimensions: int | None = None
) -> Operand:
    """`read` of a value that has a shape; of so many dimensions, if that is given."""
    found = read(name, value, device)
    if found.shape is None:
        raise InvalidArgument(f"{name} is an address; expected an array, which has a shape")
    if dimensions is not None and len(found.shape) != dimensions:
        expected = "one dimension" if dimensions == 1 else f"{dimensions} dimensions"
        raise InvalidArgument(f"{name} is of shape {found.shape}; expected {expected}")
    return found
