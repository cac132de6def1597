"""Times eager products on a build of one family, in turns: layers of bitsandbytes, the same served
by libnf4, NF4Linear, Int4Linear, and what libnf4 must not be slower than; and a stack of experts.
Times are those of calls one after the other, so that host overhead counts where it is longer;
weights and x rotate past the caches. y is compared with float64 first."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import nf4.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from nf4bench import families_cases as cases
from nf4bench import models_forms
from nf4bench.experts_weights import DTYPE, Operands, Routing, Stack
from nf4bench.families_cases import Family
from nf4bench.measure import WARM_UP, Timing, summary
from nf4bench.models_llama import random_weight
from nf4bench.options import Shape
from nf4bench.product import MOST_PEER_ERROR, exact, require
from nf4bench.rows import ROTATED_CACHES
from nf4bench.weights import DTYPES

MOST_CALLS, SAMPLE_US = 32, 4000.0  # a sample has so many calls, or as many as take so long
ROUTINGS = 4
EXPERT_FORMS = (cases.LAYER, cases.GROUPED_DENSE)

Call = Callable[[], Tensor]
Multiply = Callable[[Tensor], Tensor]


def served(form: str) -> AbstractContextManager[None]:
    """libnf4 behind bitsandbytes' layers, for the drop-in alone."""
    drop_in = form == cases.DROP_IN
    return models_forms.kernels_of(form) if drop_in else contextlib.nullcontext()


class Rotation:
    """Makes calls in turn, each with a weight or a routing of its own."""

    def __init__(self, gpu: Any, calls: Sequence[Call]) -> None:
        self._gpu, self._calls, self._count = gpu, itertools.cycle(calls), 2

    def _enqueue(self) -> None:
        for _ in range(self._count):
            next(self._calls)()

    def microseconds(self) -> float:
        """Times a call, after one that is not timed: Python is slow at functions that were just
        replaced."""
        next(self._calls)()
        self._gpu.synchronize()
        us = self._gpu.microseconds(self._enqueue) / self._count
        self._count = max(2, min(MOST_CALLS, int(SAMPLE_US / us)))
        return us


def in_turns(rotations: Mapping[tuple[str, int], Rotation]) -> dict[tuple[str, int], Timing]:
    """Returns times by form and rows of x. Each turn serves bitsandbytes by libnf4 once, for the
    drop-in."""
    values: dict[tuple[str, int], list[float]] = {key: [] for key in rotations}
    for turn in range(WARM_UP + cases.TURNS):
        for serves in (False, True):
            with served(cases.DROP_IN if serves else ""), torch.no_grad():
                for (form, m), rotation in rotations.items():
                    if (form == cases.DROP_IN) != serves:
                        continue
                    us = rotation.microseconds()
                    if turn >= WARM_UP:
                        values[form, m].append(us)
    return {key: summary(each) for key, each in values.items()}


# ---- Layers ----------------------------------------------------------------------------


def _dense(layer: nn.Module) -> Multiply:
    return lambda x: functional.linear(x, layer.dequantize(x.dtype))


class Forms:
    """Holds a weight in every form, and its numbers by form: of the integers, and of all others."""

    def __init__(self, shape: Shape, dtype: torch.dtype, bitsandbytes: Any, place: str) -> None:
        weight = random_weight(*shape, place).to(dtype)
        made = models_forms.of(weight, {"bitsandbytes": bitsandbytes})
        self._nf4, served = made["libnf4"], made[models_forms.DROP_IN]
        self._int4 = nf4.torch.Int4Linear.from_quantized(
            nf4.torch.quantize_int4(weight, group_size=cases.GROUP_SIZE)
        )
        self.of: dict[str, Multiply] = {
            cases.BITSANDBYTES: served, cases.DENSE: _dense(self._nf4), cases.DROP_IN: served,
            cases.LAYER: self._nf4, cases.INT4: self._int4, cases.INT4_DENSE: _dense(self._int4),
        }  # fmt: skip

    def numbers(self) -> dict[str, Tensor]:
        """Returns the numbers of each form in float64."""
        codes, integers = (
            each.dequantize("fp32").detach().double() for each in (self._nf4, self._int4)
        )
        of_integers = (cases.INT4, cases.INT4_DENSE)
        return {form: integers if form in of_integers else codes for form in self.of}


