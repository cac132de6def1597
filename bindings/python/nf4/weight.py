"""What the kinds of 4-bit weights share: QuantizedTensor and Int4Tensor."""

from __future__ import annotations

import math
from ctypes import Structure
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from nf4.errors import InvalidArgument, kind_of
from nf4.typing import DTypeName

# Where the module _prepared keeps what it made of a weight, in the weight's __dict__.
PREPARED = "_prepared_weight"
PREPARED_STACK = "_prepared_stack"

Packed = TypeVar("Packed", covariant=True)


class Part(NamedTuple):
    """What a part of a weight should be. shape None: any of so many elements."""

    name: str
    dtype: str
    elements: int
    shape: tuple[int, ...] | None = None


class Weight(Generic[Packed]):
    """A weight in 4 bits: a QuantizedTensor or an Int4Tensor. Weight[torch.Tensor] has a tensor for
    `packed`."""

    packed: Packed
    shape: tuple[int, ...]

    # The prefix of the C functions for this kind of weight.
    prefix: ClassVar[str]

    def descriptor(self) -> Structure:
        """The struct of this weight as C takes it, without its pointers."""
        raise NotImplementedError

    def parts(self) -> list[Part]:
        """What the parts should be, `packed` first, by their names here and in the struct. Raises
        InvalidArgument."""
        raise NotImplementedError

    @property
    def is_stack(self) -> bool:
        """Whether only matmul_grouped takes it: experts of integers."""
        return False

    @property
    def dtype(self) -> DTypeName:
        """The dtype that dequantize gives by default."""
        raise NotImplementedError

    @property
    def elements(self) -> int:
        """Elements of the weight."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight in memory."""
        raise NotImplementedError

    @property
    def bits_per_weight(self) -> float:
        """8 * nbytes / elements; 0 for a weight of no elements."""
        return 8 * self.nbytes / self.elements if self.elements else 0.0

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle holds: everything except addresses, which a copy does not
        share."""
        state = self.__dict__.copy()
        for name in (PREPARED, PREPARED_STACK):
            state.pop(name, None)
        return state


def no_weight(
    name: str, value: Any, kind: str = "a QuantizedTensor or an Int4Tensor"
) -> InvalidArgument:
    """For an argument that should be a weight. A layer has one in `.quantized`."""
    expected = "its .quantized" if hasattr(type(value), "quantized") else kind
    return InvalidArgument(f"{name} is {kind_of(value)}; expected {expected}")
