"""The C library of the bench through ctypes: the limits, and every launch configuration.

The one place that knows its functions; bench_library.hpp is their manual."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from nf4 import _abi

_STREAM = [c_int, c_void_p]  # pdl, stream
# name: (restype, argtypes)
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "nf4_bench_has_pdl": (c_int, []),
    "nf4_bench_stream_variants": (c_int, []),
    "nf4_bench_stream": (
        c_int,
        [c_int, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int, *_STREAM],
    ),
    "nf4_bench_encode_stream_variants": (c_int, []),
    "nf4_bench_encode_stream": (c_int, [c_int, c_void_p, c_int64, c_void_p, c_int64, *_STREAM]),
    "nf4_bench_read_variants": (c_int, []),
    "nf4_bench_read": (c_int, [c_int, c_void_p, c_int64, c_void_p, *_STREAM]),
    "nf4_bench_write_variants": (c_int, []),
    "nf4_bench_write": (c_int, [c_int, c_void_p, c_int64, *_STREAM]),
    "nf4_bench_dequant_configurations": (c_int, []),
    "nf4_bench_dequant_configuration": (c_char_p, [c_int]),
    "nf4_bench_dequant_chosen": (c_int, [c_void_p, c_void_p, _abi.Dtype]),
    "nf4_bench_dequant": (
        _abi.Status,
        [c_int, c_void_p, c_void_p, _abi.Dtype, c_void_p],
    ),
    "nf4_bench_dequant_stores": (
        _abi.Status,
        [c_void_p, c_void_p, _abi.Dtype, c_int, c_void_p],
    ),
    "nf4_bench_matmul": (
        _abi.Status,
        [c_void_p, c_void_p, c_void_p, c_size_t, *_STREAM],
    ),
    "nf4_bench_matmul_batch": (
        _abi.Status,
        [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, *_STREAM],
    ),
    "nf4_bench_matmul_shapes": (c_int, []),
    "nf4_bench_matmul_shape": (c_char_p, [c_int]),
    "nf4_bench_matmul_chosen": (
        c_int,
        [c_void_p, c_void_p, c_void_p, c_size_t, c_void_p],
    ),
    "nf4_bench_matmul_as": (
        _abi.Status,
        [c_int, c_void_p, c_void_p, c_void_p, c_size_t, *_STREAM],
    ),
    "nf4_bench_quantize": (
        _abi.Status,
        [c_void_p, _abi.Dtype, c_void_p, c_void_p, c_size_t, *_STREAM],
    ),
}
PLAIN = -1  # in place of a configuration's index: the library's choice launched plainly


class LibraryMissing(Exception):
    """The bench's C library cannot be loaded; the message says from where."""


class LaunchFailed(RuntimeError):
    """A kernel of the bench's C library could not be launched."""


def path_in(build: Path) -> Path:
    return build / "tests" / "libnf4_bench.so"


class Refused(LaunchFailed):
    """A kernel that cannot do what it was asked."""


