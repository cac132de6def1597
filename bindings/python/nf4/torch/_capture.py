"""Tells which CUDA graph is being captured. torch knows whether one is; the driver knows which."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from nf4._torch import device_of

_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


@functools.cache
def _driver() -> Callable[..., int] | None:
    """Returns the driver's cuStreamGetCaptureInfo, or None. torch has loaded the driver."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        function = library.cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p] * 6
    function.restype = ctypes.c_int
    return function


def id_on(stream: int) -> int | None:
    """Returns the id of the capture that a cudaStream_t is in, which is unique in the process. None
    if the stream is not being captured, or the driver does not tell."""
    ask = _driver()
    status, found = ctypes.c_int(), ctypes.c_uint64()
    if ask is None:
        return None
    error = ask(stream, ctypes.byref(status), ctypes.byref(found), None, None, None)
    return found.value if error == 0 and status.value == _ACTIVE else None


def id_of(x: Tensor) -> int | None:
    """Returns the id of the capture that records work on x now; None if none is known."""
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return id_on(device_of(x).current_stream())
