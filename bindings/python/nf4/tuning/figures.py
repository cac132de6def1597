"""Figures of products for a report: every strategy beside bitsandbytes and a dense weight, with the
errors of the strategies."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from nf4._dequantize import dequantize
from nf4.tuning import report
from nf4.tuning.peers import BITSANDBYTES, CUBLAS, Bitsandbytes, Dense
from nf4.tuning.products import DTYPES, SCALE, Product, Weights
from nf4.tuning.result import Figure
from nf4.tuning.tune import Tuner, kinds, of_kind

# The first is typical. The second is a large weight, to which libnf4's rules give more rows of x.
SHAPES = ((4096, 4096), (14336, 4096))
ROWS = (1, 4, 8, 16, 17, 32, 64, 128, 256, 1024, 4096)
CHECKED_ROWS = 16  # of each y


def steps() -> int:
    """Returns how often `advance` of the tuner is called."""
    products = sum(len(of_kind(kind)) for kind in kinds())
    return len(SHAPES) * products * len(DTYPES) * len(ROWS)


class _Errors:
    """The relative errors of y by strategy: ||y - exact|| / ||exact|| of some rows, where the exact
    product is that of the dequantized weight in float64."""

    def __init__(
        self, exact: Tensor, product: Product, weights: Weights, dtype: str, m: int
    ) -> None:
        x, self._y = weights.x_and_y(product, dtype, m)
        count = min(m, CHECKED_ROWS)
        self._rows = torch.linspace(0, m - 1, count, device=weights.device).long()
        x = x[self._rows].double()
        self._exact = x @ (exact if product.gradient else exact.T)
        if product.rank:
            *_, a, b = (each.double() for each in weights.operands(dtype))
            through = x @ b @ a if product.gradient else x @ a.T @ b.T
            self._exact += SCALE * through
        self.of: dict[str, float] = {}

    def add(self, strategy: str) -> None:
        error = (self._y[self._rows].double() - self._exact).norm() / self._exact.norm()
        self.of[strategy] = float(error.nan_to_num(report.NO_NUMBER, report.NO_NUMBER))


class Figures:
    """Measures them. `rows` are the costs that were fitted."""

    def __init__(
        self, tuner: Tuner, rows: Sequence[str], bitsandbytes: Bitsandbytes | None
    ) -> None:
        self._tuner, self._rows, self._bitsandbytes = tuner, rows, bitsandbytes

    def measured(self) -> list[Figure]:
        found = []
        for shape, kind in itertools.product(SHAPES, kinds()):
            weights = Weights(kind, shape, self._tuner.device, ROWS[-1])
            exact = dequantize(weights.copies[0], dtype="fp32").double()
            for dtype in DTYPES:
                for product in of_kind(kind):
                    found += self._of(product, dtype, weights, exact)
        return found

    def _of(self, product: Product, dtype: str, weights: Weights, exact: Tensor) -> list[Figure]:
        tuner, found = self._tuner, []
        dense = Dense(weights, dtype)
        for m in ROWS:
            tuner.advance(f"figures {product.name}")
            errors = _Errors(exact, product, weights, dtype, m)
            us = tuner.times(product, dtype, weights, m, timed=errors.add)
            ways = {"before": (), "after": self._rows}
            given = (product, dtype, weights, m)
            chosen = {when: tuner.chosen(*given, rows, us) for when, rows in ways.items()}
            fused = {when: tuner.is_fused(*given, rows) for when, rows in ways.items()}
            peers = self._peers(*given, dense)
            of = (product.name, dtype, weights.shape, m)
            found.append(Figure(*of, us, **chosen, peers=peers, fused=fused, errors=errors.of))
        return found

    def _peers(
        self, product: Product, dtype: str, weights: Weights, m: int, dense: Dense
    ) -> dict[str, float]:
        calls = {CUBLAS: dense.calls(product, m)}
        if self._bitsandbytes is not None:
            calls[BITSANDBYTES] = self._bitsandbytes.calls(product, weights, dtype, m)
        timed = self._tuner.timer.microseconds
        return {name: timed(each) for name, each in calls.items() if each}
