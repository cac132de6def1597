"""Experts in MXFP4 or NVFP4 of which a checkpoint stores a matrix each, as the stack that a model
has."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from nf4.checkpoint.e2m1 import E2m1State, E2m1Weight
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.weights import Weight
from nf4.tensor import QuantizedTensor

if TYPE_CHECKING:
    from nf4.checkpoint.meta_model import LoadPlan


@dataclasses.dataclass(frozen=True)
class JoinedWeight(E2m1Weight):
    """A stack. matrices: the weights, as in stacks.Stack.parts: for each of the matrices of an
    expert, which follow each other along the outputs, those of all experts."""

    matrices: tuple[tuple[E2m1Weight, ...], ...]

    def global_scale(self, checkpoint: Checkpoint) -> np.ndarray | None:
        """Reads the fp32 scales of NVFP4, one for nested_blocksize rows."""
        first, rows = self.matrices[0][0], self.state.nested_blocksize
        if first.global_scale(checkpoint) is None:
            return None
        scales = [
            np.repeat(weight.global_scale(checkpoint), weight.shape[0] // rows)
            for of_expert in zip(*self.matrices, strict=True)
            for weight in of_expert
        ]
        return np.concatenate(scales)

    def load(self, checkpoint: Checkpoint) -> QuantizedTensor:
        experts, rows, _ = self.shape
        read = {
            part: np.concatenate(
                [
                    checkpoint.read(weight.parts[part].name)
                    for of_expert in zip(*self.matrices, strict=True)
                    for weight in of_expert
                ]
            )
            for part in ("packed", "scales")
        }
        return QuantizedTensor(
            packed=read["packed"].reshape(experts, rows, -1),
            absmax=read["scales"].reshape(experts, rows, -1),
            nested_absmax=self.global_scale(checkpoint),
            format=self.format,
            blocksize=self.state.blocksize,
            nested_blocksize=self.state.nested_blocksize,
            scale_rule=self.state.scale_rule,
            shape=self.shape,
            dtype=self.dtype,
        )


def joined(plan: LoadPlan, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Returns the weights with the stacks of a model in the place of their matrices, under the
    names of the model's parameters with ".weight". Raises FormatError for matrices that do not make
    up a stack."""
    matrices = {
        name: weight
        for name, weight in weights.items()
        if isinstance(weight, E2m1Weight) and len(weight.shape) == 2
    }
    found = dict(weights)
    known = plan.stacks({name: weight.shape for name, weight in matrices.items()})
    of_stacks: dict[str, list[str]] = {}
    for name in matrices:
        of_stacks.setdefault(plan.target(name)[0], []).append(name)
    for full, stack in known.items():
        names = of_stacks.get(full, [])
        if not names:
            continue
        first = matrices[names[0]]
        if stack["problem"] is not None:
            raise FormatError(first.path, stack["problem"], first.name)
        parts = tuple(tuple(matrices[name] for name in group) for group in stack["parts"])
        for name in names:
            del found[name]
        found[f"{full}.weight"] = _stack(f"{full}.weight", tuple(stack["shape"]), parts)
    return found


def _stack(
    name: str, shape: tuple[int, ...], parts: tuple[tuple[E2m1Weight, ...], ...]
) -> JoinedWeight:
    first = parts[0][0]
    for weight in (each for group in parts for each in group):
        for what in ("layout", "blocksize"):
            if getattr(weight.state, what) != getattr(first.state, what):
                reason = f"its {what} is not that of {first.name}"
                raise FormatError(weight.path, reason, weight.name)
    rows = math.gcd(*(group[0].shape[0] for group in parts)) if "global" in first.parts else 0
    state = E2m1State(first.state.layout, shape, first.state.blocksize, first.dtype, rows)
    infos = [info for group in parts for each in group for info in each.parts.values()]
    return JoinedWeight(name, {info.name: info for info in infos}, first.path, state, parts)
