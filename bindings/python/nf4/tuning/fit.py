"""Fits rows of costs to times."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from nf4.tuning.products import DENSE, DTYPES, PRODUCTS, STRATEGIES, Shape

_FEWEST_SHAPES = 4  # as many as a row has figures


class Key(NamedTuple):
    """What a row of costs is of: a product, a dtype and a strategy, and the rows of x."""

    product: str
    dtype: str
    strategy: str
    m: int


Times = Mapping[Key, Mapping[Shape, float]]


def fitted(times: Mapping[Shape, float]) -> np.ndarray:
    """Returns the figures of a row, none of them negative, with the least sum of squares of
    relative errors: start, and for 10^6 weights, 10^3 rows and 10^3 columns."""
    shapes, us = np.array(list(times), float) / 1e3, np.array(list(times.values()))
    features = np.stack([np.ones(len(us)), shapes[:, 0] * shapes[:, 1], *shapes.T], axis=1)
    relative = features / us[:, None]
    best, least = np.zeros(4), np.inf
    for count in range(1, 5):
        for columns in map(list, itertools.combinations(range(4), count)):
            found, *_ = np.linalg.lstsq(relative[:, columns], np.ones(len(us)), rcond=None)
            error = float(np.sum((relative[:, columns] @ found - 1) ** 2))
            if found.min() >= 0 and error < least:
                best, least = np.zeros(4), error
                best[columns] = found
    return best


def _order(key: Key) -> tuple[int, int, int, int]:
    products, dtypes = [product.name for product in PRODUCTS], list(DTYPES)
    strategy = (*STRATEGIES, DENSE).index(key.strategy)
    return products.index(key.product), dtypes.index(key.dtype), strategy, key.m


def rows_of(times: Times) -> list[str]:
    """Returns the rows of a text of costs."""
    used = [key for key, of_shapes in times.items() if len(of_shapes) >= _FEWEST_SHAPES]
    rows = []
    for key in sorted(used, key=_order):
        figures = " ".join(_decimal(each) for each in fitted(times[key]))
        rows.append(f"{' '.join(map(str, key))} {figures}")
    return rows


def _decimal(value: float) -> str:
    """Returns four digits of a decimal fraction, without an exponent."""
    return np.format_float_positional(round(value, 6), precision=4, fractional=False, trim="-")


def product_of(row: str) -> str:
    return row.split(" ", 1)[0]


def without(rows: Sequence[str], products: set[str]) -> list[str]:
    return [row for row in rows if product_of(row) not in products]
