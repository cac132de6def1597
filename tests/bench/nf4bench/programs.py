"""The programs of the bench on a GPU, by mode: what `bench.py` and the GPU record run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nf4bench import (
    call,
    cases,
    challenge,
    matmul,
    matmul_cases,
    matmul_peers,
    matmul_sweep,
    models,
    models_cases,
    models_forms,
    peers,
    suite,
    sweep,
)  # fmt: skip
from nf4bench.device import Gpu
from nf4bench.library import Library
from nf4bench.options import Options
from nf4bench.suite import Bench, Report


def bench(options: Options) -> Bench:
    """Everything that measures. Raises LibraryMissing."""
    gpu = Gpu()
    # Those of matmul and of models are others.
    names = () if options.mode.startswith(("matmul", "models")) else options.peers
    return Bench(gpu, Library(options.build), peers.load(names, gpu.place), options.replays)


def _rows(made: Bench, options: Options, report: Report) -> dict:
    if options.shapes:
        chosen = cases.of_shapes(options.shapes)
    else:
        chosen = cases.quick() if options.quick else cases.full()
    return suite.run(made, chosen, report)


def _sweep(made: Bench, options: Options, report: Report) -> dict:
    shapes = sweep.QUICK_SHAPES if options.quick else sweep.SHAPES
    return sweep.run(made, options.shapes or shapes, report)


def _groups(options: Options) -> list[matmul_cases.Group]:
    if options.shapes:
        return matmul_cases.of_shapes(options.shapes)
    return matmul_cases.quick() if options.quick else matmul_cases.full()


def _matmul(made: Bench, options: Options, report: Report) -> dict:
    usual = matmul_cases.QUICK_SHAPES if options.quick else matmul_cases.SHAPES
    found = matmul_peers.load(made.gpu.place)
    return matmul.run(made, found, _groups(options), options.shapes or usual, report)


def _matmul_sweep(made: Bench, options: Options, report: Report) -> dict:
    groups = [group for group in _groups(options) if group.together == 1]
    return matmul_sweep.run(made, groups, report)


def _models(made: Bench, options: Options, report: Report) -> dict:
    groups = models_cases.quick() if options.quick else models_cases.full()
    limit = models_cases.QUICK_SECONDS if options.quick else models_cases.SECONDS
    return models.run(made, models_forms.load(made.gpu.place), groups, limit, report)


PROGRAMS: dict[str, Callable[[Bench, Options, Report], dict[str, Any]]] = {
    "": _rows,
    "sweep": _sweep,
    "challenge": lambda made, options, report: challenge.run(made, options.iterations, report),
    "call": lambda made, options, report: call.run(made, report),
    "matmul": _matmul,
    "matmul-sweep": _matmul_sweep,
    "models": _models,
}


def _say(text: str) -> None:
    print(text, flush=True)


def run(options: Options, report: Report = _say) -> dict[str, Any]:
    """The figures of options.mode. Raises LibraryMissing, and WrongResult before a case is
    timed."""
    return PROGRAMS[options.mode](bench(options), options, report)
