"""Experts with integer weights: a checkpoint stores a matrix for each expert, a model stacks of
them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import nf4
from nf4.checkpoint import Checkpoint, FormatError
from nf4.checkpoint.int4 import Int4Weight
from nf4.torch.distributed._filling import tensor_of
from nf4.torch.modules.int4_experts import Int4Experts

if TYPE_CHECKING:
    from nf4.checkpoint.meta_model import LoadPlan


class Stack(NamedTuple):
    """experts: the module that has the parameter `name`. parts: the weights, as in stacks.Stack."""

    experts: str
    name: str
    parts: list[list[Int4Weight]]

    @property
    def weights(self) -> list[Int4Weight]:
        return [weight for group in self.parts for weight in group]


def found(
    plan: LoadPlan, weights: Mapping[str, Int4Weight], act_order: Container[str]
) -> list[Stack]:
    """Returns the stacks of a checkpoint. Raises FormatError where the weights of experts do not
    make up the stacks of a module. act_order: the names of the weights with act order."""
    made, dense = [], {}
    known = plan.stacks({name: weight.shape for name, weight in weights.items()})
    targets: dict[str, list[Int4Weight]] = {}
    for name, weight in weights.items():
        targets.setdefault(plan.target(name)[0], []).append(weight)
    for full, stack in known.items():
        own = targets.get(full, [])
        if not own:
            dense[stack["module"]] = full
        elif stack["problem"] is not None:
            raise FormatError(own[0].path, f"as integers, {stack['problem']}", own[0].name)
        else:
            parts = [[weights[name] for name in group] for group in stack["parts"]]
            made.append(Stack(stack["module"], full.rpartition(".")[2], parts))
    for each in made:
        first = each.weights[0]
        if each.experts in dense:
            reason = f"{dense[each.experts]}, which is computed with it, is not of integers"
            raise FormatError(first.path, reason, first.name)
        for weight in each.weights:
            reason = _problem(weight, first, len(each.parts) > 1)
            if weight.name in act_order:
                reason = "it has act order, which is not supported for experts"
            if reason is not None:
                raise FormatError(weight.path, reason, weight.name)
    return made


def _problem(weight: Int4Weight, first: Int4Weight, is_joined: bool) -> str | None:
    """Says why a weight cannot be in one stack with the stack's first weight."""
    kind = _kind(first)
    for what, each in _kind(weight).items():
        if each != kind[what]:
            return f"its {what} is not that of {first.name}"
    if is_joined and weight.shape[0] % 8:
        return f"it has {weight.shape[0]} outputs; expected a multiple of 8, to join it"
    return None


def _kind(weight: Int4Weight) -> dict[str, object]:
    return {
        "layout": weight.state.layout,
        "group_size": weight.state.group_size,
        "dtype of scales": weight.parts["scales"].dtype,
        "presence of zeros": "zeros" in weight.parts,
    }


def read(stack: Stack, checkpoint: Checkpoint) -> Int4Experts:
    """Reads a stack into host memory."""
    layout = stack.parts[0][0].state.layout
    experts = [
        [weight.load(checkpoint) for weight in matrices]
        for matrices in zip(*stack.parts, strict=True)
    ]
    first, outputs = experts[0][0], 0 if layout.by_row else 1
    parts = {}
    for name in ("packed", "scales", "zeros"):
        if getattr(first, name) is not None:
            joined = (np.concatenate([getattr(m, name) for m in of], outputs) for of in experts)
            parts[name] = tensor_of(np.stack(list(joined)))
    rows = sum(weight.shape[0] for weight in experts[0])
    shape = (len(experts), rows, first.shape[1])
    return Int4Experts(nf4.Int4Tensor(
        layout=first.layout, shape=shape, group_size=first.group_size, **parts
    ))  # fmt: skip