class Library:
    """Every method that launches takes addresses and the stream's address last; sizes are in
    bytes. Raises LaunchFailed."""

    def __init__(self, build: Path) -> None:
        path = path_in(build)
        try:
            self._c = ctypes.CDLL(str(path))
            for name, (restype, argtypes) in FUNCTIONS.items():
                function = getattr(self._c, name)
                function.restype, function.argtypes = restype, argtypes
        except OSError as error:
            raise LibraryMissing(f"{error}; ./dev build makes it where there is CUDA") from error
        except AttributeError as error:
            raise LibraryMissing(f"{path} is not of these sources: {error}") from error

    def has_pdl(self) -> bool:
        """Does libnf4 launch with programmatic dependent launch, on the current GPU?"""
        return bool(self._c.nf4_bench_has_pdl())

    def variants(self, kernel: str) -> range:
        """The launch shapes of "stream", "encode_stream", "read" or "write"."""
        return range(getattr(self._c, f"nf4_bench_{kernel}_variants")())

    def stream(
        self, variant: int, packed: int, packed_bytes: int, scales: int, scale_bytes: int,
        out: int, stores: int, pdl: bool, stream: int,
    ) -> None:  # fmt: skip
        """Dequantize's traffic: each 4 packed bytes, the scales in between, and 16 * stores
        bytes of `out` for each 4."""
        _check("stream", self._c.nf4_bench_stream(
            variant, packed, packed_bytes // 4, scales, scale_bytes, out, stores, pdl, stream
        ))  # fmt: skip

    def encode_stream(
        self, variant: int, source: int, source_bytes: int, out: int, out_bytes: int,
        pdl: bool, stream: int,
    ) -> None:  # fmt: skip
        """Quantize's traffic."""
        _check("encode_stream", self._c.nf4_bench_encode_stream(
            variant, source, source_bytes, out, out_bytes, pdl, stream
        ))  # fmt: skip

    def read(
        self, variant: int, source: int, nbytes: int, sink: int, pdl: bool, stream: int
    ) -> None:
        _check("read", self._c.nf4_bench_read(variant, source, nbytes, sink, pdl, stream))

    def write(self, variant: int, out: int, nbytes: int, pdl: bool, stream: int) -> None:
        _check("write", self._c.nf4_bench_write(variant, out, nbytes, pdl, stream))

    def configurations(self) -> list[str]:
        """The names of dequantize's launch configurations, by index."""
        count = self._c.nf4_bench_dequant_configurations()
        return [self._c.nf4_bench_dequant_configuration(index).decode() for index in range(count)]

    def chosen(self, tensor: _abi.Tensor, out: int, dtype: int) -> int:
        """The index that libnf4 itself would take; negative if it takes one of none."""
        return self._c.nf4_bench_dequant_chosen(ctypes.byref(tensor), out, dtype)

    def dequantize(
        self, configuration: int, tensor: _abi.Tensor, out: int, dtype: int, stream: int
    ) -> None:
        _check("dequant", self._c.nf4_bench_dequant(
            configuration, ctypes.byref(tensor), out, dtype, stream
        ))  # fmt: skip

    def dequantize_stores(
        self, keep: bool, tensor: _abi.Tensor, out: int, dtype: int, stream: int
    ) -> None:
        """The library's choice launched plainly; its stores evict first or are normal ones."""
        _check("dequant_stores", self._c.nf4_bench_dequant_stores(
            ctypes.byref(tensor), out, dtype, keep, stream
        ))  # fmt: skip

    def quantize(
        self, source: int, dtype: int, tensor: _abi.Tensor, workspace: int, workspace_bytes: int,
        pdl: bool, stream: int,
    ) -> None:  # fmt: skip
        status = self._c.nf4_bench_quantize(
            source, dtype, ctypes.byref(tensor), workspace, workspace_bytes, pdl, stream
        )
        _check("quantize", status)

    def matmul(
        self, tensor: _abi.Tensor, args: _abi.MatmulArgs, workspace: int | None,
        workspace_bytes: int, pdl: bool, stream: int,
    ) -> None:  # fmt: skip
        _check("matmul", self._c.nf4_bench_matmul(
            ctypes.byref(tensor), ctypes.byref(args), workspace, workspace_bytes, pdl, stream
        ))  # fmt: skip

    def matmul_batch(
        self, tensors: Sequence[_abi.Tensor], args: Sequence[_abi.MatmulArgs],
        workspace: int | None, workspace_bytes: int, pdl: bool, stream: int,
    ) -> None:  # fmt: skip
        """Several products in one call."""
        count = len(tensors)
        addresses = (c_void_p * count)(*map(ctypes.addressof, tensors))
        _check("matmul_batch", self._c.nf4_bench_matmul_batch(
            addresses, (_abi.MatmulArgs * count)(*args), count, workspace, workspace_bytes, pdl,
            stream,
        ))  # fmt: skip

    def matmul_shapes(self) -> list[str]:
        """The names of the shapes of matmul's kernels, by index."""
        count = self._c.nf4_bench_matmul_shapes()
        return [self._c.nf4_bench_matmul_shape(index).decode() for index in range(count)]

    def matmul_chosen(
        self, tensor: _abi.Tensor, args: _abi.MatmulArgs, workspace: int | None,
        workspace_bytes: int, stream: int,
    ) -> int:  # fmt: skip
        """The index of the shape that libnf4 itself would take."""
        found = self._c.nf4_bench_matmul_chosen(
            ctypes.byref(tensor), ctypes.byref(args), workspace, workspace_bytes, stream
        )
        if found < 0:
            raise LaunchFailed(f"nf4_bench_matmul_chosen returned {found}")
        return found

    def matmul_as(
        self, shape: int, tensor: _abi.Tensor, args: _abi.MatmulArgs, workspace: int | None,
        workspace_bytes: int, pdl: bool, stream: int,
    ) -> None:  # fmt: skip
        """In a shape of kernel. Raises Refused where that cannot do it."""
        status = self._c.nf4_bench_matmul_as(
            shape, ctypes.byref(tensor), ctypes.byref(args), workspace, workspace_bytes, pdl, stream
        )
        if status == _abi.STATUS_INVALID_ARGUMENT:
            raise Refused(f"the kernel {shape} of matmul cannot do it")
        _check("matmul_as", status)


def _check(kernel: str, status: int) -> None:
    if status != 0:
        raise LaunchFailed(f"nf4_bench_{kernel} returned {status}")
