"""Objects that describe memory as GPU libraries do, without a GPU, and arrays."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from nf4 import _abi, _dlpack

_TYPESTR = {"fp32": "<f4", "fp16": "<f2", "bf16": "<V2", "uint8": "|u1", "int32": "<i4"}


class Call(ctypes.Structure):
    """fake_call of fake_nf4.c: what the last launch got."""

    _fields_ = [
        ("count", ctypes.c_int32),
        ("weight", _abi.Tensor),
        ("input", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("matmul", _abi.MatmulArgs),
        ("threads", ctypes.c_int32),
        ("products", ctypes.c_size_t),
        ("weights", _abi.Tensor * 4),
        ("matmuls", _abi.MatmulArgs * 4),
        ("int4", _abi.Int4Tensor * 4),
        ("symmetric", ctypes.c_int32),
        ("gradient", ctypes.c_int32),
        ("lora", _abi.Lora),
        ("grouped", _abi.GroupedArgs),
        ("lora_grad", _abi.LoraGradArgs),
    ]


class CudaArray:
    """An object with __cuda_array_interface__, of no memory at all."""

    def __init__(
        self,
        address: int,
        dtype: str,
        *shape: int,
        strides: tuple[int, ...] | None = None,
        read_only: bool = False,
        **more: Any,
    ) -> None:
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": _TYPESTR.get(dtype, dtype),
            "data": (address, read_only),
            "strides": strides,
            "version": 3,
            **more,
        }


_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class DlpackArray:
    """A numpy array exported as a DLPack capsule, with any field of it changed at will.

    `exports` counts the capsules that were made. Without `versioned` it is a producer older
    than DLPack 1.0, which knows no max_version."""

    def __init__(
        self, array: np.ndarray, code: int, versioned: bool = True, flags: int = 0, **fields: Any
    ) -> None:
        self.array = array
        self.versioned = versioned
        self.device_type = fields.get("device_type", _dlpack.CPU)
        self.exports = 0
        self.streams: list[Any] = []
        self._shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        strides = [stride // array.itemsize for stride in array.strides]
        self._strides = (ctypes.c_int64 * array.ndim)(*strides)
        tensor = _dlpack.DLTensor(
            data=array.ctypes.data,
            device_type=_dlpack.CPU,
            ndim=array.ndim,
            code=code,
            bits=8 * array.itemsize,
            lanes=1,
            shape=self._shape,
            strides=self._strides,
        )
        for name, value in fields.items():
            setattr(tensor, name, value)
        self.managed: ctypes.Structure
        if versioned:
            self.managed = _dlpack.DLManagedTensorVersioned(major=1, flags=flags, dl_tensor=tensor)
        else:
            self.managed = _dlpack.DLManagedTensor(dl_tensor=tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 0

    def __dlpack__(self, **arguments: Any) -> Any:
        if not self.versioned and "max_version" in arguments:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.exports += 1
        self.streams.append(arguments.get("stream"))
        # PyCapsule_New keeps the name's pointer: these literals live as long as this module.
        name = _VERSIONED if self.versioned else _UNVERSIONED
        return _new(ctypes.addressof(self.managed), name, None)


_VERSIONED = b"dltensor_versioned"
_UNVERSIONED = b"dltensor"


def read_only(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy
