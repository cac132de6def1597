"""Which weights are measured, and beside whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nf4bench.options import PEERS, Shape

NESTED_BLOCKSIZE = 256
# Rows x cols of the projections, as nn.Linear holds them.
HEADLINE: tuple[Shape, ...] = (
    (4096, 1024), (4096, 4096), (11008, 4096), (14336, 4096), (28672, 8192),
)  # fmt: skip
LLAMA: dict[str, tuple[Shape, ...]] = {
    "7B": ((4096, 4096), (11008, 4096), (4096, 11008)),
    "13B": ((5120, 5120), (13824, 5120), (5120, 13824)),
    "70B": ((8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672)),
    "3-8B": ((4096, 4096), (1024, 4096), (4096, 1024), (14336, 4096), (4096, 14336)),
}
# torch's own operators take as long as all others together.
FUSED, ALONE = ("bitsandbytes", "unsloth", "triton"), ("bitsandbytes",)
CLASSES = (("bf16", True), ("fp16", True), ("fp32", True), ("bf16", False))
DETAIL: tuple[Shape, ...] = ((4096, 4096), (14336, 4096))  # where the rarer cases are measured
BLOCKSIZES = (32, 128, 256, 1024, 4096)
CONSUMED: tuple[Shape, ...] = (
    (4096, 1024), (4096, 1536), (4096, 2048), (4096, 3072), (4096, 4096), (5120, 4096),
)  # fmt: skip


INT4 = ("gptq", "gptq_v2", "awq", "compressed-tensors")
ACT_ORDER, REORDERED = "act order", "reordered"
PUBLIC_CALL = "public call"


@dataclass(frozen=True)
class Case:
    """One weight to measure.

    format     "nf4", "fp4", "own": a codebook of the caller's, or a layout of 4-bit integers
    placement  "aligned", or what lies next to its natural place: "out + 1 element",
               "packed + 1 byte"; of columns, "act order", or "reordered" thereafter
    blocksize  numbers that share a scale: of integers, the group size
    peers      who is timed beside us, where installed
    bounds     are kernels that only read and only write timed, too?
    """

    shape: Shape
    dtype: str = "bf16"
    nested: bool = True
    work: str = "dequantize"
    blocksize: int = 64
    format: str = "nf4"
    placement: str = "aligned"
    peers: tuple[str, ...] = ALONE
    bounds: bool = False

    @property
    def elements(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def nested_blocksize(self) -> int:
        return NESTED_BLOCKSIZE if self.nested else 0

    def __str__(self) -> str:
        parts = [self.work, "x".join(map(str, self.shape)), self.dtype]
        parts.append("nested" if self.nested else "flat")
        if self.format != "nf4":
            parts.append({"own": "own codebook"}.get(self.format, self.format))
        if self.blocksize != 64:
            parts.append(f"blocksize {self.blocksize}")
        if self.placement != "aligned":
            parts.append(self.placement)
        return " ".join(parts)


def llama_shapes() -> list[Shape]:
    """Every shape once, by size."""
    return sorted({shape for shapes in LLAMA.values() for shape in shapes}, key=_area)


def _area(shape: Shape) -> tuple[int, Shape]:
    return shape[0] * shape[1], shape


def _of_shape(shape: Shape, peers: tuple[str, ...], others: tuple[str, ...]) -> list[Case]:
    """The four classes of dequantize: bf16 and nested beside `peers`, the rest beside `others`."""
    return [
        Case(
            shape, dtype, nested, bounds=nested and dtype != "fp16",
            peers=peers if (dtype, nested) == CLASSES[0] else others,
        )
        for dtype, nested in CLASSES
    ]  # fmt: skip


def _details(shape: Shape) -> list[Case]:
    rows, cols = shape
    plain = Case(shape)
    return [
        *(replace(plain, blocksize=blocksize) for blocksize in BLOCKSIZES),
        replace(plain, dtype="fp32", blocksize=32),
        replace(plain, dtype="fp32", blocksize=4096),
        replace(plain, format="fp4"),
        replace(plain, format="own", peers=()),
        Case((rows + 1, cols - 1)),
        Case((rows + 1, cols - 1), dtype="fp32"),
        # Peers that load vectors fault on these.
        replace(plain, placement="out + 1 element", peers=()),
        replace(plain, placement="packed + 1 byte", peers=()),
        replace(plain, dtype="fp32", placement="out + 1 element", peers=()),
    ]


def _quantize(shape: Shape, classes: Sequence[tuple[str, bool]]) -> list[Case]:
    return [Case(shape, dtype, nested, work="quantize") for dtype, nested in classes]


def full() -> list[Case]:
    """All: every peer at the headline shapes, fewer for what differs less from those."""
    cases = []
    for shape in llama_shapes():
        if shape in HEADLINE:
            cases += _of_shape(shape, PEERS, FUSED)
            cases += _quantize(shape, CLASSES if shape in DETAIL else CLASSES[:1])
        else:
            cases += _of_shape(shape, FUSED, ALONE)
        cases += _details(shape) if shape in DETAIL else []
    return cases + [Case(shape, work="consumer", peers=()) for shape in CONSUMED]


def quick() -> list[Case]:
    """bf16 and nested, at the headline shapes."""
    cases = []
    for shape in HEADLINE:
        cases += [_of_shape(shape, PEERS, FUSED)[0], *_quantize(shape, CLASSES[:1])]
    return cases


def of_shapes(shapes: Sequence[Shape]) -> list[Case]:
    """Every class and every peer at these shapes."""
    cases = []
    for shape in shapes:
        cases += [*_of_shape(shape, PEERS, FUSED), *_quantize(shape, CLASSES)]
    return cases
