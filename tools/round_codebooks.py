"""Rounds the formats' codebooks to 16 bits so that the errors of many weights cancel.

    round_codebooks.py

Prints the 16-bit tables of lib/core/formats.hpp and the figures of its comment. A table is a
factor, and the 16 entries of the codebook times the factor, rounded to a dtype. The tool tries
every factor 1 + i / 1024, and every way to round the entries up or down with an error of at most
half a unit of the dtype's precision. It takes the table with the smallest mean, over all
blocksizes, of

    mean square error + (64 * mean error)^2

relative to the mean square of normal weights. Errors whose mean is 0 add up with the square root of
the number of elements of a row; 64 is the square root of 4096. The factor of the tables with 1
(fp16_with_one) is 1.

Tables around one (around_one) store 1 + entry / unit: float32 numbers in [0.5, 2), of which bits 8
to 23 are stored. The tool tries every unit 2^15 / i, so that 1 stays exact, and takes the best of
those whose entries have an error of at most a sixth of half of fp16's unit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import nf4
import numpy as np

# The shortest factors come first, and the first whose cost is below NOTHING is taken.
FACTORS = sorted((1 + i / 1024 for i in range(1024)), key=lambda x: x.as_integer_ratio()[1])
NOTHING = 1e-14
NO_ERROR = 1e-10  # a mean below it is a rounding error of binary64
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
WEIGHT_OF_MEAN = 64
AROUND_ONE = 1 << 15  # over the unit of numbers from 1 to 2
FORMATS = ("nf4", "fp4")
LABELS = {"Half": "fp16", "Bf16": "bf16"}

normal_cdf = np.vectorize(lambda x: 0.5 * math.erfc(-x / math.sqrt(2)))


@dataclass(frozen=True)
class Dtype:
    """A 16-bit float: bits of the mantissa that are stored, the exponent of its least normal."""

    name: str
    numpy: np.dtype
    mantissa: int
    least_exponent: int

    @property
    def half_unit(self) -> float:
        return 2.0 ** -(self.mantissa + 1)


DTYPES = (
    Dtype("Half", np.dtype(np.float16), 10, -14),
    Dtype("Bf16", np.dtype(ml_dtypes.bfloat16), 7, -126),
)


# The tables: format, dtype, whether 1 is kept.
KINDS = [
    (name, dtype, keep_one)
    for name in FORMATS
    for dtype, keep_one in ((DTYPES[1], False), (DTYPES[0], False), (DTYPES[0], True))
]


def frequencies(codebook: np.ndarray, blocksize: int) -> np.ndarray:
    """How often normal weights in such blocks are stored as each entry of an ascending codebook."""
    absmax = np.linspace(0.005, 8, 1600)
    within = 2 * normal_cdf(absmax) - 1
    density = np.exp((blocksize - 1) * np.log(within) - absmax**2 / 2)
    density /= density.sum()
    thresholds = np.concatenate([[-1], (codebook[1:] + codebook[:-1]) / 2, [1]])
    below = normal_cdf(thresholds[:, None] * absmax)
    others = (np.diff(below, axis=0) / within) @ density
    ends = np.zeros(codebook.size)
    ends[[0, -1]] = 0.5  # a block's largest weight is one of them
    return (others * (blocksize - 1) + ends) / blocksize


def both_neighbours(values: np.ndarray, dtype: Dtype) -> tuple[np.ndarray, np.ndarray]:
    """The nearest numbers of the dtype, and the next nearest."""
    exponents = np.frexp(values)[1] - 1
    unit = 2.0 ** (np.maximum(exponents, dtype.least_exponent) - dtype.mantissa)
    low, high = np.floor(values / unit) * unit, np.ceil(values / unit) * unit
    is_low = values - low <= high - values
    return np.where(is_low, low, high), np.where(is_low, high, low)


def ways_to_round(values: np.ndarray, dtype: Dtype) -> np.ndarray:
    """[ways][16] numbers of the dtype; the first has the nearest ones."""
    near, far = both_neighbours(values, dtype)
    free = np.flatnonzero((far != near) & (abs(far - values) <= dtype.half_unit * abs(values)))
    chosen = (np.arange(1 << free.size)[:, None] >> np.arange(free.size)) & 1
    ways = np.repeat(near[None], len(chosen), axis=0)
    ways[:, free] = np.where(chosen, far[free], near[free])
    return ways


def errors(ways: np.ndarray, codebook: np.ndarray, weighted: np.ndarray) -> tuple:
    """Mean square and mean error of [ways][16] numbers by blocksize, relative to the weights."""
    square = weighted @ codebook**2
    wrong = ways - codebook
    return wrong**2 @ weighted.T / square, wrong @ weighted.T / np.sqrt(square)


def in_order(codebook: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The codes by ascending entries, these, and how often each is stored, by blocksize."""
    order = np.argsort(codebook, kind="stable")
    ascending = codebook[order].astype(np.float64)
    return order, ascending, np.array([frequencies(ascending, size) for size in BLOCKSIZES])


