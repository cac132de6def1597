"""Every shape of matmul's kernels, over weights and rows of x, launched as the library does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from nf4bench import matmul_tables
from nf4bench.device import Launch
from nf4bench.library import Refused
from nf4bench.matmul_cases import Group
from nf4bench.matmul_product import Product, exact, most_error, require
from nf4bench.measure import Candidate, measure
from nf4bench.peers import dequantized
from nf4bench.suite import Bench, Report
from nf4bench.weights import Weight

REPLAYS = 7  # the slow kernels take their time


def _launches(
    bench: Bench, names: Sequence[str], products: Sequence[Product], numbers: torch.Tensor
) -> tuple[dict[Candidate, list[Launch]], dict[int, str]]:
    """The kernels that do this product, checked, and why the others do not. Raises
    WrongResult."""
    launches, refused = {}, {}
    first = products[0]
    expected = exact(first.x, numbers)
    for index, name in enumerate(names):
        made = [product.forced(bench.library, index) for product in products]
        what = f"{first.weight.case}, M = {first.m}: kernel {name}"
        first.y.fill_(torch.nan)
        try:
            y = bench.gpu.run(made[0])
        except Refused as error:
            refused[index] = str(error)
        else:
            require(what, most_error(first.weight), expected, y)
            launches[Candidate("kernel", variant=index)] = made
    return launches, refused


def _row(
    bench: Bench, names: Sequence[str], weights: Sequence[Weight], numbers: torch.Tensor, m: int
) -> dict:
    """times: one for each kernel, by index; those that refused say why."""
    products = [Product(weight, m) for weight in weights]
    launches, refused = _launches(bench, names, products, numbers)
    times = measure(bench.gpu, launches, bench.replays or REPLAYS)
    best = min(timing.us for timing in times.values())
    figures: dict[int, dict] = {index: {"refused": reason} for index, reason in refused.items()}
    for candidate, timing in times.items():
        figures[candidate.variant] = timing.figures() | {"ratio": round(timing.us / best, 4)}
    case = weights[0].case
    return {
        "shape": list(case.shape),
        "dtype": case.dtype,
        "m": m,
        "chosen": products[0].chosen(bench.library, bench.gpu.stream),
        "times": [figures[index] for index in range(len(names))],
    }


def run(bench: Bench, groups: Iterable[Group], report: Report) -> dict:
    """All figures. Raises WrongResult before a product is timed."""
    names = bench.library.matmul_shapes()
    figures: dict = {"device": bench.gpu.name, "configurations": names, "rows": []}
    for group in groups:
        weights = bench.rotation(group.case)
        numbers = dequantized(weights[0], torch.float64)
        for m in group.ms:
            figures["rows"].append(_row(bench, names, weights, numbers, m))
            report(matmul_tables.sweep_line(figures, figures["rows"][-1]))
            bench.gpu.release()
        del weights, numbers
        bench.gpu.release()
    return figures
