"""The programs of the bench on a GPU, by mode: what `bench.py` and the GPU record run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nf4bench import call, cases, challenge, peers, suite, sweep
from nf4bench.device import Gpu
from nf4bench.library import Library
from nf4bench.options import Options
from nf4bench.suite import Bench, Report


def bench(options: Options) -> Bench:
    """Everything that measures. Raises LibraryMissing."""
    gpu = Gpu()
    return Bench(gpu, Library(options.build), peers.load(options.peers, gpu.place), options.replays)


def _rows(made: Bench, options: Options, report: Report) -> dict:
    if options.shapes:
        chosen = cases.of_shapes(options.shapes)
    else:
        chosen = cases.quick() if options.quick else cases.full()
    return suite.run(made, chosen, report)


def _sweep(made: Bench, options: Options, report: Report) -> dict:
    shapes = sweep.QUICK_SHAPES if options.quick else sweep.SHAPES
    return sweep.run(made, options.shapes or shapes, report)


PROGRAMS: dict[str, Callable[[Bench, Options, Report], dict[str, Any]]] = {
    "": _rows,
    "sweep": _sweep,
    "challenge": lambda made, options, report: challenge.run(made, options.iterations, report),
    "call": lambda made, options, report: call.run(made, report),
}


def _say(text: str) -> None:
    print(text, flush=True)


def run(options: Options, report: Report = _say) -> dict[str, Any]:
    """The figures of options.mode. Raises LibraryMissing, and WrongResult before a case is
    timed."""
    return PROGRAMS[options.mode](bench(options), options, report)
