"""The figures of whole models: LLaMA-7B's shape in three forms, beside each other."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nf4bench import models_call, models_rows, models_steps, models_tables
from nf4bench.check import WrongResult
from nf4bench.models_cases import Group
from nf4bench.models_forms import Peer
from nf4bench.models_rows import Attempt
from nf4bench.models_steps import Made, Models
from nf4bench.peers import described, present
from nf4bench.suite import Bench, Report


class Clock:
    """Seconds since it was made, for what must end in time."""

    def __init__(self, limit: float) -> None:
        self._began, self.limit = time.monotonic(), limit

    def seconds(self) -> float:
        return round(time.monotonic() - self._began, 1)

    def over(self) -> bool:
        return self.seconds() >= self.limit


def _made(bench: Bench, models: Models, peers: Mapping[str, Peer], group: Group) -> Made:
    run = models_steps.runner(group.compiled)
    if group.work == "mlp":
        return models_steps.mlp(group, peers, run, bench.gpu.place)
    work = models.training if group.work == "training" else models.inference
    return work(group, run)


def _rows(bench: Bench, models: Models, peers: Mapping[str, Peer], group: Group) -> list[dict]:
    """Those of a group; where all of it fails, one that says why. Raises WrongResult."""
    try:
        return models_rows.rows_of(bench, group, _made(bench, models, peers, group))
    except WrongResult:
        raise
    except Exception as error:  # the other groups go on
        failed = dict.fromkeys(models.weights.forms, models_rows.reason(error))
    return [
        models_rows.row(group, each, {}, Attempt(failed=failed), None) for each in group.launches
    ]


def run(
    bench: Bench, peers: Mapping[str, Any], groups: Iterable[Group], limit: float, report: Report
) -> dict:
    """All figures, as the record holds them. No group begins after `limit` seconds; those are named
    in "left_out". Raises WrongResult before a group is timed."""
    clock = Clock(limit)
    torch.manual_seed(0)
    usable, groups = present(peers), list(groups)
    largest = max((g.size for g in groups if g.work != "mlp"), key=lambda size: size.layers)
    figures: dict[str, Any] = {
        "device": bench.gpu.name,
        "torch": torch.__version__,
        "peers": described(peers),
        "rows": [],
        "left_out": [],
    }
    for name, each in figures["peers"].items():
        report(f"{name}: {each.get('version') or 'missing: ' + each['missing']}")
    models = Models(largest, usable, bench.gpu.place)
    bench.gpu.synchronize()
    figures["build_seconds"] = clock.seconds()
    report(f"weights of {largest.layers} layers in {clock.seconds()} s")
    for group in groups:
        if clock.over():
            figures["left_out"].append(str(group))
            continue
        for row in _rows(bench, models, usable, group):
            figures["rows"].append(row)
            report(models_tables.line(row))
        bench.gpu.release()
    figures["call"] = models_call.run(bench, models.weights.forms)
    report(models_tables.call_text(figures["call"]))
    for group in figures["left_out"]:
        report(f"left out, as {limit:g} s were over: {group}")
    figures["seconds"] = clock.seconds()
    report(f"{figures['seconds']} s in all")
    return figures
