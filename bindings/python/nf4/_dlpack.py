"""DLPack capsules read with ctypes: dlpack.h, versions 0 and 1.

numpy.from_dlpack reads neither bfloat16 nor device memory.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64
from typing import Any, NamedTuple

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
_ON_DEVICE = {CPU: False, CUDA_HOST: False, CUDA: True, CUDA_MANAGED: True}
_DTYPES = {(2, 32): "fp32", (2, 16): "fp16", (4, 16): "bf16", (1, 8): "uint8", (0, 32): "int32"}
# A copy that the producer made for us is read-only too: what is written to it would be lost.
_READ_ONLY, _IS_COPIED = 1, 2
# Asks the producer not to synchronize: the caller orders the work, by `stream`.
_NO_SYNCHRONIZATION = -1


class DLTensor(Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class DLManagedTensor(Structure):
    _fields_ = [
        ("dl_tensor", DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class DLManagedTensorVersioned(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", c_uint64),
        ("dl_tensor", DLTensor),
    ]


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]


class View(NamedTuple):
    """A DLPack tensor. The capsule is held and not consumed, and releases the producer's memory
    when it is collected. strides are in elements, or None. on_device is None where the memory is
    neither the CPU's nor CUDA's."""

    capsule: object
    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    device_type: int
    on_device: bool | None
    writable: bool


def _export(value: Any) -> object:
    device_type = int(value.__dlpack_device__()[0])
    arguments = {"stream": _NO_SYNCHRONIZATION} if device_type in (CUDA, CUDA_MANAGED) else {}
    try:
        return value.__dlpack__(max_version=(1, 0), **arguments)
    except TypeError:
        # A producer older than DLPack 1.0 does not know max_version.
        return value.__dlpack__(**arguments)


def _tensor_of(capsule: object) -> tuple[DLTensor, bool]:
    """The tensor in a capsule, and whether it may be written."""
    if _is_valid(capsule, b"dltensor_versioned"):
        pointer = _get_pointer(capsule, b"dltensor_versioned")
        managed = DLManagedTensorVersioned.from_address(pointer)
        if managed.major != 1:
            raise BufferError(f"DLPack version {managed.major}.{managed.minor}; expected 1")
        return managed.dl_tensor, not managed.flags & (_READ_ONLY | _IS_COPIED)
    if _is_valid(capsule, b"dltensor"):
        pointer = _get_pointer(capsule, b"dltensor")
        return DLManagedTensor.from_address(pointer).dl_tensor, True
    raise BufferError(f"__dlpack__ gave {capsule!r}; expected an unused DLPack capsule")


def view(value: object) -> View:
    """Reads the tensor that `value.__dlpack__` exports, and lets through what that raises.
    Raises BufferError for a capsule that is neither of DLPack 0 nor of 1."""
    capsule = _export(value)
    tensor, writable = _tensor_of(capsule)
    code, bits, lanes = tensor.code, tensor.bits, tensor.lanes
    name = f"DLPack type code {code}, {bits} bits, {lanes} lanes"
    return View(
        capsule=capsule,
        address=(tensor.data or 0) + tensor.byte_offset,
        dtype=_DTYPES.get((code, bits), name) if lanes == 1 else name,
        shape=tuple(tensor.shape[: tensor.ndim]),
        strides=tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None,
        device_type=tensor.device_type,
        on_device=_ON_DEVICE.get(tensor.device_type),
        writable=writable,
    )
