"""bitsandbytes' Linear4bit in eval mode on the CPU: served by libnf4, and on bitsandbytes' own
kernels, for which it rearranges its weight where the processor has AVX512-BF16.

Calls of layers that rotate over more than caches hold, in turns, for each dtype, with one thread
and with all. Either is timed after a pause and after calls that wake its threads up: by processor
time with one thread, else by the clock. The ratio is that of the first deciles, which other work on
the machine disturbs least.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from nf4bench import models_forms
from nf4bench.errors import WrongResult
from nf4bench.models_cases import DROP_IN
from nf4bench.models_llama import random_weight
from nf4bench.options import Shape
from nf4bench.product import relative_error
from nf4bench.table import Table, number, shape, text

DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}
MS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROTATED_BYTES = 100 << 20
TURNS, LEAD_IN, CALLS, PAUSE = 15, 3, 5, 0.01
MOST_ERROR = 1e-2  # of one form's y, relative to the other's

TABLE = Table(
    text("work", "Linear4bit"), text("dtype", "{dtype}"), text("shape", shape),
    number("threads", "{threads}"), number("M", "{m}"), number("ms", "{ms:.3f}"),
    number("ms bitsandbytes", "{theirs_ms:.3f}"), number("over bitsandbytes", "{ratio:.2f}"),
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


def rows(at: Shape, dtype: torch.dtype, threads: Sequence[int]) -> Iterator[dict]:
    """Raises WrongResult before anything is timed."""
    both = layers(at, dtype)
    for count, m in itertools.product(threads, MS):
        torch.set_num_threads(count)
        x = torch.randn(m, at[1]).to(dtype)
        y = {}
        for form, each in both.items():
            with served(form):
                y[form] = [layer(x) for layer in each][0]
        error = relative_error(y[DROP_IN], y["bitsandbytes"].double())
        if not error <= MOST_ERROR:
            raise WrongResult(f"Linear4bit {at}, M = {m}: the forms differ by {error:.1e}")
        calls = {
            form: itertools.cycle([partial(layer, x) for layer in each])
            for form, each in both.items()
        }
        times: dict[str, list[float]] = {form: [] for form in both}
        for _ in range(TURNS):
            for form, found in times.items():
                with served(form):
                    found += turn(calls[form], count)
        ours, theirs = map(first_decile, times.values())
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
    """All figures; the number of torch's threads is `threads` afterwards."""
    found = []
    with torch.no_grad():
        for at, dtype in itertools.product(shapes, dtypes):
            for row in rows(at, dtype, sorted({1, threads})):
                found.append(row)
                report(TABLE.line(row))
    torch.set_num_threads(threads)
    return found
