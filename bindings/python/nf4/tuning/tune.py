"""nf4.tune: times, fits, checks and stores."""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from nf4 import _costs
from nf4._load import library
from nf4.errors import Error
from nf4.info import Device, version
from nf4.tuning import fit
from nf4.tuning.fit import Key, Times
from nf4.tuning.products import DENSE, DTYPES, PRODUCTS, STRATEGIES, Product, Weights, is_dense
from nf4.tuning.result import Check, Tuning
from nf4.tuning.timing import Timer

SHAPES = (
    (4096, 4096), (1024, 1024), (1024, 4096), (4096, 1024), (2048, 5632), (5632, 2048),
    (1280, 8192), (11008, 4096), (4096, 11008), (8192, 8192),
)  # fmt: skip
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
CHECKED_SHAPES = (
    (2048, 2048), (3072, 3072), (5120, 5120), (14336, 4096), (2560, 9728), (1536, 8960),
)  # fmt: skip
CHECKED_ROWS = (2, 5, 12, 24, 48, 80, 100, 200, 384, 700, 1536)
CHECKS_OF_A_WEIGHT = 4

# A strategy this many times as slow as another for the first shape is not timed for others.
HOPELESS = 3.0
# Replays of a graph that differ by this ratio, in one of ten, are of a GPU in other use.
WIDEST_SPREAD = 1.25
# A product keeps its costs unless they make the checked products slower by this ratio.
SLOWER = 1.01

Advance = Callable[[str], None]


@contextmanager
def costs_of(line: str, rows: Sequence[str]) -> Iterator[None]:
    """Sets costs for this GPU alone, and the user's afterwards."""
    refused = _costs.set_costs(library(), _costs.text_of(line, rows, version()))
    if refused:
        raise Error(f"nf4_set_costs: {refused}")
    try:
        yield
    finally:
        _costs.load(library())


