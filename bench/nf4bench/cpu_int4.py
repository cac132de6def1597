"""Products of integer weights beside NF4's on the CPU: the layouts of GPTQ, AWQ and
compressed-tensors with zero points, in turns, over weights that rotate past the caches, timed as
layers are (cpu_layers.py)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import nf4
import torch
from torch import Tensor

from nf4bench.cpu_layers import ROTATED_BYTES, TURNS, first_decile, turn
from nf4bench.errors import WrongResult
from nf4bench.int4_cases import GROUP_SIZE, LAYOUTS
from nf4bench.options import Shape
from nf4bench.product import relative_error
from nf4bench.table import Table, number, shape, text

MS = (1, 4, 16, 64)
NESTED_BLOCKSIZE = 256
MOST_ERROR = 1e-2  # of y, relative to a dense product with the dequantized weight

TABLE = Table(
    text("work", "matmul"), text("weight", "{format}"), text("shape", shape),
    number("threads", "{threads}"), number("M", "{m}"), number("ms", "{ms:.3f}"),
    number("median", "{median_ms:.3f}"), number("over NF4", "{ratio:.2f}"),
    number("of medians", "{ratio_of_medians:.2f}"),
)  # fmt: skip


def copies(one: Any, count: int) -> list[Any]:
    """Of a quantized weight, each in memory of its own."""
    parts = {name: getattr(one, name) for name in ("packed", "absmax", "scales", "zeros")
             if isinstance(getattr(one, name, None), Tensor)}  # fmt: skip
    return [
        dataclasses.replace(one, **{name: part.clone() for name, part in parts.items()})
        for _ in range(count)
    ]


def weights(at: Shape) -> dict[str, list[Any]]:
    dense = torch.randn(at, dtype=torch.bfloat16)
    count = max(2, ROTATED_BYTES // (at[0] * at[1] // 2))
    found = {"nf4": copies(nf4.quantize(dense, nested_blocksize=NESTED_BLOCKSIZE), count)}
    for layout in LAYOUTS:
        one = nf4.quantize_int4(dense, layout=layout, group_size=GROUP_SIZE, symmetric=False)
        found[layout] = copies(one, count)
    return found


def rows(at: Shape, threads: Sequence[int]) -> Iterator[dict]:
    """Raises WrongResult before anything is timed."""
    all_weights = weights(at)
    for count, m in itertools.product(threads, MS):
        x, y = torch.randn(m, at[1]).bfloat16(), torch.empty(m, at[0], dtype=torch.bfloat16)
        calls, times = {}, {}
        for name, each in all_weights.items():
            nf4.matmul(x, each[0], out=y, threads=count)
            expected = x.float() @ nf4.dequantize(each[0], "fp32").T
            error = relative_error(y, expected.double())
            if not error <= MOST_ERROR:
                raise WrongResult(f"matmul {name} {at}, M = {m}: an error of {error:.1e}")
            works = [partial(nf4.matmul, x, weight, out=y, threads=count) for weight in each]
            calls[name], times[name] = itertools.cycle(works), []
        for _ in range(TURNS):
            for name, found in times.items():
                found += turn(calls[name], count)
        least, middle = first_decile(times["nf4"]), torch.tensor(times["nf4"]).median().item()
        for name, found in times.items():
            ms, median = first_decile(found), torch.tensor(found).median().item()
            yield {
                "work": "matmul", "format": name, "shape": list(at), "threads": count, "m": m,
                "ms": round(ms, 4), "median_ms": round(median, 4),
                "ratio": round(ms / least, 3), "ratio_of_medians": round(median / middle, 3),
            }  # fmt: skip


def run(shapes: Sequence[Shape], threads: int, report: Callable[[str], None] = print) -> list[dict]:
    """All figures."""
    found = []
    for at in shapes:
        for row in rows(at, sorted({1, threads})):
            found.append(row)
            report(TABLE.line(row))
    return found
