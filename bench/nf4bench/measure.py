"""Candidates timed in turns, so that all see the same clocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

WARM_UP = 2
MIN_LAUNCHES = 16  # in one graph, so that its start is a small part of the time


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch: the median, and the first and the last decile."""

    us: float
    spread: tuple[float, float]

    def figures(self) -> dict[str, Any]:
        return {"us": round(self.us, 3), "spread": [round(each, 3) for each in self.spread]}


class Candidate(NamedTuple):
    """Who is timed, launched how, and with which of its launch variants: the fastest counts."""

    name: str
    launch: str = "plain"
    variant: int = 0


class Fastest(NamedTuple):
    variant: int
    timing: Timing


Key = TypeVar("Key", bound=Hashable)


def summary(values: Sequence[float]) -> Timing:
    """Of at least two values."""
    deciles = statistics.quantiles(values, n=10)
    return Timing(statistics.median(values), (deciles[0], deciles[-1]))


def taken(
    work: Mapping[Key, Callable[[], Any]], turns: int, warm_up: int = WARM_UP, rotate: bool = False
) -> dict[Key, list]:
    """What each of `work` returns, once a turn; the first turns warm up. rotate: another begins
    each turn."""
    values: dict[Key, list] = {key: [] for key in work}
    order = list(work)
    for turn in range(warm_up + turns):
        for key in order:
            value = work[key]()
            if turn >= warm_up:
                values[key].append(value)
        if rotate:
            order.append(order.pop(0))
    return values


def in_turns(work: Mapping[Key, Callable[[], float]], turns: int) -> dict[Key, Timing]:
    """`work` says how long it took."""
    return {key: summary(each) for key, each in taken(work, turns).items()}


def measure(
    gpu: Any, candidates: Mapping[Key, Sequence[Callable]], replays: int, eager: Sequence[Key] = ()
) -> dict[Key, Timing]:
    """Times one launch of each candidate by replays of graphs.

    A candidate is one launch for each member of a rotation. Those in `eager` are not captured,
    so that their time may be that of the host."""
    prepared = {}
    for key, launches in candidates.items():
        repeated = list(launches) * -(-MIN_LAUNCHES // len(launches))
        prepared[key] = gpu.prepare(repeated, key in eager), len(repeated)

    def once(enqueue: Callable, count: int) -> Callable[[], float]:
        return lambda: gpu.microseconds(enqueue) / count

    return in_turns({key: once(*each) for key, each in prepared.items()}, replays)


def fastest(times: Mapping[Candidate, Timing], name: str, launch: str = "plain") -> Fastest | None:
    """The best launch variant of a candidate; None if it was not timed."""
    found = [
        Fastest(candidate.variant, timing)
        for candidate, timing in times.items()
        if (candidate.name, candidate.launch) == (name, launch)
    ]
    return min(found, key=lambda each: each.timing.us, default=None)


def queued(gpu: Any, call: Callable, calls: int) -> float:
    """Host microseconds of one call, none of them waited for but the last."""
    gpu.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    ended = time.perf_counter()
    gpu.synchronize()
    return (ended - began) * 1e6 / calls
