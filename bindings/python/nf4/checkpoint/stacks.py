"""Stacks of experts in checkpoints.

transformers keeps the experts of a layer in parameters of three dimensions. A dense checkpoint has
such a parameter as one tensor, or the matrices of each expert, which transformers puts together on
loading. In 4 bits it is one weight of shape [experts, outputs, inputs], whatever the order of the
dense dimensions, under the parameter's name and ".weight".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from nf4.checkpoint.dtypes import FILE_TO_NF4
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.weights import Weight


@dataclasses.dataclass(frozen=True)
class Stack:
    """A parameter of experts that a model has.

    module      the module of the model that has it
    parameter   its name in the model
    name        its name in the checkpoint
    shape       (experts, outputs, inputs)
    transposed  dense, it is [experts, inputs, outputs]
    parts       the dense tensors: ((name,),) if it is one; else, for each of the matrices of an
                expert, which follow each other along the outputs, the names of all experts'. Empty
                if the checkpoint has it otherwise, or not
    """

    module: str
    parameter: str
    name: str
    shape: tuple[int, int, int]
    transposed: bool
    parts: tuple[tuple[str, ...], ...]

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Stack:
        shape, parts = tuple(answer["shape"]), tuple(map(tuple, answer["parts"]))
        return cls(**{**answer, "shape": shape, "parts": parts})

    @property
    def weight_name(self) -> str:
        """Of the 4-bit weight."""
        return f"{self.name}.weight"

    @property
    def tensors(self) -> list[str]:
        return [name for group in self.parts for name in group]

    def dense_reason(self, dense: Mapping[str, TensorInfo]) -> str | None:
        """Why it cannot become 4-bit; None if it can."""
        if not self.parts or not all(name in dense for name in self.tensors):
            return "a matrix is missing, or transformers makes them otherwise"
        dtypes = {dense[name].dtype for name in self.tensors}
        if len(dtypes) > 1 or not dtypes <= FILE_TO_NF4.keys():
            return f"dtype {' and '.join(sorted(dtypes))}"
        return None

    def read(self, checkpoint: Checkpoint) -> np.ndarray:
        """The dense stack, [experts, outputs, inputs]."""
        if len(self.parts) == 1 and len(self.parts[0]) == 1:
            array = _array(checkpoint, self.parts[0][0])
            return np.ascontiguousarray(array.swapaxes(1, 2)) if self.transposed else array
        made, row = None, 0
        for group in self.parts:
            rows = 0
            for expert, name in enumerate(group):
                matrix = _array(checkpoint, name)
                made = np.empty(self.shape, matrix.dtype) if made is None else made
                rows = matrix.shape[0]
                made[expert, row : row + rows] = matrix
            row += rows
        assert made is not None
        return made


def _array(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return checkpoint.owner[name].array(checkpoint.info(name))


def is_stack(weight: Weight) -> bool:
    return len(weight.shape) == 3


def parameter_of(weight: str) -> str:
    """The dense parameter's name, from that of a 4-bit stack. A Params4bit in the parameter's own
    place, as Unsloth keeps stacks, has no ".weight"."""
    return weight.removesuffix(".weight")


def names_of(experts: Any) -> tuple[str, ...]:
    """The parameters of a module that are stacks of experts, if transformers lets others compute
    their products."""
    if not all(hasattr(experts, each) for each in ("has_gate", "is_transposed", "_apply_gate")):
        return ()
    return ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"


def dense_of(weight: Weight, dense: Checkpoint, stacks: Mapping[str, Stack]) -> np.ndarray:
    """The dense stack of a 4-bit one, in its order: [experts, outputs, inputs], or that of a
    parameter in whose own place it is. stacks: those of `dense`, by their names."""
    if weight.name in dense:
        return _array(dense, weight.name)
    name = parameter_of(weight.name)
    stack = stacks.get(name)
    if stack is None or not stack.parts:
        raise FormatError(dense.path, "not there to compare with", name)
    return stack.read(dense)
