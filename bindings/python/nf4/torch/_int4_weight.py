"""Int4Parts: a 4-bit integer weight as nf4.torch passes it between functions. It has the methods of
WeightParts (_weight.py).

Public operators take it as eight arguments: the five tensors, shape, layout and group_size, with
the meaning of nf4.Int4Tensor. The operators in compiled graphs, _linear_int4 and _dense_like_int4,
take ten: the five tensors, then rows, cols, the layout's number and zero_offset as in
nf4_int4_tensor, and group_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

import nf4
from nf4 import _convert
from nf4.errors import InvalidArgument
from nf4.torch._weight import tensors_of

_OF_GPTQ = {"packed": "qweight", "scales": "scales", "zeros": "qzeros", "g_idx": "g_idx"}
# The keys of the parts in checkpoints of each layout.
KEYS = {
    "gptq": _OF_GPTQ,
    "gptq_v2": _OF_GPTQ,
    "awq": {name: key for name, key in _OF_GPTQ.items() if name != "g_idx"},
    "compressed-tensors": {
        "packed": "weight_packed",
        "scales": "weight_scale",
        "zeros": "weight_zero_point",
        "g_idx": "weight_g_idx",
    },
}
_OF_EVERY_WEIGHT = frozenset(("packed", "scales"))
_new = tuple.__new__


class Int4Spec(NamedTuple):
    """How the bytes of a weight are read."""

    rows: int
    cols: int
    layout_code: int
    zero_offset: int
    group_size: int
    layout: str

    @classmethod
    def of(cls, shape: Sequence[int], layout: str, group_size: int) -> Int4Spec:
        """Raises InvalidArgument for an unknown layout."""
        code, zero_offset = _convert.int4_layout(layout)
        if len(shape) != 2:
            raise InvalidArgument(f"shape is {tuple(shape)}; expected (rows, cols)")
        return _new(cls, (*shape, code, zero_offset, group_size, layout))

    @property
    def shape(self) -> tuple[int, int]:
        return self[:2]


def _named(parts: Int4Parts | Int4Stack) -> dict[str, Tensor | None]:
    """Returns the tensors by name."""
    return dict(zip(parts.names, parts.tensors, strict=True))


def _quantized(parts: Int4Parts | Int4Stack) -> nf4.Int4Tensor:
    """Returns the weight as package nf4 has it, on the same memory."""
    spec = parts.spec
    detached = {n: None if part is None else part.detach() for n, part in parts.named().items()}
    return nf4.Int4Tensor(
        **detached, layout=spec.layout, shape=spec.shape, group_size=spec.group_size
    )


class Int4Parts(NamedTuple):
    """The tensors of a weight, as they are at the time of a call, and its Int4Spec."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    g_idx: Tensor | None
    permutation: Tensor | None
    spec: Int4Spec

    names = ("packed", "scales", "zeros", "g_idx", "permutation")

    @classmethod
    def of(cls, weight: nf4.Int4Tensor) -> Int4Parts:
        """Makes it from a weight. Raises InvalidArgument if a part is not a tensor."""
        tensors = tensors_of(weight, cls.names, _OF_EVERY_WEIGHT)
        spec = Int4Spec.of(weight.shape, weight.layout, weight.group_size)
        return _new(cls, (*tensors, spec))

    @classmethod
    def of_arguments(cls, *arguments: Any) -> Int4Parts:
        """Makes it from the eight arguments of a public operator."""
        *tensors, shape, layout, group_size = arguments
        return _new(cls, (*tensors, Int4Spec.of(shape, layout, group_size)))

    @classmethod
    def of_numbers(cls, *numbers: Any) -> Int4Parts:
        """Makes it from the ten arguments of an operator in a compiled graph."""
        *tensors, rows, cols, code, zero_offset, group_size = numbers
        layouts = _convert.INT4_LAYOUTS.items()
        name = next((name for name, each in layouts if each == (code, zero_offset)), str(code))
        return cls.of_arguments(*tensors, (rows, cols), name, group_size)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:5]

    def arguments(self) -> tuple[Any, ...]:
        """Returns the eight arguments of a public operator."""
        spec = self.spec
        return *self[:5], [spec.rows, spec.cols], spec.layout, spec.group_size

    def numbers(self) -> tuple[Any, ...]:
        """Returns the ten arguments of an operator in a compiled graph."""
        return *self[:5], *self.spec[:5]

    named = _named
    quantized = _quantized


class Int4StackSpec(NamedTuple):
    """How the bytes of a stack are read, as in nf4.Int4Tensor."""

    shape: tuple[int, ...]
    layout: str
    group_size: int


class Int4Stack(NamedTuple):
    """The tensors of a stack of experts, and its Int4StackSpec. Its operators have the eight
    arguments of a public one."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    g_idx: Tensor | None
    permutation: Tensor | None
    spec: Int4StackSpec

    names = Int4Parts.names

    @classmethod
    def of(cls, weight: nf4.Int4Tensor) -> Int4Stack:
        """Makes it from a weight. Raises InvalidArgument if a part is not a tensor."""
        tensors = tensors_of(weight, cls.names, _OF_EVERY_WEIGHT)
        spec = Int4StackSpec(weight.shape, weight.layout, weight.group_size)
        return _new(cls, (*tensors, spec))

    @classmethod
    def of_arguments(cls, *arguments: Any) -> Int4Stack:
        *tensors, shape, layout, group_size = arguments
        return _new(cls, (*tensors, Int4StackSpec(tuple(shape), layout, group_size)))

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:5]

    def arguments(self) -> tuple[Any, ...]:
        return *self[:5], list(self.spec.shape), self.spec.layout, self.spec.group_size

    named = _named
    quantized = _quantized
