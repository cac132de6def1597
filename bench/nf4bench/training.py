"""A step of QLoRA as users run it: transformers, PEFT's own classes, eager, AdamW on the adapters,
with what fills it on the host and on the GPU. In four forms: dense, bitsandbytes' Linear4bit, the
same served by libnf4, and NF4Linear. The gradients are compared before anything is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nf4bench import (
    convergence,
    models_forms,
    models_steps,
    training_model,
    training_pages,
    training_products,
)
from nf4bench.measure import Timing, in_turns, queued, summary, taken
from nf4bench.models_llama import DTYPE
from nf4bench.peers import present
from nf4bench.product import require
from nf4bench.rows import Bench, Report, begin
from nf4bench.training_cases import MOST_ERROR, PRODUCTS, TURNS, WARM_UP, Group

LARGEST = 12  # so many kernels and operators of a profile are kept
LAYER, LINEAR = "base_model.model.model.layers.0.self_attn.q_proj", "torch.nn.Linear"
LAYER_CALLS, LAYER_TURNS = 50, 7


class Step:
    """One step of a model: call it, or take its parts."""

    def __init__(self, model: nn.Module, group: Group, tokens: Tensor) -> None:
        training_model.set_up(model, group)
        self.model, self.tokens = model, tokens
        self.parameters = training_model.trained(model)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=tokens.is_cuda)

    def gradients(self, stream: int = 0) -> tuple[Tensor, ...]:
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        return torch.autograd.grad(loss, self.parameters)

    def __call__(self, stream: int = 0) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        self.optimizer.step()


Steps = Mapping[str, Step]


def _checked(bench: Bench, group: Group, steps: Steps) -> dict[str, float]:
    """How far each form is from bitsandbytes. Raises WrongResult."""
    found = {}
    for form in sorted(steps, key="bitsandbytes".__ne__):
        with models_forms.kernels_of(form):
            found[form] = torch.cat(
                [each.double().view(-1) for each in bench.gpu.run(steps[form].gradients)]
            )
    expected = found.pop("bitsandbytes", None)
    if expected is None:
        return {}
    return {
        form: float(f"{require(f'{group}: {form}', MOST_ERROR, expected, each):.3e}")
        for form, each in found.items()
        if form != "dense"
    }


def timed(bench: Bench, form: str, step: Step) -> tuple[float, float]:
    """Microseconds of the GPU's stream, and of the host until all is enqueued."""
    with models_forms.kernels_of(form):
        step()  # Python is slow at functions that were just replaced
        bench.gpu.synchronize()
        began = time.perf_counter()
        host = []

        def enqueue() -> None:
            step()
            host.append((time.perf_counter() - began) * 1e6)

        return bench.gpu.microseconds(enqueue), host[0]


# ---- What fills a step -----------------------------------------------------------------


def _largest(events: Iterable[Any], microseconds: Callable[[Any], float]) -> list[list[Any]]:
    """Name, milliseconds and calls."""
    found = sorted(events, key=microseconds, reverse=True)[:LARGEST]
    return [[each.key[:100], round(microseconds(each) / 1e3, 3), each.count] for each in found]


def profile(gpu: Any, form: str, step: Step) -> dict[str, Any]:
    """Milliseconds of one step: the GPU's in all and by kernel, the host's by operator."""
    with models_forms.kernels_of(form):
        gpu.run(step)
        with torch.profiler.profile() as made:
            gpu.run(step)
    events = made.key_averages()
    kernels = [each for each in events if each.device_type == torch.autograd.DeviceType.CUDA]
    operators = [each for each in events if each.device_type == torch.autograd.DeviceType.CPU]
    return {
        "gpu_ms": round(sum(each.self_device_time_total for each in kernels) / 1e3, 2),
        "launches": sum(each.count for each in kernels),
        "kernels": _largest(kernels, lambda each: each.self_device_time_total),
        "operators": _largest(operators, lambda each: each.self_cpu_time_total),
    }


# ---- One layer -------------------------------------------------------------------------


