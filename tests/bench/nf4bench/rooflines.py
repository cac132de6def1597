"""The bandwidth rooflines as candidates: kernels that move the same bytes and do nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nf4bench.device import Launch
from nf4bench.library import Library
from nf4bench.measure import Candidate
from nf4bench.weights import Weight

Candidates = dict[Candidate, list[Launch]]


def _each(
    name: str, launch: str, library: Library, kernel: str, weights: Sequence[Weight],
    arguments: Callable[[Weight], tuple],
) -> Candidates:  # fmt: skip
    """Every launch variant of a kernel, over the rotation."""

    def made(variant: int, weight: Weight) -> Launch:
        given, pdl = arguments(weight), launch == "pdl"
        return lambda stream: library.launch(kernel, variant, *given, pdl, stream)

    return {
        Candidate(name, launch, variant): [made(variant, weight) for weight in weights]
        for variant in library.variants(kernel)
    }


def dequantize(library: Library, weights: Sequence[Weight], launch: str) -> Candidates:
    """Reads packed and scales, writes the dense bytes: from and to aligned memory, and at odd
    sizes short of the last word."""

    def arguments(weight: Weight) -> tuple:
        return (
            weight.packed_room.data_ptr(), weight.case.elements // 8,
            weight.quantized.absmax.data_ptr(), weight.sizes.absmax_bytes // 4 * 4,
            weight.out_room.data_ptr(), weight.dense.itemsize // 2,
        )  # fmt: skip

    return _each("roofline", launch, library, "dequant_traffic", weights, arguments)


def quantize(library: Library, weights: Sequence[Weight], launch: str) -> Candidates:
    """Reads the dense bytes once, writes the packed ones."""

    def arguments(weight: Weight) -> tuple:
        nbytes = read_bytes(weight)
        out_bytes = nbytes // weight.dense.itemsize // 2
        return weight.dense.data_ptr(), nbytes, weight.packed_room.data_ptr(), out_bytes

    return _each("roofline", launch, library, "quantize_traffic", weights, arguments)


def read(library: Library, weights: Sequence[Weight], sink: torch.Tensor) -> Candidates:
    """Reads what the case reads: packed, or for quantize the dense bytes."""

    def arguments(weight: Weight) -> tuple:
        source = weight.dense if weight.case.work == "quantize" else weight.packed_room
        return source.data_ptr(), read_bytes(weight), sink.data_ptr()

    return _each("read", "plain", library, "read", weights, arguments)


def read_bytes(weight: Weight) -> int:
    """A multiple of 16."""
    quantize = weight.case.work == "quantize"
    return (weight.dense_bytes if quantize else weight.sizes.packed_bytes) // 16 * 16


def write(library: Library, weights: Sequence[Weight]) -> Candidates:
    """Writes the dense bytes."""
    return _each(
        "write", "plain", library, "write", weights,
        lambda weight: (weight.out_room.data_ptr(), write_bytes(weight)),
    )  # fmt: skip


def write_bytes(weight: Weight) -> int:
    """A multiple of 16."""
    return weight.dense_bytes // 16 * 16
