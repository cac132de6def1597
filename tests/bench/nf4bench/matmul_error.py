"""How wrong matmul is: ours, bitsandbytes' and a dense product with the dequantized weight, each
beside the product in float64 of the unrounded weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from nf4bench import matmul_tables
from nf4bench.matmul_cases import ERROR_CLASSES, ERROR_MS, weight_case
from nf4bench.matmul_product import Product, exact, relative_error
from nf4bench.options import Shape
from nf4bench.peers import dequantized, present
from nf4bench.suite import Bench, Report
from nf4bench.weights import Weight

PEERS = ("bitsandbytes", "dense")
OUTLIERS, OUTLIER = 4, 1e3  # so many of a row are multiplied so


def _outliers(x: torch.Tensor) -> torch.Tensor:
    where = torch.randint(x.shape[1], (x.shape[0], OUTLIERS), device=x.device)
    return x.scatter(1, where, x.gather(1, where) * OUTLIER)


# How x is made from normal values, by name.
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "outliers of 1e3": _outliers,
    "mean 0.5": lambda x: x + 0.5,
}


def _errors(
    bench: Bench, product: Product, numbers: torch.Tensor, calls: Mapping[str, Callable]
) -> dict[str, float]:
    expected = exact(product.x, numbers)
    found = {"libnf4": bench.gpu.run(product.shipped)}
    for name, call in calls.items():
        found[name] = bench.gpu.run(lambda stream, call=call: call(product.x))
    return {name: float(f"{relative_error(y, expected):.3e}") for name, y in found.items()}


def _rows(
    bench: Bench, peers: Mapping[str, Any], shape: Shape, dtype: str, nested: bool
) -> list[dict]:
    weight = Weight(weight_case(shape, dtype, nested), bench.gpu.place)
    numbers = dequantized(weight, torch.float64)
    calls = {
        name: peer.prepare(weight, 0) for name, peer in present(peers).items() if name in PEERS
    }
    rows = []
    for m in ERROR_MS:
        for kind, changed in KINDS.items():
            product = Product(weight, m)
            product.x.copy_(changed(product.x))
            rows.append({
                "shape": list(shape), "dtype": dtype, "nested": nested, "x": kind, "m": m,
                "errors": _errors(bench, product, numbers, calls),
            })  # fmt: skip
    return rows


def run(
    bench: Bench, peers: Mapping[str, Any], shapes: Iterable[Shape], report: Report
) -> list[dict]:
    """The rows of the error table."""
    rows = []
    for shape in shapes:
        for dtype, nested in ERROR_CLASSES:
            made = _rows(bench, peers, shape, dtype, nested)
            for row in made:
                report(matmul_tables.error_line(row))
            rows += made
            bench.gpu.release()
    return rows
