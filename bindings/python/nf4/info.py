"""The library, its tables, and the machine."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from nf4 import _abi, _convert
from nf4._load import check, library
from nf4.errors import error_of
from nf4.typing import FormatName


def version() -> str:
    """Returns the version of the loaded library, such as "0.1.0"."""
    return library().nf4_version_string().decode()


def build_info() -> dict[str, str]:
    """Returns how the library was built, by key: "compiler", "cuda", "cpu_variants" and more."""
    lines = library().nf4_build_info().decode().splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def cpu_variant() -> str:
    """Returns the name of the CPU kernels that this machine runs.

    "avx512bf16", "avx512", "avx2", "neonbf16", "neon" or "scalar".
    """
    return library().nf4_cpu_variant().decode()


def codebook(format: FormatName = "nf4") -> np.ndarray:
    """Returns a copy of the codebook of a format: float32 [16], indexed by code.

    Raises InvalidArgument for an unknown format.
    """
    table = library().nf4_codebook(_convert.format_code(format))
    return np.ctypeslib.as_array(table, (16,)).copy()


def scale_code() -> np.ndarray:
    """Returns a copy of bitsandbytes' table of nested scales: float32 [256], ascending."""
    return np.ctypeslib.as_array(library().nf4_scale_code(), (256,)).copy()


@dataclass(frozen=True)
class Device:
    """A GPU, or the reason why there is none.

    usable  True if kernels of this library run on it; otherwise `reason` says why not
    status  the name of the nf4_status
    shared_memory_bytes
            the most shared memory that a thread block may have
    timed   True if libnf4's products were timed on GPUs of this kind. Otherwise it is presumed
            which way a product goes: by libnf4's kernel or by a dense weight

    Unknown values are 0 or "".
    """

    index: int
    usable: bool
    reason: str
    status: str
    device_count: int
    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    driver_version: int
    runtime_version: int
    dequant_variant: str
    shared_memory_bytes: int
    timed: bool


def device_info(device: int = 0) -> Device:
    """Returns what is known of the GPU with this index. May initialise CUDA, which takes long.

    Raises InvalidArgument for an index out of range.
    """
    index = _convert.integer("device", device, 32)
    info = _abi.Device(struct_size=ctypes.sizeof(_abi.Device))
    status = library().nf4_device_info(index, ctypes.byref(info))
    if status == _abi.STATUS_INVALID_ARGUMENT:
        check(status)
    usable = status == _abi.STATUS_OK
    return Device(
        index=index,
        usable=usable,
        reason="" if usable else str(error_of(status, _last_error())),
        status=library().nf4_status_string(status).decode(),
        device_count=info.device_count,
        name=info.name.decode(errors="replace"),
        compute_capability=divmod(info.compute_capability, 10),
        multiprocessors=info.multiprocessors,
        memory_bytes=info.memory_bytes,
        driver_version=info.driver_version,
        runtime_version=info.runtime_version,
        dequant_variant=info.dequant_variant.decode(errors="replace"),
        shared_memory_bytes=info.shared_memory_bytes,
        timed=bool(info.timed),
    )


def _last_error() -> str:
    return library().nf4_last_error().decode(errors="replace")
