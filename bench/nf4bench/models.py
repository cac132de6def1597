"""Whole models: LLaMA-7B's shape in three forms. Of each group every form is checked, its memory
measured, then all are timed in turns. A form that fails is left out of the row, which says why; one
that computes something else ends the bench."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from nf4bench import host, models_forms, models_steps, tables
from nf4bench.check import WrongResult
from nf4bench.measure import Timing, in_turns
from nf4bench.models_cases import DROP_IN, FORMS, MOST_ERROR, TURNS, WARM_STEPS, Group
from nf4bench.models_forms import Peer
from nf4bench.models_steps import Made, Models
from nf4bench.peers import present
from nf4bench.product import require
from nf4bench.rows import Bench, Report, begin


def reason(error: Exception) -> str:
    """The first line of what went wrong."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0].removesuffix(": ")


@dataclass
class Attempt:
    """What has come of the forms so far: memory in bytes, and why a form failed."""

    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def each(self, made: Made, work: Callable[[Any], Any]) -> dict[str, Any]:
        """work(step) of each form, without those that fail or have failed."""
        results = {}
        for form, (_, step) in made.items():
            if form in self.failed:
                continue
            try:
                with models_forms.kernels_of(form):
                    results[form] = work(step)
            except Exception as error:  # the other forms and the other rows go on
                self.failed[form] = reason(error)
        return results


def _compared(result: Any) -> torch.Tensor:
    """Everything that a step returned, as one vector in float64."""
    parts = result if isinstance(result, (tuple, list)) else [result]
    return torch.cat([part.detach().double().view(-1) for part in parts])


def _checked(bench: Bench, group: Group, made: Made, attempt: Attempt) -> float | None:
    """How far ours is from bitsandbytes; None if one of them is not there. Each has run once then,
    and is compiled. Raises WrongResult."""
    results = {form: _compared(each) for form, each in attempt.each(made, bench.gpu.run).items()}
    if not {"libnf4", "bitsandbytes"} <= results.keys():
        return None
    what = f"{group}: libnf4 beside bitsandbytes"
    error = require(what, MOST_ERROR[group.work], results["bitsandbytes"], results["libnf4"])
    return float(f"{error:.3e}")


def _timed(gpu: Any, form: str, eager: bool, enqueue: Callable[[], object]) -> float:
    with models_forms.kernels_of(form):
        if eager:
            # Steps run as in a loop: Python is slow at functions that were just replaced, and the
            # host's caches hold another form's code.
            for _ in range(WARM_STEPS):
                gpu.run(lambda stream: enqueue())
        return gpu.microseconds(enqueue)


def _times(bench: Bench, launch: str, made: Made, attempt: Attempt) -> dict[str, Timing]:
    gpu, eager = bench.gpu, launch == "eager"
    ready = attempt.each(made, lambda step: gpu.prepare([step], eager))
    work = {form: partial(_timed, gpu, form, eager, enqueue) for form, enqueue in ready.items()}
    return in_turns(work, bench.replays or TURNS)


def row(
    group: Group, launch: str, times: Mapping[str, Timing], attempt: Attempt, error: float | None
) -> dict[str, Any]:
    """Each form's time, ratio to ours, and memory."""
    forms = {}
    for form in FORMS:
        if form in times:
            figures = times[form].figures()
            if form != "libnf4" and "libnf4" in times:
                figures["ratio"] = round(times[form].us / times["libnf4"].us, 3)
            forms[form] = figures | attempt.memory[form]
    return {
        "work": group.work, "batch": group.batch, "tokens": group.tokens,
        "layers": group.size.layers, "hidden": group.size.hidden,
        "intermediate": group.size.intermediate, "compiled": group.compiled, "launch": launch,
        "error": error, "forms": forms, "failed": dict(attempt.failed),
    }  # fmt: skip


def rows_of(bench: Bench, group: Group, made: Made) -> list[dict[str, Any]]:
    """One row for each way to launch. Raises WrongResult before anything is timed."""
    attempt, rows = Attempt(), []
    error = _checked(bench, group, made, attempt)
    for form, peak in attempt.each(made, bench.gpu.peak_bytes).items():
        weights = models_forms.bytes_of(made[form][0])
        attempt.memory[form] = {"weights": weights, "step": peak}
    for launch in group.launches:
        here, times = Attempt(attempt.memory, dict(attempt.failed)), {}
        timed = {form: each for form, each in made.items() if launch == "eager" or form != DROP_IN}
        try:
            times = _times(bench, launch, timed, here)
        except Exception as problem:  # in turns, where it is nobody's in particular
            here.failed = dict.fromkeys(timed, reason(problem)) | here.failed
        rows.append(row(group, launch, times, here, error))
    return rows


def rows(bench: Bench, models: Models, peers: Mapping[str, Peer], group: Group) -> list[dict]:
    """Those of a group; where all of it fails, one that says why. Raises WrongResult."""
    try:
        run = models_steps.runner(group.compiled)
        if group.work == "mlp":
            return rows_of(bench, group, models_steps.mlp(group, peers, run, bench.gpu.place))
        work = models.training if group.work == "training" else models.inference
        return rows_of(bench, group, work(group, run))
    except WrongResult:
        raise
    except Exception as error:  # the other groups go on
        failed = dict.fromkeys(models.forms, reason(error))
    return [row(group, each, {}, Attempt(failed=failed), None) for each in group.launches]


def run(
    bench: Bench, peers: Mapping[str, Any], groups: Iterable[Group], limit: float, report: Report
) -> dict:
    """All figures, as figures.json holds them. No group begins after `limit` seconds; those are
    named in "left_out". Raises WrongResult before a group is timed."""
    began = time.monotonic()

    def seconds() -> float:
        return round(time.monotonic() - began, 1)

    usable, groups = present(peers), list(groups)
    largest = max((g.size for g in groups if g.work != "mlp"), key=lambda size: size.layers)
    figures = begin(bench, peers, report) | {"rows": [], "left_out": []}
    models = Models(largest, usable, bench.gpu.place)
    bench.gpu.synchronize()
    figures["build_seconds"] = seconds()
    report(f"weights of {largest.layers} layers in {seconds()} s")
    for group in groups:
        if seconds() >= limit:
            figures["left_out"].append(str(group))
            report(f"left out, as {limit:g} s were over: {group}")
            continue
        for each in rows(bench, models, usable, group):
            figures["rows"].append(each)
            report(tables.MODELS.line(each))
            for form, why in each["failed"].items():
                report(f"{form} failed: {why}")
        bench.gpu.release()
    figures["call"] = host.layer(bench, models.forms)
    for line in tables.layer_calls(figures["call"]).lines():
        report(line)
    figures["seconds"] = seconds()
    report(f"{figures['seconds']} s in all")
    return figures
