"""Which products are measured: y = x W^T for weights of rows x cols and m rows of x."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nf4bench.cases import Case
from nf4bench.options import Shape

PEERS = ("bitsandbytes", "dense", "humming", "tinygemm")
LARGE: Shape = (14336, 4096)
SHAPES: tuple[Shape, ...] = (LARGE, (4096, 14336), (4096, 4096), (28672, 8192))
# The weights that the cost model is fitted to.
SWEPT: tuple[Shape, ...] = (
    (11008, 4096), (4096, 11008), (8192, 28672), (18944, 3584), (3584, 18944), (5120, 5120), *SHAPES
)  # fmt: skip
MS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 512, 777, 1024, 2048, 4096)
FP16_MS = (1, 16, 64, 1024)
TOGETHER_MS = (1, 8)
QUICK_SHAPES, QUICK_MS = (LARGE, (4096, 4096)), (1, 8, 64, 1024)
MANY = 64  # rows of x, from which on a product is compared with dense and not with a read
PDL_M = 64  # beyond it the share of a launch is small, and ours is launched plainly alone
MAX_PRODUCTS = 2**38  # multiplications of a weight and x: larger ones show nothing new
TINYGEMM_M = 64  # beyond it torch's int4 kernel takes ten times as long as a dense product

ERROR_MS = (1, 8, 16, 64, 300)
ERROR_CLASSES = (("bf16", True), ("bf16", False), ("fp16", True), ("fp16", False))
# The error over that of a dense product with the rounded weight, and in itself.
MOST_OF_DENSE = 1.10
MOST_ERROR = {"bf16": 4e-3, "fp16": 5e-4}


@dataclass(frozen=True)
class Group:
    """A weight and the numbers of rows of x that it is multiplied with. together: so many
    weights of that shape share each x, as gate and up of an MLP do."""

    case: Case
    ms: tuple[int, ...]
    together: int = 1


def weight_case(shape: Shape, dtype: str = "bf16", nested: bool = True) -> Case:
    return Case(shape, dtype, nested, work="matmul")


def error_cases(shapes: Iterable[Shape]) -> list[Case]:
    return [weight_case(shape, *kind) for shape in shapes for kind in ERROR_CLASSES]


def measured(shape: Shape, ms: Sequence[int] = MS) -> tuple[int, ...]:
    """Those that do not take too long."""
    return tuple(m for m in ms if m * shape[0] * shape[1] <= MAX_PRODUCTS)


def full() -> list[Group]:
    groups = [Group(weight_case(shape), measured(shape)) for shape in SHAPES]
    groups.insert(1, Group(weight_case(LARGE, "fp16"), FP16_MS))
    return [*groups, Group(weight_case(LARGE), TOGETHER_MS, together=2)]


def swept() -> list[Group]:
    return [*of_shapes(SWEPT), Group(weight_case(LARGE, "fp16"), FP16_MS)]


def quick() -> list[Group]:
    groups = [Group(weight_case(shape), QUICK_MS) for shape in QUICK_SHAPES]
    return [*groups, full()[-1]]


def of_shapes(shapes: Sequence[Shape]) -> list[Group]:
    return [Group(weight_case(shape), measured(shape)) for shape in shapes]
