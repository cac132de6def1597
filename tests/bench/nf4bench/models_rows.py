"""The rows of a group: every form checked, its memory measured, then all timed in turns. A form
that fails is left out of the row, which says why; one that computes something else ends the
bench."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nf4bench import models_forms
from nf4bench.check import WrongResult
from nf4bench.matmul_product import require
from nf4bench.measure import Timing, in_turns
from nf4bench.models_cases import FORMS, MOST_ERROR, TURNS, Group
from nf4bench.models_steps import Made
from nf4bench.suite import Bench

Row = dict[str, Any]


def reason(error: Exception) -> str:
    """The first line of what went wrong."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass
class Attempt:
    """What has come of the forms so far: memory in bytes, and why a form failed."""

    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def each(self, work: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """What the forms' work gives, without those that fail or have failed."""
        results = {}
        for form, one in work.items():
            if form in self.failed:
                continue
            try:
                results[form] = one()
            except WrongResult:
                raise
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
    steps = {form: lambda s=step: bench.gpu.run(s) for form, (_, step) in made.items()}
    results = {form: _compared(each) for form, each in attempt.each(steps).items()}
    if not {"libnf4", "bitsandbytes"} <= results.keys():
        return None
    what = f"{group}: libnf4 beside bitsandbytes"
    return require(what, MOST_ERROR[group.work], results["bitsandbytes"], results["libnf4"])


def _measured_memory(bench: Bench, made: Made, attempt: Attempt) -> None:
    """Of the weights, and the most that a step takes beside all that is there."""
    steps = {form: lambda s=step: bench.gpu.peak_bytes(s) for form, (_, step) in made.items()}
    for form, peak in attempt.each(steps).items():
        weights = models_forms.bytes_of(made[form][0])
        attempt.memory[form] = {"weights": weights, "step": peak}


def _times(bench: Bench, launch: str, made: Made, attempt: Attempt) -> dict[str, Timing]:
    eager = launch == "eager"
    ready = attempt.each({
        form: lambda s=step: bench.gpu.prepare([s], eager) for form, (_, step) in made.items()
    })  # fmt: skip
    work = {form: lambda e=enqueue: bench.gpu.microseconds(e) for form, enqueue in ready.items()}
    return in_turns(work, bench.replays or TURNS)


def row(
    group: Group, launch: str, times: Mapping[str, Timing], attempt: Attempt, error: float | None
) -> Row:
    """Each form's time, ratio to ours, and memory."""
    forms = {}
    for form in FORMS:
        if form in times:
            figures = times[form].figures()
            if form != "libnf4" and "libnf4" in times:
                figures["ratio"] = round(times[form].us / times["libnf4"].us, 3)
            forms[form] = figures | attempt.memory[form]
    rounded = None if error is None else float(f"{error:.3e}")
    return {
        "work": group.work, "batch": group.batch, "tokens": group.tokens,
        "layers": group.size.layers, "hidden": group.size.hidden,
        "intermediate": group.size.intermediate, "compiled": group.compiled, "launch": launch,
        "error": rounded, "forms": forms, "failed": dict(attempt.failed),
    }  # fmt: skip


def rows_of(bench: Bench, group: Group, made: Made) -> list[Row]:
    """One row for each way to launch. Raises WrongResult before anything is timed."""
    attempt = Attempt()
    error = _checked(bench, group, made, attempt)
    _measured_memory(bench, made, attempt)
    rows = []
    for launch in group.launches:
        here, times = Attempt(attempt.memory, dict(attempt.failed)), {}
        try:
            times = _times(bench, launch, made, here)
        except Exception as problem:  # in turns, where it is nobody's in particular
            here.failed = dict.fromkeys(made, reason(problem)) | here.failed
        rows.append(row(group, launch, times, here, error))
    return rows
