"""Every launch configuration of dequantize, and every kernel configuration of matmul: each that can
do the problem, checked and timed, and which of them the library takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from nf4bench import tables
from nf4bench.cases import HEADLINE, Case
from nf4bench.device import Launch
from nf4bench.library import LaunchFailed, Refused
from nf4bench.matmul_cases import Group
from nf4bench.measure import Candidate, Timing, measure
from nf4bench.options import Shape
from nf4bench.peers import dequantized
from nf4bench.product import Product, exact, most_error, require
from nf4bench.rows import Bench, Report, configured
from nf4bench.weights import Weight

DTYPES = ("bf16", "fp32")  # fp16 has the sizes of bf16
# The numbers at which the choice changes are among them.
SHAPES: tuple[Shape, ...] = (
    *HEADLINE[:1], (4096, 1536), (4096, 2048), HEADLINE[1], (6144, 4096), (8192, 4096),
    *HEADLINE[2:],
)  # fmt: skip
QUICK_SHAPES = HEADLINE[:2]
MATMUL_REPLAYS = 7  # the slow kernels take their time


def _row(
    case: Case, chosen: int, names: Sequence[str], launches: Callable[[int], list[Launch]],
    check: Callable[[str, Launch], object], time: Callable[[dict], dict[Candidate, Timing]],
    refusal: type[LaunchFailed] = LaunchFailed, **more: int,
) -> dict[str, Any]:  # fmt: skip
    """By configuration: its time, and that over the best one's; or why it refuses. Raises
    WrongResult."""
    found, candidates = {}, {}
    for index, name in enumerate(names):
        made = launches(index)
        try:
            check(name, made[0])
        except refusal as error:
            found[index] = {"refused": str(error)}
        else:
            candidates[Candidate("configuration", variant=index)] = made
    times = time(candidates)
    best = min(timing.us for timing in times.values())
    for candidate, timing in times.items():
        found[candidate.variant] = timing.figures() | {"ratio": round(timing.us / best, 4)}
    return {
        "shape": list(case.shape), "dtype": case.dtype, **more, "chosen": chosen,
        "times": [found[index] for index in range(len(names))],
    }  # fmt: skip


def dequantize(bench: Bench, shapes: Iterable[Shape], report: Report) -> dict:
    """All figures. Raises WrongResult before a case is timed."""
    names = bench.configurations
    figures: dict = {"device": bench.gpu.name, "configurations": names, "rows": []}
    for case in (Case(shape, dtype, peers=()) for dtype in DTYPES for shape in shapes):
        weights = bench.rotation(case)
        expected = bench.expected(weights[0])
        row = _row(
            case, bench.chosen(weights[0]), names,
            lambda index, w=weights: [configured(bench, each, index) for each in w],
            lambda name, launch, w=weights[0], e=expected: bench.require(
                f"configuration {name}", w, e, launch
            ),
            partial(bench.times, weights),
        )  # fmt: skip
        figures["rows"].append(row)
        report(tables.sweep_line(figures, row))
        bench.gpu.release()
    return figures


def _product_row(
    bench: Bench, names: Sequence[str], weights: Sequence[Weight], numbers: torch.Tensor, m: int
) -> dict:
    products = [Product(weight, m) for weight in weights]
    first, case = products[0], weights[0].case
    expected = exact(first.x, numbers)

    def check(name: str, launch: Launch) -> None:
        first.y.fill_(torch.nan)
        y = bench.gpu.run(launch)
        require(f"{case}, M = {m}: kernel {name}", most_error(first.weight), expected, y)

    return _row(
        case, first.chosen(bench.library, bench.gpu.stream), names,
        lambda index: [product.forced(bench.library, index) for product in products], check,
        lambda made: measure(bench.gpu, made, bench.replays or MATMUL_REPLAYS), Refused, m=m,
    )  # fmt: skip


def matmul(bench: Bench, groups: Iterable[Group], report: Report) -> dict:
    """All figures, launched as the library does. Raises WrongResult before a product is timed."""
    names = bench.library.configurations("matmul")
    figures: dict = {"device": bench.gpu.name, "configurations": names, "rows": []}
    for group in groups:
        weights = bench.rotation(group.case)
        numbers = dequantized(weights[0], torch.float64)
        for m in group.ms:
            figures["rows"].append(_product_row(bench, names, weights, numbers, m))
            report(tables.sweep_line(figures, figures["rows"][-1]))
            bench.gpu.release()
        del weights, numbers
        bench.gpu.release()
    return figures
