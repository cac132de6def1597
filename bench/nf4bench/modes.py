"""The programs of the bench on a GPU, by mode: what `bench.py` and tests/gpu/run.py run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nf4.tuning import api, summary
from nf4.tuning import report as reports

from nf4bench import (
    cases,
    challenge,
    distributed,
    experts,
    experts_cases,
    experts_decode,
    families,
    host,
    int4,
    int4_cases,
    matmul,
    matmul_cases,
    matmul_format,
    matmul_peers,
    models,
    models_cases,
    models_forms,
    peers,
    rows,
    sweep,
    training,
    training_cases,
    training_experts,
)  # fmt: skip
from nf4bench.device import Gpu
from nf4bench.errors import WrongResult
from nf4bench.library import Library
from nf4bench.options import Options
from nf4bench.rows import Bench, Report


def bench(options: Options) -> Bench:
    """Everything that measures. Raises LibraryMissing."""
    gpu = Gpu()
    others = ("matmul", "models", "int4", "training", "experts")  # which have their own
    names = () if options.mode.startswith(others) else options.peers
    return Bench(gpu, Library(options.build), peers.load(names, gpu.place), options.replays)


def _of(options: Options, module: Any) -> Any:
    """The cases or groups of a module that are asked for."""
    if options.shapes:
        return module.of_shapes(options.shapes)
    return module.quick() if options.quick else module.full()


def _sizes(options: Options, module: Any) -> Any:
    return options.shapes or (module.QUICK_SHAPES if options.quick else module.SHAPES)


def _matmul(made: Bench, options: Options, report: Report) -> dict:
    if options.format:
        found = matmul_format.load(made.gpu.place)
        return matmul_format.run(made, found, options.format, report)
    found, groups = matmul_peers.load(made.gpu.place), _of(options, matmul_cases)
    return matmul.run(made, found, groups, _sizes(options, matmul_cases), report)


def _matmul_sweep(made: Bench, options: Options, report: Report) -> dict:
    asked = options.shapes or options.quick
    groups = _of(options, matmul_cases) if asked else matmul_cases.swept()
    return sweep.matmul(made, [group for group in groups if group.together == 1], report)


def _int4(made: Bench, options: Options, report: Report) -> dict:
    return int4.run(made, int4.load(made.gpu.place), _of(options, int4_cases), report)


def _models(made: Bench, options: Options, report: Report) -> dict:
    limit = models_cases.QUICK_SECONDS if options.quick else models_cases.SECONDS
    found = models_forms.load(made.gpu.place)
    return models.run(made, found, _of(options, models_cases), limit, report)


def _training(made: Bench, options: Options, report: Report) -> dict:
    if options.format:
        return training_experts.run(made, options.format, report)
    found = models_forms.load(made.gpu.place)
    return training.run(made, found, _of(options, training_cases), report)


def _experts(made: Bench, options: Options, report: Report) -> dict:
    if options.format:
        peers_of = {experts_cases.DENSE: experts.Dense(made.gpu.place)}
        groups = experts_cases.of_format()
        return experts.run_format(made, peers_of, groups, options.format, report)
    groups = _of(options, experts_cases)
    return experts.run(made, experts.load(made.gpu.place), groups, experts_decode.QWEN3_MOE, report)


PROGRAMS: dict[str, Callable[[Bench, Options, Report], dict[str, Any]]] = {
    "": lambda made, options, report: rows.run(made, _of(options, cases), report),
    "sweep": lambda made, options, report: sweep.dequantize(made, _sizes(options, sweep), report),
    "challenge": lambda made, options, report: challenge.run(made, options.iterations, report),
    "call": lambda made, options, report: host.run(made, report),
    "matmul": _matmul,
    "matmul-sweep": _matmul_sweep,
    "models": _models,
    "int4": _int4,
    "training": _training,
    "experts": _experts,
}


def say(text: str) -> None:
    print(text, flush=True)


def _reported(options: Options, tell: Report) -> dict[str, Any]:
    """Returns the report. Raises WrongResult where its figures are not to be relied on."""
    made = api.write_report(options.report)
    tell("\n".join(summary.lines(made)))
    doubts = reports.doubts(made)
    if doubts:
        raise WrongResult("; ".join(doubts))
    return made


def run(options: Options, report: Report = say) -> dict[str, Any]:
    """The figures of options.mode. Raises LibraryMissing, and WrongResult before a case is
    timed."""
    if options.mode == "distributed":  # whose processes have a GPU each
        return distributed.run(report)
    if options.mode == "report":
        return _reported(options, report)
    if options.mode == "families":  # whose processes have a build each
        return families.run(options.build.parent)
    return PROGRAMS[options.mode](bench(options), options, report)
