"""One product of the bench: its tensors, its launches, and how wrong it is."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import nf4
import torch
from nf4 import _abi

from nf4bench.check import WrongResult
from nf4bench.device import Launch
from nf4bench.library import LaunchFailed, Library
from nf4bench.matmul_cases import MOST_ERROR
from nf4bench.weights import CODES, DTYPES, Weight

# The largest error of a peer, which may round as it likes: beyond it, it computes something else.
MOST_PEER_ERROR = 2e-2


def _workspace_of(nbytes: int, place: object) -> tuple[torch.Tensor, tuple[int | None, int]]:
    """A workspace, and what C gets of it: address and bytes."""
    room = torch.empty(nbytes, device=place, dtype=torch.uint8)
    return room, (room.data_ptr() if nbytes else None, nbytes)


class Product:
    """x [m, cols] of normal values, or the one that is given; `weight`; and y [m, rows]."""

    def __init__(self, weight: Weight, m: int, x: torch.Tensor | None = None) -> None:
        rows, cols = weight.case.shape
        dtype = DTYPES[weight.case.dtype]
        self.weight, self.m = weight, m
        self.x = torch.randn(m, cols, device=weight.place, dtype=dtype) if x is None else x
        self.y = torch.empty(m, rows, device=weight.place, dtype=dtype)
        nbytes = nf4.matmul_workspace_bytes(weight.quantized, m, weight.case.dtype)
        self._room, workspace = _workspace_of(nbytes, weight.place)
        self.args = _abi.MatmulArgs(
            ctypes.sizeof(_abi.MatmulArgs), CODES[weight.case.dtype], 0, m,
            self.x.data_ptr(), cols, None, self.y.data_ptr(), rows,
        )  # fmt: skip
        self._given = (weight.descriptor, self.args, *workspace)

    def plain(self, library: Library) -> Launch:
        def launch(stream: int) -> torch.Tensor:
            library.launch(f"{self.weight.prefix}matmul", *self._given, False, stream)
            return self.y

        return launch

    def shipped(self, stream: int | None) -> torch.Tensor:
        """The public call, a launch."""
        return nf4.matmul(self.x, self.weight.quantized, out=self.y, stream=stream)

    def forced(self, library: Library, configuration: int) -> Launch:
        """In a kernel configuration, launched as the library launches. Raises Refused where that
        cannot do it."""
        pdl = library.has_pdl()

        def launch(stream: int) -> torch.Tensor:
            library.launch("matmul_as", configuration, *self._given, pdl, stream)
            return self.y

        return launch

    def kernel(self, library: Library, stream: int) -> str:
        """The name of the kernel that the library takes."""
        if self.weight.prefix:
            return library.call("int4_matmul_kernel", self.weight.descriptor, self.args).decode()
        return library.configurations("matmul")[self.chosen(library, stream)]

    def chosen(self, library: Library, stream: int) -> int:
        """The index of the kernel configuration that the library takes."""
        found = library.chosen("matmul", *self._given, stream)
        if found < 0:
            raise LaunchFailed(f"nf4_bench_matmul_chosen returned {found}")
        return found


class Batch:
    """Products that share an x, in one call. Each launch gives every y."""

    def __init__(self, products: Sequence[Product]) -> None:
        first = products[0]
        self._x, self._ys = first.x, [each.y for each in products]
        self._weights = [each.weight.quantized for each in products]
        count = len(products)
        addresses = (ctypes.c_void_p * count)(
            *(ctypes.addressof(each.weight.descriptor) for each in products)
        )
        args = (_abi.MatmulArgs * count)(*(each.args for each in products))
        self._products, self._given = products, (addresses, args, count)
        nbytes = nf4.matmul_batch_workspace_bytes(self._weights, first.m, first.weight.case.dtype)
        self._room, self._workspace = _workspace_of(nbytes, first.x.device)

    def plain(self, library: Library) -> Launch:
        def launch(stream: int) -> list[torch.Tensor]:
            library.launch("matmul_batch", *self._given, *self._workspace, False, stream)
            return self._ys

        return launch

    def shipped(self, stream: int | None) -> list[torch.Tensor]:
        """The public call."""
        return nf4.matmul_batch(self._x, self._weights, out=self._ys, stream=stream)


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    """||y - expected|| / ||expected||, in float64."""
    return float((y.double() - expected).norm() / expected.norm())


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x times the transpose of a weight in float64."""
    return x.double() @ weight.t()


def require(what: str, most: float, expected: torch.Tensor, y: torch.Tensor) -> float:
    """The relative error of y. Raises WrongResult above `most`, and for NaN."""
    if y.shape != expected.shape:
        raise WrongResult(f"{what}: {tuple(y.shape)}, expected {tuple(expected.shape)}")
    error = relative_error(y, expected)
    if not error <= most:
        raise WrongResult(f"{what}: off by {error:.2e} of its norm; {most:.1e} at most")
    return error


def most_error(weight: Weight) -> float:
    """Of libnf4."""
    return MOST_ERROR[weight.case.dtype]