def _through(gpu: Any, form: str, module: nn.Module, x: Tensor) -> float:
    grad_y = torch.ones_like(module(x))
    parameters = [x, *training_model.trained(module)]

    def call() -> None:
        for each in parameters:
            each.grad = None
        module(x).backward(grad_y)

    with models_forms.kernels_of(form):
        call()  # Python is slow at functions that were just replaced
        return queued(gpu, call, LAYER_CALLS)


def layer(bench: Bench, models: Mapping[str, nn.Module]) -> list[dict[str, Any]]:
    """The host overhead of forward and backward through one layer, by form and adapters' dtype."""
    modules = {form: model.get_submodule(LAYER) for form, model in models.items()}
    base = next(iter(modules.values()))
    options = {"device": bench.gpu.place, "dtype": DTYPE}
    x = torch.randn(1, 1, base.in_features, **options).requires_grad_()
    modules[LINEAR] = nn.Linear(base.in_features, base.out_features, bias=False, **options)
    found = []
    for adapters, dtype in training_model.DTYPES.items():
        for model in models.values():
            training_model.cast(model, dtype)
        work = {n: partial(_through, bench.gpu, n, each, x) for n, each in modules.items()}
        times = in_turns(work, LAYER_TURNS)
        found += [
            {
                "name": name,
                "adapters": "none" if name == LINEAR else adapters,
                "ratio": round(each.us / times[LINEAR].us, 3),
                **each.figures(),
            }
            for name, each in times.items()
        ]
    return found


# ---- A row -----------------------------------------------------------------------------


def _peaks(bench: Bench, steps: Steps) -> dict[str, int]:
    found = {}
    for form, step in steps.items():
        with models_forms.kernels_of(form):
            found[form] = bench.gpu.peak_bytes(step)
    return found


def figures_of(times: Sequence[tuple[float, float]]) -> tuple[Timing, Timing]:
    return tuple(map(summary, zip(*times, strict=True)))


def row(
    bench: Bench, group: Group, models: Mapping[str, nn.Module], tokens: Tensor, profiled: bool
) -> dict[str, Any]:
    """Raises WrongResult before anything is timed."""
    steps = {form: Step(model, group, tokens) for form, model in models.items()}
    errors, peaks = _checked(bench, group, steps), _peaks(bench, steps)
    work = {form: partial(timed, bench, form, step) for form, step in steps.items()}
    times = taken(work, bench.replays or TURNS, WARM_UP, rotate=True)
    forms = {}
    for form, each in times.items():
        whole, host = figures_of(each)
        forms[form] = {
            **whole.figures(),
            "host_us": round(host.us, 1),
            "step_bytes": peaks[form],
            "error": errors.get(form),
        }
        if profiled:
            forms[form]["profile"] = profile(bench.gpu, form, steps[form])
    return {
        "adapters": group.adapters, "checkpointing": group.checkpointing,
        "layers": group.size.layers, "tokens": list(group.tokens), "forms": forms,
    }  # fmt: skip


def run(bench: Bench, peers: Mapping[str, Any], groups: Iterable[Group], report: Report) -> dict:
    """All figures, as figures.json holds them. Raises WrongResult before a group is timed."""
    figures = begin(bench, peers, report) | {"rows": [], "versions": training_model.versions()}
    figures["products"] = training_products.rows(bench, peers, PRODUCTS, report)
    groups, place = list(groups), bench.gpu.place
    size = groups[0].size
    layers = models_steps.weights(size, tuple(size.linears()), present(peers), place)
    models = training_model.models(size, layers, training_model.ends(size, place))
    tokens = torch.randint(size.vocabulary, groups[0].tokens, device=place)
    for group in groups:
        made = row(bench, group, models, tokens, profiled=group == groups[0])
        figures["rows"].append(made)
        for table in (training_pages.STEPS, training_pages.HOST, training_pages.MEMORY):
            report(table.line(made))
        bench.gpu.release()
    figures["layer"] = training_pages.LAYER.told(layer(bench, models), report)
    losses = convergence.rows() if "bitsandbytes" in present(peers) else []
    figures["convergence"] = training_pages.CONVERGENCE.told(losses, report)
    for title, table in training_pages.profiles(figures["rows"]):
        report("\n".join([title, *table.lines()]))
    return figures