def _checked(gpu: Any, what: str, forms: Forms, xs: Mapping[int, Tensor]) -> dict[int, dict]:
    """Returns the relative errors by rows of x and form. Raises WrongResult."""
    numbers, found = forms.numbers(), {}
    for m, x in xs.items():
        found[m] = {}
        for form, multiply in forms.of.items():
            with served(form), torch.no_grad():
                y = gpu.run(lambda stream, multiply=multiply, x=x: multiply(x))
            said = f"{what}, M = {m}: {form}"
            error = require(said, MOST_PEER_ERROR, exact(x, numbers[form]), y)
            found[m][form] = float(f"{error:.3e}")
    return found


def products(
    gpu: Any, family: Family, bitsandbytes: Any, shape: Shape, ms: Sequence[int]
) -> list[dict[str, Any]]:
    """Returns a row for each number of rows of x. Raises WrongResult before anything is timed."""
    dtype, bytes_of_one = DTYPES[family.dtype], shape[0] * shape[1] // 2
    count = max(2, -(-int(ROTATED_CACHES * gpu.cache_bytes) // bytes_of_one))
    weights = [Forms(shape, dtype, bitsandbytes, gpu.place) for _ in range(count)]
    xs = [{m: torch.randn(m, shape[1], dtype=dtype, device=gpu.place) for m in ms} for _ in weights]
    what = f"{family}, {'x'.join(map(str, shape))}"
    errors = _checked(gpu, what, weights[0], xs[0])
    rotations = {
        (form, m): Rotation(
            gpu,
            [partial(each.of[form], x[m]) for each, x in zip(weights, xs, strict=True)],
        )
        for form in cases.FORMS
        for m in ms
    }
    times = in_turns(rotations)
    return [
        {
            "family": str(family), "shape": list(shape), "m": m, "dtype": family.dtype,
            "forms": {
                form: times[form, m].figures() | {"error": errors[m][form]} for form in cases.FORMS
            },
        }
        for m in ms
    ]  # fmt: skip


# ---- Experts ---------------------------------------------------------------------------


def _expert_calls(each: Operands, routing: Routing) -> dict[str, Call]:
    """One call is nf4.torch's, one uses a dense stack. Each takes its rows of x by index."""
    quantized, index = each.stack.quantized, routing.index.long()

    def dense() -> Tensor:
        stack = nf4.torch.dequantize(quantized, DTYPE)
        return functional.grouped_mm(each.x[index], stack.mT, offs=routing.ends)

    own = partial(nf4.torch.linear_grouped, each.x, quantized, routing.ends, x_index=routing.index)
    return {cases.LAYER: own, cases.GROUPED_DENSE: dense}


def experts(gpu: Any, family: Family) -> list[dict[str, Any]]:
    """A row for each number of tokens, in bf16. Raises WrongResult before anything is timed."""
    model, rotations = cases.EXPERTS, {}
    stack = Stack(model.shape("gate_up"), gpu.place)
    for tokens in cases.TOKENS:
        routings = [Routing(model, tokens, gpu.place) for _ in range(ROUTINGS)]
        each = Operands("gate_up", stack, tokens, routings[0])
        calls = [_expert_calls(each, routing) for routing in routings]
        rows = torch.linspace(0, len(routings[0].index) - 1, 16, device=gpu.place).long()
        for form in EXPERT_FORMS:
            with torch.no_grad():
                y = gpu.run(lambda stream, call=calls[0][form]: call())
            said = f"{family}, {model.name}, {tokens} tokens: {form}"
            require(said, MOST_PEER_ERROR, each.expected(routings[0], rows), y[rows])
            rotations[form, tokens] = Rotation(gpu, [of[form] for of in calls])
    times = in_turns(rotations)
    return [
        {
            "family": str(family), "model": model.name, "tokens": tokens,
            "forms": {form: times[form, tokens].figures() for form in EXPERT_FORMS},
        }
        for tokens in cases.TOKENS
    ]  # fmt: skip
