"""The base class of 4-bit weights in a checkpoint, and the result of a survey."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.fp8 import Fp8Weight
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.source import Checkpoint
from nf4.int4 import Int4Tensor
from nf4.tensor import QuantizedTensor


def fields_of(state: Any) -> dict[str, Any]:
    """Returns the fields of nf4.QuantizedTensor that a state has, all but the parts."""
    names = ("format", "blocksize", "nested_blocksize", "scale_rule", "shape", "dtype")
    return {name: getattr(state, name) for name in names}


@dataclasses.dataclass(frozen=True)
class Weight(abc.ABC):
    """A 4-bit weight of a checkpoint. name: the dense weight's, such as "layers.0.q_proj.weight".
    parts: its tensors in the file, by names that depend on its kind. path: that of the file with
    its codes. state: what is known before data is read, which each kind has a type for."""

    name: str
    parts: dict[str, TensorInfo]
    path: str
    state: Any
    joins: ClassVar[bool] = False  # whether the kind has `join`

    @property
    def format(self) -> str:
        """The format of its codes: "nf4", "fp4", "mxfp4", "nvfp4" or "int4"."""
        return self.state.format

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dense weight, (outputs, inputs)."""
        return self.state.shape

    @property
    def dtype(self) -> str:
        """The dtype of the dense weight: "fp32", "fp16" or "bf16"."""
        return self.state.dtype

    @property
    def packed(self) -> TensorInfo:
        """The tensor with its codes. The weight belongs to the file of this tensor."""
        return self.parts["packed"]

    @property
    def module(self) -> str:
        """The name of the module that has the weight."""
        return self.name.removesuffix(".weight")

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Returns its settings, as `nf4 inspect --json` shows them."""

    @property
    def stored_layout(self) -> str | None:
        """NF4Weight.stored_layout of a layer with the weight."""
        return None

    def stored(self, part: str) -> TensorInfo | None:
        """Returns the tensor that stores a part of what `load` returns; None if none does."""
        return self.parts.get(part)

    def whole_parts(self, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
        """Reads the parts that rows and columns of the weight have whole."""
        return {}

    def own_codebook(self, checkpoint: Checkpoint) -> np.ndarray | None:
        """Returns a codebook other than the format's; None if there is none."""
        return None

    def join(self, name: str, shape: tuple[int, ...], parts: tuple[tuple[Any, ...], ...]) -> Weight:
        """Returns a stack of experts of which each has a matrix in the checkpoint. parts: as in
        stacks.Stack.parts. Raises FormatError if they differ."""
        raise NotImplementedError

    @abc.abstractmethod
    def load(self, checkpoint: Checkpoint) -> QuantizedTensor | Int4Tensor:
        """Reads the weight."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The weight's bytes in the file, with all parts."""
        return sum(info.nbytes for info in self.parts.values())


@dataclasses.dataclass
class Survey:
    """The tensors of a checkpoint: 4-bit weights by name, dense tensors by name, the faults of
    broken weights, and errors for dense tensors that are part of something quantized. In a 4-bit
    checkpoint these errors are among the faults. fp8: the weights in FP8 that a checkpoint says it
    has beside its 4-bit weights, by name."""

    weights: dict[str, Weight] = dataclasses.field(default_factory=dict)
    dense: dict[str, TensorInfo] = dataclasses.field(default_factory=dict)
    faults: list[FormatError] = dataclasses.field(default_factory=list)
    unread: list[FormatError] = dataclasses.field(default_factory=list)
    fp8: dict[str, Fp8Weight] = dataclasses.field(default_factory=dict)

    def require_sound(self) -> None:
        """Raises the first fault, if any."""
        if self.faults:
            raise self.faults[0]
