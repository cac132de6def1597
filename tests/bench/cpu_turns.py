"""Timing on the CPU: candidates take turns, so that all see the same machine, and medians count.

A turn is a pause, in which the threads of the last candidate stop spinning (OpenMP's go on for
milliseconds), three calls untimed (one, where calls are long), in which its own wake up and its
memory enters the caches, and then those that count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

TURNS, LEAD_IN, CALLS = 5, 3, 5
PAUSE = 0.02  # seconds
LONG = 0.3  # seconds: a turn ends after as much

Work = Callable[[], Any]


def turn(work: Work) -> list[float]:
    """Milliseconds of the calls that count."""
    time.sleep(PAUSE)
    times: list[float] = []
    while len(times) < 2 or (len(times) < LEAD_IN + CALLS and sum(times) < LONG * 1e3):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return times[LEAD_IN:] or times[1:]


def summary(times: list[float]) -> dict[str, Any]:
    """The median and the outer deciles, in milliseconds."""
    deciles = statistics.quantiles(times, n=10)
    return {
        "ms": round(statistics.median(times), 4),
        "spread": [round(deciles[0], 4), round(deciles[-1], 4)],
    }


def measure(candidates: dict[str, Work]) -> dict[str, dict]:
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    for _ in range(TURNS):
        for name in order:
            times[name] += turn(candidates[name])
        order.append(order.pop(0))
    return {name: summary(values) for name, values in times.items()}