class Tuner:
    """Times products on one GPU."""

    def __init__(self, gpu: Device, advance: Advance) -> None:
        self.line, self.gpu, self.advance = _costs.gpu_line(gpu), gpu, advance
        self.device, self.timer = torch.device("cuda", gpu.index), Timer()
        self._hopeless: set[Key] = set()

    def warm_up(self) -> None:
        """Works until the clocks of the GPU have risen."""
        weights, until = Weights("nf4", SHAPES[0], self.device, ROWS[-1]), time.monotonic() + 1
        while time.monotonic() < until:
            for way in weights.calls(PRODUCTS[0], "fp16", ROWS[-1]):
                way[0]()
            torch.cuda.synchronize()

    def _runs(
        self, product: Product, dtype: str, strategy: str, weights: Weights, m: int
    ) -> list[str]:
        """Returns rows of costs by which the library runs the strategy; none if it cannot."""
        key = f"{product.name} {dtype}"
        for dense in (0, 2):
            rows = [f"{key} {strategy} 1 1 0 0 0", f"{key} {DENSE} 1 {dense} 0 0 0"]
            if self.is_fused(product, dtype, weights, m, rows) != (dense != 0):
                return []
        return rows

    def times(
        self,
        product: Product,
        dtype: str,
        weights: Weights,
        m: int,
        *,
        first: bool = False,
        timed: Callable[[str], None] = lambda strategy: None,
    ) -> dict[str, float]:
        """Returns the times of the strategies. `first` gives up those that are too slow. `timed` is
        called after each, when y is its result."""
        fused, dense = weights.calls(product, dtype, m)
        found = {DENSE: self.timer.microseconds(dense)}
        timed(DENSE)
        for strategy in STRATEGIES:
            if Key(product.name, dtype, strategy, m) in self._hopeless:
                continue
            rows = self._runs(product, dtype, strategy, weights, m)
            if not rows:
                continue
            with costs_of(self.line, rows):
                found[strategy] = self.timer.microseconds(fused)
            timed(strategy)
        best = min(found.values())
        for strategy, us in found.items():
            if first and us > HOPELESS * best and strategy != DENSE:
                self._hopeless.add(Key(product.name, dtype, strategy, m))
        return found

    def measured(self) -> dict[Key, dict[tuple[int, int], float]]:
        """Returns the times that costs are fitted to."""
        found: dict[Key, dict[tuple[int, int], float]] = defaultdict(dict)
        for shape, kind in itertools.product(SHAPES, kinds()):
            weights = Weights(kind, shape, self.device, ROWS[-1])
            for product, dtype, m in itertools.product(of_kind(kind), DTYPES, ROWS):
                self.advance(f"{product.name} {dtype}")
                times = self.times(product, dtype, weights, m, first=shape == SHAPES[0])
                for strategy, us in times.items():
                    found[Key(product.name, dtype, strategy, m)][shape] = us
        return found

    def checked(self, rows: Sequence[str]) -> list[Check]:
        """Times products that were not fitted, with and without costs."""
        choose, checks = random.Random(50), []
        for shape, kind in itertools.product(CHECKED_SHAPES, kinds()):
            weights = Weights(kind, shape, self.device, CHECKED_ROWS[-1])
            points = [
                (product, choose.choice(list(DTYPES)), m)
                for product, m in zip(
                    itertools.cycle(of_kind(kind)),
                    choose.sample(CHECKED_ROWS, CHECKS_OF_A_WEIGHT),
                    strict=False,
                )
            ]
            for product, dtype, m in points:
                self.advance(f"checks {product.name}")
                us = self.times(product, dtype, weights, m)
                before = self.chosen(product, dtype, weights, m, [], us)
                after = self.chosen(product, dtype, weights, m, rows, us)
                checks.append(Check(product.name, dtype, shape, m, us, before, after))
        return checks

    def chosen(
        self,
        product: Product,
        dtype: str,
        weights: Weights,
        m: int,
        rows: Sequence[str],
        us: dict[str, float],
    ) -> float:
        """Returns the time of what the library chooses with these costs."""
        if not self.is_fused(product, dtype, weights, m, rows):
            return us[DENSE]
        with costs_of(self.line, rows):
            return self.timer.microseconds(weights.calls(product, dtype, m)[0])

    def is_fused(
        self, product: Product, dtype: str, weights: Weights, m: int, rows: Sequence[str]
    ) -> bool:
        """Tells if the library's own kernel would run with these costs."""
        with costs_of(self.line, rows):
            return not is_dense(product, weights.copies[0], dtype, m, self.gpu.index)


def kinds() -> list[str]:
    return list(dict.fromkeys(product.kind for product in PRODUCTS))


def of_kind(kind: str) -> list[Product]:
    return [product for product in PRODUCTS if product.kind == kind]


def steps() -> int:
    """Returns how often `advance` is called."""
    count = len(kinds())
    return len(SHAPES) * len(PRODUCTS) * len(DTYPES) * len(ROWS) + (
        len(CHECKED_SHAPES) * count * CHECKS_OF_A_WEIGHT
    )


def _slower(checks: Sequence[Check]) -> set[str]:
    """Returns the products that the costs make slower."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for check in checks:
        ratios[check.product].append(np.log(check.after / check.before))
    return {name for name, each in ratios.items() if np.mean(each) > np.log(SLOWER)}


def tuned(tuner: Tuner) -> tuple[Tuning, Times]:
    """Returns what was found, and the times that the costs are fitted to."""
    began = time.monotonic()
    with torch.cuda.device(tuner.gpu.index), torch.no_grad():
        tuner.warm_up()
        times = tuner.measured()
        rows = fit.rows_of(times)
        checks = tuner.checked(rows)
    kept = fit.without(rows, _slower(checks))
    products = list(dict.fromkeys(map(fit.product_of, kept)))
    seconds, spread = time.monotonic() - began, tuner.timer.spread
    text = _costs.text_of(tuner.line, kept, version())
    return Tuning(tuner.gpu, seconds, spread, products, checks, text), times


def measure(gpu: Device, advance: Advance) -> Tuning:
    """Returns what was found."""
    return tuned(Tuner(gpu, advance))[0]
