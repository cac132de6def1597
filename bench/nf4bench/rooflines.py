"""The bandwidth rooflines as candidates: kernels that move the same bytes and do nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from nf4bench.device import Launch
from nf4bench.library import Library
from nf4bench.measure import Candidate
from nf4bench.weights import Weight

Candidates = dict[Candidate, list[Launch]]


def of(
    library: Library, kernel: str, given: Sequence[tuple], candidate: Candidate,
    variants: Iterable[int] = (),
) -> Candidates:  # fmt: skip
    """Some or all launch variants of a kernel, each with the arguments of every member of the
    rotation, launched as the candidate is."""
    pdl = candidate.launch == "pdl"

    def made(variant: int, arguments: tuple) -> Launch:
        return lambda stream: library.launch(kernel, variant, *arguments, pdl, stream)

    return {
        candidate._replace(variant=variant): [made(variant, each) for each in given]
        for variant in variants or library.variants(kernel)
    }


def dequantize(library: Library, weights: Sequence[Weight], launch: str) -> Candidates:
    """Reads packed and scales, writes the dense bytes: from and to aligned memory, and at odd
    sizes short of the last word."""
    given = [
        (
            weight.packed_room.data_ptr(), weight.case.elements // 8,
            weight.scales.data_ptr(), weight.scales.nbytes // 4 * 4,
            weight.out_room.data_ptr(), weight.dense.itemsize // 2,
        )
        for weight in weights
    ]  # fmt: skip
    return of(library, "dequant_traffic", given, Candidate("roofline", launch))


def quantize(library: Library, weights: Sequence[Weight], launch: str) -> Candidates:
    """Reads the dense bytes once, writes the packed ones."""
    nbytes = read_bytes(weights[0])
    out_bytes = nbytes // weights[0].dense.itemsize // 2
    given = [
        (weight.dense.data_ptr(), nbytes, weight.packed_room.data_ptr(), out_bytes)
        for weight in weights
    ]
    return of(library, "quantize_traffic", given, Candidate("roofline", launch))


def read(library: Library, weights: Sequence[Weight], sink: torch.Tensor) -> Candidates:
    """Reads what the case reads: packed, or for quantize the dense bytes."""
    sources = [w.dense if w.case.work == "quantize" else w.packed_room for w in weights]
    given = [(each.data_ptr(), read_bytes(weights[0]), sink.data_ptr()) for each in sources]
    return of(library, "read", given, Candidate("read"))


def write(library: Library, weights: Sequence[Weight]) -> Candidates:
    """Writes the dense bytes."""
    given = [(weight.out_room.data_ptr(), write_bytes(weight)) for weight in weights]
    return of(library, "write", given, Candidate("write"))


def read_bytes(weight: Weight) -> int:
    """A multiple of 16."""
    quantize = weight.case.work == "quantize"
    return (weight.dense_bytes if quantize else weight.packed_bytes) // 16 * 16


def write_bytes(weight: Weight) -> int:
    """A multiple of 16."""
    return weight.dense_bytes // 16 * 16
