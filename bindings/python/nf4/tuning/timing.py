"""Times calls on the GPU by CUDA graphs, so that the host's time does not count."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

_GRAPH_US = 1500.0  # of the calls of a graph, if so many copies of the weight allow
_FEWEST_CALLS = 2
_REPLAYS = 5


class Timer:
    """Times calls, and remembers how far apart the replays of a graph were."""

    def __init__(self) -> None:
        self._spreads: list[float] = []

    def microseconds(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Returns the median time of a call; each has another copy of the weight."""
        once = _elapsed(lambda: [call() for call in calls[:2]]) / 2
        count = min(len(calls), max(_FEWEST_CALLS, int(_GRAPH_US / once)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in itertools.islice(calls, count):
                call()
        graph.replay()
        times = sorted(_elapsed(graph.replay) / count for _ in range(_REPLAYS))
        self._spreads.append(times[-1] / times[0])
        return statistics.median(times)

    @property
    def spread(self) -> float:
        """The ratio of the slowest replay to the fastest that one graph in ten exceeds."""
        return float(np.quantile(self._spreads, 0.9)) if self._spreads else 1.0


def _elapsed(work: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000
