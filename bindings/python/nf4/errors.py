"""Exceptions: one class for each status of the C library.

Nothing here loads the library, so that an error about loading it can be raised.
"""

from __future__ import annotations

import reprlib
from typing import Any

from nf4 import _abi

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100


class Error(Exception):
    """Any failure of libnf4. `str(error)` is the library's detail. `status` is the nf4_status, or
    None if the library was not called.
    """

    status: int | None = None

    def __init__(self, detail: str, status: int | None = None) -> None:
        super().__init__(detail)
        if status is not None:
            self.status = status


class InvalidArgument(Error, ValueError):
    """An argument is wrong; the detail names it and its value."""

    status = _abi.STATUS_INVALID_ARGUMENT


class NoCuda(Error):
    """The library was built without CUDA."""

    status = _abi.STATUS_NO_CUDA


class NoDevice(Error):
    """There is no usable GPU: no driver, a driver that is too old, or no device."""

    status = _abi.STATUS_NO_DEVICE


class UnsupportedDevice(Error):
    """There is a GPU, but no kernel of this build runs on it."""

    status = _abi.STATUS_UNSUPPORTED_DEVICE


class CudaError(Error):
    """The CUDA runtime returned an error, perhaps from earlier work."""

    status = _abi.STATUS_CUDA_ERROR


class LibraryNotFound(Error, ImportError):
    """libnf4.so is missing, does not load, or is of another version."""


_BY_STATUS = {
    cls.status: cls for cls in (InvalidArgument, NoCuda, NoDevice, UnsupportedDevice, CudaError)
}


def kind_of(value: Any) -> str:
    """None or the type of a value, to follow "is" in a message."""
    if value is None:
        return "None"
    kind = type(value)
    return "of type " + f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def shown(value: Any) -> str:
    """A value for a message: its repr in one line, shortened in the middle where it is long."""
    return " ".join(_short.repr(value).split())


def error_of(status: int, detail: str) -> Error:
    """The exception for a status that is not STATUS_OK."""
    return _BY_STATUS.get(status, Error)(detail, status)
