"""Stacks of experts in checkpoints.

transformers keeps the experts of a layer in parameters of three dimensions. A dense checkpoint
stores such a parameter as one tensor, or as a matrix for each expert, which transformers stacks
when it loads them. In 4 bits it is one weight of shape [experts, outputs, inputs], for any order of
the dense dimensions, named after the parameter with ".weight".
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nf4.checkpoint.dtypes import FILE_TO_NF4
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.weights import Weight

if TYPE_CHECKING:
    from nf4.checkpoint.meta_model import LoadPlan

# This part of a name marks an expert's own matrix.
OF_AN_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclasses.dataclass(frozen=True)
class Stack:
    """A parameter of experts that a model has.

    module      the module of the model that has it
    parameter   its name in the model
    name        its name in the checkpoint
    shape       (experts, outputs, inputs)
    transposed  whether the dense parameter is [experts, inputs, outputs]
    parts       the dense tensors: ((name,),) if it is one; else, for each of the matrices of an
                expert, which follow each other along the outputs, the names of all experts'. Empty
                if the checkpoint lacks it or stores it in another way
    problem     the reason why parts is empty, with the name of a tensor
    """

    module: str
    parameter: str
    name: str
    shape: tuple[int, int, int]
    transposed: bool
    parts: tuple[tuple[str, ...], ...]
    problem: str | None = None

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Stack:
        shape, parts = tuple(answer["shape"]), tuple(map(tuple, answer["parts"]))
        return cls(**{**answer, "shape": shape, "parts": parts})

    @property
    def weight_name(self) -> str:
        """The name of the 4-bit weight."""
        return f"{self.name}.weight"

    @property
    def tensors(self) -> list[str]:
        return [name for group in self.parts for name in group]

    def dense_reason(self, dense: Mapping[str, TensorInfo]) -> str | None:
        """Says why it cannot become 4-bit; None if it can."""
        absent = next((name for name in self.tensors if name not in dense), None)
        if not self.parts or absent is not None:
            return self.problem or f"{absent} is missing"
        dtypes = {name: dense[name].dtype for name in self.tensors}
        (usual, count), *_ = Counter(dtypes.values()).most_common(1)
        if count < len(dtypes):
            odd = next(name for name, dtype in dtypes.items() if dtype != usual)
            return f"{odd} is {dtypes[odd]}, but most are {usual}"
        return None if usual in FILE_TO_NF4 else f"dtype {usual}"

    def read(self, checkpoint: Checkpoint) -> np.ndarray:
        """Reads the dense stack, [experts, outputs, inputs]."""
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


def parts_problem(
    parts: Sequence[Sequence[str]],
    shapes: Mapping[str, Sequence[int]],
    shape: tuple[int, int, int],
) -> str | None:
    """Says why the matrices of experts, grouped as in Stack, do not make up a parameter of this
    shape (experts, outputs, inputs); None if they do."""
    experts, rows, cols = shape
    total = 0
    for group in parts:
        found: dict[int, str] = {}
        for name in group:
            same = found.setdefault(_expert_of(name), name)
            if same != name:
                return f"{same} is there, and {name} too"
        for expert in range(experts):
            if expert not in found:
                return f"{_of_expert(expert, group[0])} is missing"
        if len(group) != experts:
            return f"{group[-1]} is there, but the model has {experts} experts"
        (usual, _), *_ = Counter(tuple(shapes[name]) for name in group).most_common(1)
        wanted = usual[0] if len(usual) == 2 else "rows"
        for name in group:
            size = tuple(shapes[name])
            if size != usual or len(size) != 2 or size[1] != cols:
                return f"{name} is of shape {list(size)}; expected [{wanted}, {cols}]"
        total += usual[0]
    if total == rows:
        return None
    return f"the matrices from {parts[0][0]} on have {total} outputs, but the model has {rows}"


def _expert_of(name: str) -> int:
    """Returns the expert's index: the last number in the name of a matrix."""
    return next((int(each) for each in reversed(name.split(".")) if each.isdecimal()), -1)


def _of_expert(expert: int, like: str) -> str:
    """Returns the name of another expert's matrix."""
    fields = like.split(".")
    at = max((at for at, each in enumerate(fields) if each.isdecimal()), default=0)
    return ".".join((*fields[:at], str(expert), *fields[at + 1 :]))


def _array(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return checkpoint.owner[name].array(checkpoint.info(name))


def joined(plan: LoadPlan, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Returns the weights with the stacks of a model in the place of their matrices, under the
    names of the model's parameters with ".weight". Raises FormatError for matrices that do not make
    up a stack."""
    matrices = {
        name: weight for name, weight in weights.items() if weight.joins and len(weight.shape) == 2
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
        found[f"{full}.weight"] = parts[0][0].join(f"{full}.weight", tuple(stack["shape"]), parts)
    return found


def is_stack(weight: Weight) -> bool:
    return len(weight.shape) == 3


def parameter_of(weight: str) -> str:
    """Returns the dense parameter's name from the name of a 4-bit stack. A Params4bit in the
    parameter's own place, where Unsloth keeps stacks, has no ".weight"."""
    return weight.removesuffix(".weight")


def names_of(experts: Any) -> tuple[str, ...]:
    """Returns the parameters of a module that are stacks of experts, if transformers lets other
    libraries compute their products."""
    if not all(hasattr(experts, each) for each in ("has_gate", "is_transposed", "_apply_gate")):
        return ()
    return ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"


def dense_of(weight: Weight, dense: Checkpoint, stacks: Mapping[str, Stack]) -> np.ndarray:
    """Reads the dense stack of a 4-bit one, in the order of the 4-bit one: [experts, outputs,
    inputs], or the parameter's order if it is in the parameter's own place. stacks: those of
    `dense`, by name."""
    if weight.name in dense:
        return _array(dense, weight.name)
    name = parameter_of(weight.name)
    stack = stacks.get(name)
    if stack is None or not stack.parts:
        raise FormatError(dense.path, "not there to compare with", name)
    return stack.read(dense)
