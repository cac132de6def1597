"""The limits as candidates: kernels that move the same bytes and do nothing else."""

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
    make: Callable[[Weight, int, bool], Launch],
) -> Candidates:  # fmt: skip
    """Every launch shape of a kernel, over the rotation."""
    return {
        Candidate(name, launch, variant): [make(w, variant, launch == "pdl") for w in weights]
        for variant in library.variants(kernel)
    }


def dequantize_stream(library: Library, weights: Sequence[Weight], launch: str) -> Candidates:
    """Reads packed and scales, writes the dense bytes: from and to aligned memory, and at odd
    sizes short of the last word."""

    def make(weight: Weight, variant: int, pdl: bool) -> Launch:
        stores = weight.dense.itemsize // 2
        packed, scales = weight.packed_room.data_ptr(), weight.quantized.absmax.data_ptr()
        packed_bytes, scale_bytes = (
            weight.case.elements // 8 * 4,
            weight.sizes.absmax_bytes // 4 * 4,
        )
        out = weight.out_room.data_ptr()
        return lambda stream: library.stream(
            variant, packed, packed_bytes, scales, scale_bytes, out, stores, pdl,
            stream,
        )  # fmt: skip

    return _each("stream", launch, library, "stream", weights, make)


def quantize_stream(library: Library, weights: Sequence[Weight], launch: str) -> Candidates:
    """Reads the dense bytes once, writes the packed ones."""

    def make(weight: Weight, variant: int, pdl: bool) -> Launch:
        source, source_bytes = weight.dense.data_ptr(), read_bytes(weight)
        out, out_bytes = weight.packed_room.data_ptr(), source_bytes // weight.dense.itemsize // 2
        return lambda stream: library.encode_stream(
            variant, source, source_bytes, out, out_bytes, pdl, stream
        )

    return _each("stream", launch, library, "encode_stream", weights, make)


def read(library: Library, weights: Sequence[Weight], sink: torch.Tensor) -> Candidates:
    """Reads what the case reads: packed, or for quantize the dense bytes."""

    def make(weight: Weight, variant: int, pdl: bool) -> Launch:
        source = weight.dense if weight.case.work == "quantize" else weight.packed_room
        nbytes = read_bytes(weight)
        return lambda stream: library.read(
            variant, source.data_ptr(), nbytes, sink.data_ptr(), pdl, stream
        )

    return _each("read", "plain", library, "read", weights, make)


def read_bytes(weight: Weight) -> int:
    """A multiple of 16."""
    quantize = weight.case.work == "quantize"
    return (weight.dense_bytes if quantize else weight.sizes.packed_bytes) // 16 * 16


def write(library: Library, weights: Sequence[Weight]) -> Candidates:
    """Writes the dense bytes."""

    def make(weight: Weight, variant: int, pdl: bool) -> Launch:
        out, nbytes = weight.out_room.data_ptr(), write_bytes(weight)
        return lambda stream: library.write(variant, out, nbytes, pdl, stream)

    return _each("write", "plain", library, "write", weights, make)


def write_bytes(weight: Weight) -> int:
    """A multiple of 16."""
    return weight.dense_bytes // 16 * 16
