"""Which 4-bit integer weights are measured: in groups of 128, in each layout."""

from __future__ import annotations

from collections.abc import Sequence

from nf4bench.cases import Case
from nf4bench.matmul_cases import LARGE, Group
from nf4bench.options import Shape

GROUP_SIZE = 128
LAYOUTS = ("gptq", "awq", "compressed-tensors")
SHAPES: tuple[Shape, ...] = (LARGE, (4096, 14336), (4096, 4096))
DEQUANTIZED: tuple[Shape, ...] = (LARGE, (28672, 8192))
MS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
FP16_MS = (1, 16, 256, 1024)
QUICK_SHAPES, QUICK_MS = (LARGE,), (1, 16, 128, 1024)
TRITON_M = 16  # beyond it a kernel that dequantizes for each 16 rows of x shows nothing


def case(
    shape: Shape, layout: str = "gptq", dtype: str = "bf16", work: str = "matmul",
    peers: tuple[str, ...] = (),
) -> Case:  # fmt: skip
    return Case(shape, dtype, False, work, GROUP_SIZE, layout, peers=peers)


def _dequantized(shapes: Sequence[Shape]) -> list[Case]:
    return [case(shape, layout, work="dequantize") for shape in shapes for layout in LAYOUTS]


def _groups(shapes: Sequence[Shape], ms: Sequence[int]) -> list[Group]:
    return [Group(case(shape), tuple(ms)) for shape in shapes]


Cases = tuple[list[Case], list[Group]]  # the weights to dequantize, and those to multiply


def full() -> Cases:
    fp16 = Group(case(LARGE, dtype="fp16"), FP16_MS)
    return _dequantized(DEQUANTIZED), [*_groups(SHAPES, MS), fp16]


def quick() -> Cases:
    return _dequantized(QUICK_SHAPES), _groups(QUICK_SHAPES, QUICK_MS)


def of_shapes(shapes: Sequence[Shape]) -> Cases:
    return _dequantized(shapes), _groups(shapes, MS)
