"""Layers and products on the CPU. bitsandbytes' Linear4bit in eval mode: served by libnf4, and on
bitsandbytes' own kernels, for which it rearranges its weight where the processor has AVX512-BF16.
Integer weights beside NF4's: the layouts of GPTQ, AWQ and compressed-tensors with zero points.

Calls of layers that rotate over more than caches hold, in turns, for each dtype, with one thread
and with all. Either is timed after a pause and after calls that wake its threads up: by processor
time with one thread, else by the clock. The ratio is that of the first deciles, which other work on
the machine disturbs least.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import nf4
import torch
from torch import Tensor, nn

from nf4bench import models_forms
from nf4bench.errors import WrongResult
from nf4bench.int4_cases import GROUP_SIZE, LAYOUTS
from nf4bench.models_cases import DROP_IN
from nf4bench.models_llama import random_weight
from nf4bench.options import Shape
from nf4bench.product import relative_error
from nf4bench.table import Table, number, shape, text

DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}
MS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROTATED_BYTES = 100 << 20
TURNS, LEAD_IN, CALLS, PAUSE = 15, 3, 5, 0.01
INT4_MS, NESTED_BLOCKSIZE = (1, 4, 16, 64), 256
# The most that y may differ from that of another form, or of a dense product; relative.
MOST_ERROR = 1e-2

TABLE = Table(
    text("work", "Linear4bit"), text("dtype", "{dtype}"), text("shape", shape),
    number("threads", "{threads}"), number("M", "{m}"), number("ms", "{ms:.3f}"),
    number("ms bitsandbytes", "{theirs_ms:.3f}"), number("over bitsandbytes", "{ratio:.2f}"),
)  # fmt: skip
INT4_TABLE = Table(
    text("work", "matmul"), text("weight", "{format}"), text("shape", shape),
    number("threads", "{threads}"), number("M", "{m}"), number("ms", "{ms:.3f}"),
    number("median", "{median_ms:.3f}"), number("over NF4", "{ratio:.2f}"),
    number("of medians", "{ratio_of_medians:.2f}"),
)  # fmt: skip


def served(form: str) -> AbstractContextManager[None]:
    return models_forms.kernels_of(form) if form == DROP_IN else nullcontext()


def layers(at: Shape, dtype: torch.dtype) -> dict[str, list[nn.Module]]:
    """Of both forms, from one weight. A layer asks when it is made whether it is to rearrange."""
    weight, peer = random_weight(*at, "cpu").to(dtype), models_forms.Bitsandbytes("cpu")
    copies = max(2, ROTATED_BYTES // (at[0] * at[1] // 2))
    found = {}
    for form in (DROP_IN, "bitsandbytes"):
        with served(form):
            one = peer.linear(weight).eval()
        found[form] = [copy.deepcopy(one) for _ in range(copies)]
    return found


def turn(calls: Iterator[Callable[[], Any]], threads: int) -> list[float]:
    """Milliseconds of the calls that count."""
    now = time.thread_time if threads == 1 else time.perf_counter
    times = []
    time.sleep(PAUSE)
    for _ in range(LEAD_IN + CALLS):
        call = next(calls)
        begin = now()
        call()
        times.append((now() - begin) * 1e3)
    return times[LEAD_IN:]


def first_decile(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 10]


def in_turns(
    calls: Mapping[str, Iterator[Callable[[], Any]]], threads: int,
    around: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> dict[str, list[float]]:  # fmt: skip
    """Milliseconds of the calls of each name."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, found in times.items():
            with around(name):
                found += turn(calls[name], threads)
    return times


