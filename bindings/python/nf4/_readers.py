"""What callers pass as memory, read into an Operand: numpy arrays, torch tensors, objects with
__cuda_array_interface__ or __dlpack__, and addresses. Nothing is copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nf4 import _convert, _dlpack, _torch
from nf4._operand import Operand
from nf4.errors import InvalidArgument, kind_of


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
        raise InvalidArgument(f"{name} has strides of {strides} bytes, for elements of {item}")
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
        raise InvalidArgument(f"{name} has a mask")
    typestr = interface["typestr"]
    dtype = np.dtype(typestr)
    shape = tuple(interface["shape"])
    data, read_only = interface["data"]
    return Operand(
        name=name,
        address=_convert.address(name, data or 0),
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
    return Operand(name, _convert.address(name, value))


def read(name: str, value: object, device: _torch.Device | None = None) -> Operand:
    """The memory of an argument, of any strides. `name` is the argument's, for messages. Plain
    tensors on `device` are read in less time. Raises InvalidArgument."""
    if device is not None:
        plain = device.read_plain(name, value)
        if plain is not None:
            return plain
    if isinstance(value, np.ndarray):
        return _from_numpy(name, value)
    try:
        if _torch.is_tensor(value):
            return _torch.read(name, value)
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