@functools.cache
def best_table(format_name: str, dtype: Dtype, keep_one: bool) -> tuple[float, np.ndarray]:
    """The factor, and the 16 numbers by code."""
    codebook = nf4.codebook(format_name)
    order, ascending, weighted = in_order(codebook)

    def of_factor(factor: float) -> tuple[int, float, np.ndarray]:
        ways = ways_to_round(ascending * factor, dtype)
        square, mean = errors(ways / factor, ascending, weighted)
        cost = (square + (WEIGHT_OF_MEAN * mean) ** 2).mean(axis=1)
        best = int(cost.argmin())
        return round(cost[best] / NOTHING), factor, ways[best]

    factors = [1.0] if keep_one else FACTORS
    _, factor, numbers = min((of_factor(factor) for factor in factors), key=lambda found: found[0])
    by_code = np.empty(codebook.size)
    by_code[order] = numbers
    return factor, np.copysign(by_code, codebook).astype(dtype.numpy)


@functools.cache
def best_around_one(format_name: str) -> tuple[int, np.ndarray]:
    """i of the unit 2^15 / i, and the 16 numbers in [0.5, 2) by code."""
    codebook = nf4.codebook(format_name)
    order, ascending, weighted = in_order(codebook)
    factors = np.arange(AROUND_ONE // 4 + 1, AROUND_ONE // 2 + 1) / AROUND_ONE
    exact = 1 + ascending * factors[:, None]
    unit = np.where(exact < 1, 0.5, 1) / AROUND_ONE
    numbers = np.rint(exact / unit) * unit
    values = (numbers - 1) / factors[:, None]
    most = abs(ascending) * DTYPES[0].half_unit / 6
    square, mean = errors(values, ascending, weighted)
    cost = (square + (WEIGHT_OF_MEAN * mean) ** 2).mean(axis=1)
    cost[(abs(values - ascending) > most).any(axis=1)] = math.inf
    best = int(cost.argmin())
    assert math.isfinite(cost[best]), f"no unit holds {format_name} around one"
    by_code = np.empty(codebook.size)
    by_code[order] = numbers[best]
    return round(factors[best] * AROUND_ONE), by_code


def around_one_table(format_name: str) -> str:
    """Its C++."""
    factor, numbers = best_around_one(format_name)
    bits = numbers.astype(np.float32).view(np.uint32) >> 8 & 0xFFFF
    entries = ", ".join(f"0x{entry:04x}" for entry in bits)
    return f"{{{AROUND_ONE}.0f / {factor}, {{{entries}}}}}"


def table(format_name: str, dtype: Dtype, keep_one: bool) -> str:
    """The C++ of a format in a dtype."""
    factor, numbers = best_table(format_name, dtype, keep_one)
    entries = ", ".join(f"0x{bits:04x}" for bits in numbers.view(np.uint16))
    return f"{{1 / {factor!r}f, {{{entries}}}}}"


def tables(format_name: str) -> str:
    """The end of a format's row, in C++ without line breaks."""
    tables = [table(*kind) for kind in KINDS if kind[0] == format_name]
    return ", ".join([*tables, around_one_table(format_name)])


def figures_of(format_name: str, values: np.ndarray, as_it_is: np.ndarray) -> str:
    """Of the codebook as it is in a dtype, and of a table's values by code: in blocks of 64 the
    root mean square error and the mean error, and the largest mean error for any blocksize."""
    order, ascending, weighted = in_order(nf4.codebook(format_name))
    square, mean = errors(np.stack([as_it_is[order], values[order]]), ascending, weighted)
    at_64 = BLOCKSIZES.index(64)
    return "   ".join(
        " ".join(
            f"{figure if abs(figure) > NO_ERROR else 0:8.1e}"
            for figure in (math.sqrt(square[way, at_64]), mean[way, at_64], abs(mean[way]).max())
        )
        for way in range(2)
    )


def lines_of(format_name: str) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The label, the values by code and the codebook as it is, of each table of a format."""
    codebook = nf4.codebook(format_name).astype(np.float64)
    for name, dtype, keep_one in KINDS:
        if name == format_name:
            factor, numbers = best_table(name, dtype, keep_one)
            label = LABELS[dtype.name] + (", with 1" if keep_one else "")
            yield (
                label,
                numbers.astype(np.float64) / factor,
                codebook.astype(dtype.numpy).astype(float),
            )
    factor, numbers = best_around_one(format_name)
    yield "around 1", (numbers - 1) * AROUND_ONE / factor, codebook.astype(np.float16).astype(float)


def figures() -> str:
    """The lines of the comment."""
    return "".join(
        f"//   {f'{name.upper()}, {label}':<17}  {figures_of(name, values, as_it_is)}\n"
        for name in FORMATS
        for label, values, as_it_is in lines_of(name)
    )


if __name__ == "__main__":
    print(figures(), *map(tables, FORMATS), sep="\n")