def require_near(what: str, y: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error. Raises WrongResult."""
    error = relative_error(y, expected.double())
    if not error <= MOST_ERROR:
        raise WrongResult(f"{what}: an error of {error:.1e}")
    return error


def _of_layers(at: Shape, dtype: torch.dtype, threads: Sequence[int]) -> Iterator[dict]:
    """Raises WrongResult before anything is timed."""
    both = layers(at, dtype)
    for count, m in itertools.product(threads, MS):
        torch.set_num_threads(count)
        x = torch.randn(m, at[1]).to(dtype)
        y = {}
        for form, each in both.items():
            with served(form):
                y[form] = [layer(x) for layer in each][0]
        error = require_near(f"Linear4bit {at}, M = {m}", y[DROP_IN], y["bitsandbytes"])
        calls = {
            form: itertools.cycle([partial(layer, x) for layer in each])
            for form, each in both.items()
        }
        ours, theirs = map(first_decile, in_turns(calls, count, served).values())
        yield {
            "work": "linear4bit", "dtype": DTYPES[dtype], "shape": list(at),
            "threads": count, "m": m,
            "ms": round(ours, 4), "theirs_ms": round(theirs, 4), "ratio": round(ours / theirs, 3),
            "error": error,
        }  # fmt: skip


def run(
    shapes: Sequence[Shape],
    threads: int,
    report: Callable[[str], None] = print,
    dtypes: Iterable[torch.dtype] = tuple(DTYPES),
) -> list[dict]:
    """All figures of layers; the number of torch's threads is `threads` afterwards."""
    counts, every = sorted({1, threads}), itertools.product(shapes, dtypes)
    with torch.no_grad():
        rows = (row for each in every for row in _of_layers(*each, counts))
        found = TABLE.told(rows, report)
    torch.set_num_threads(threads)
    return found


# ---- Integers ---------------------------------------------------------------------------


def copies(one: Any, count: int) -> list[Any]:
    """Of a quantized weight, each in memory of its own."""
    parts = {name: getattr(one, name) for name in ("packed", "absmax", "scales", "zeros")
             if isinstance(getattr(one, name, None), Tensor)}  # fmt: skip
    return [
        dataclasses.replace(one, **{name: part.clone() for name, part in parts.items()})
        for _ in range(count)
    ]


def int4_weights(at: Shape) -> dict[str, list[Any]]:
    dense = torch.randn(at, dtype=torch.bfloat16)
    count = max(2, ROTATED_BYTES // (at[0] * at[1] // 2))
    found = {"nf4": copies(nf4.quantize(dense, nested_blocksize=NESTED_BLOCKSIZE), count)}
    for layout in LAYOUTS:
        one = nf4.quantize_int4(dense, layout=layout, group_size=GROUP_SIZE, symmetric=False)
        found[layout] = copies(one, count)
    return found


def _of_int4(at: Shape, threads: Sequence[int]) -> Iterator[dict]:
    """Raises WrongResult before anything is timed."""
    all_weights = int4_weights(at)
    for count, m in itertools.product(threads, INT4_MS):
        x, y = torch.randn(m, at[1]).bfloat16(), torch.empty(m, at[0], dtype=torch.bfloat16)
        calls = {}
        for name, each in all_weights.items():
            nf4.matmul(x, each[0], out=y, threads=count)
            expected = x.float() @ nf4.dequantize(each[0], "fp32").T
            require_near(f"matmul {name} {at}, M = {m}", y, expected)
            works = [partial(nf4.matmul, x, weight, out=y, threads=count) for weight in each]
            calls[name] = itertools.cycle(works)
        times = in_turns(calls, count)
        least, middle = first_decile(times["nf4"]), statistics.median(times["nf4"])
        for name, found in times.items():
            ms, median = first_decile(found), statistics.median(found)
            yield {
                "work": "matmul", "format": name, "shape": list(at), "threads": count, "m": m,
                "ms": round(ms, 4), "median_ms": round(median, 4),
                "ratio": round(ms / least, 3), "ratio_of_medians": round(median / middle, 3),
            }  # fmt: skip


def run_int4(
    shapes: Sequence[Shape], threads: int, report: Callable[[str], None] = print
) -> list[dict]:
    """All figures of integers."""
    counts = sorted({1, threads})
    return INT4_TABLE.told((row for at in shapes for row in _of_int4(at, counts)), report)
