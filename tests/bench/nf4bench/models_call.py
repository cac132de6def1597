"""What one eager call of a linear layer costs the host in decoding, nothing waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nf4bench import call as calls
from nf4bench.measure import in_turns
from nf4bench.models_llama import DTYPE, Linears
from nf4bench.models_rows import Attempt
from nf4bench.suite import Bench

LAYER = "q_proj"


def _once(bench: Bench, module: torch.nn.Module, x: torch.Tensor) -> Callable[[], float]:
    @torch.no_grad()
    def measured() -> float:
        return calls.queued(bench.gpu, lambda: module(x))

    return measured


def run(bench: Bench, layers: dict[str, list[Linears]]) -> dict[str, Any]:
    """Microseconds of the host for one row of x, by form, and their ratio to ours."""
    modules = {form: each[0][LAYER] for form, each in layers.items()}
    ours = modules["libnf4"]
    x = torch.randn(1, 1, ours.in_features, dtype=DTYPE, device=bench.gpu.place)
    work, attempt = {form: _once(bench, each, x) for form, each in modules.items()}, Attempt()
    usable = attempt.each(work)
    times = in_turns({form: work[form] for form in usable}, calls.HOST_TURNS)
    forms = {form: each.figures() for form, each in times.items()}
    for form, figures in forms.items():
        if form != "libnf4" and "libnf4" in times:
            figures["ratio"] = round(times[form].us / times["libnf4"].us, 3)
    return {
        "shape": [ours.out_features, ours.in_features], "forms": forms, "failed": attempt.failed,
    }  # fmt: skip
