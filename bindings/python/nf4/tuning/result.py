"""What nf4.tune found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nf4.info import Device


@dataclass(frozen=True)
class Check:
    """A product that was not fitted. `us` has the time of every strategy. `before` and `after` are
    the times of what the library chose without and with the costs."""

    product: str
    dtype: str
    shape: tuple[int, int]
    m: int
    us: dict[str, float]
    before: float
    after: float

    @property
    def best(self) -> float:
        return min(self.before, self.after, *self.us.values())


def over_best(checks: Sequence[Check], which: str) -> tuple[float, float]:
    """Returns the mean and the most by which the time "before" or "after" is over that of the best
    strategy: (1.0, 1.0) if it is always the best."""
    ratios = [getattr(check, which) / check.best for check in checks]
    return (float(np.mean(ratios)), max(ratios)) if ratios else (1.0, 1.0)


@dataclass(frozen=True)
class Figure(Check):
    """A product of a report.

    peers   the times of bitsandbytes and of a product with a dense weight, where there are any
    fused   whether libnf4's kernel runs, "before" and "after"
    errors  the relative errors of y by strategy
    """

    peers: dict[str, float]
    fused: dict[str, bool]
    errors: dict[str, float]


@dataclass(frozen=True)
class Tuning:
    """What nf4.tune found.

    seconds   that it took
    spread    how far apart times of the same work were: a ratio that one graph in ten exceeds
    products  those that have costs
    checks    products that were not fitted, timed with and without the costs
    costs     the text of nf4_set_costs
    path      the file of costs; None if nothing was stored, and then `reason` says why
    """

    gpu: Device
    seconds: float
    spread: float
    products: list[str]
    checks: list[Check]
    costs: str
    path: Path | None = None
    reason: str = ""

    def over_best(self, which: str) -> tuple[float, float]:
        return over_best(self.checks, which)
