"""An argument as memory: where it is, of which dtype and shape, and whether it may be written.

Every check raises InvalidArgument, which names the argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nf4 import _convert
from nf4.errors import InvalidArgument

if TYPE_CHECKING:
    from nf4._torch import Device


class Operand(NamedTuple):
    """The memory of one argument. Of a raw address only `address` is known and the rest is None;
    it is trusted.

    owner      keeps the memory alive
    dtype      "fp32", "fp16", "bf16", "uint8", or another dtype by its library's name
    strides    in elements; None: row-major without gaps
    on_device  True: device memory, False: host memory
    torch      the device of a torch tensor; None for all else
    """

    name: str
    address: int
    owner: object = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    on_device: bool | None = None
    writable: bool = True
    torch: Device | None = None

    @property
    def elements(self) -> int | None:
        return None if self.shape is None else math.prod(self.shape)

    def require_contiguous(self) -> Operand:
        """Returns itself."""
        if self.strides is not None:
            raise InvalidArgument(f"{self.name} is not contiguous in row-major order")
        return self

    def require_writable(self) -> Operand:
        """Returns itself."""
        # numpy's flag may have changed since the array was read.
        array = self.owner
        writable = array.flags.writeable if isinstance(array, np.ndarray) else self.writable
        if not writable:
            raise InvalidArgument(f"{self.name} is read-only")
        return self

    def expect(self, dtype: str, elements: int) -> Operand:
        """Returns itself, if it is contiguous and of this dtype and number of elements."""
        self.require_contiguous()
        if self.shape is None:
            return self
        if self.dtype != dtype:
            raise InvalidArgument(f"{self.name} is of {self.dtype}; expected {dtype}")
        if self.elements != elements:
            raise InvalidArgument(f"{self.name} has {self.elements} elements; expected {elements}")
        return self

    def row_stride(self, columns: int) -> int:
        """The distance from one row of an array [..., columns] to the next, in elements. Rows at
        an address have no gaps between them."""
        shape = self.shape
        if shape is None:
            return columns
        if shape[-1:] != (columns,):
            raise InvalidArgument(f"{self.name} is of shape {shape}; expected [..., {columns}]")
        if self.strides is None:
            return columns
        stride = _row_stride(shape, self.strides)
        if stride is None or stride < columns:
            raise InvalidArgument(
                f"{self.name} is of shape {shape} and strides {self.strides}; expected contiguous "
                f"rows, each at one distance of {columns} or more from the next"
            )
        return _convert.integer(f"the stride of {self.name}", stride, 64)


def _row_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """How far apart rows of the last dimension are, if each is contiguous and all are at one
    distance; else None. The stride of a single row is its length."""
    if shape[-1] != 1 and strides[-1] != 1:
        return None
    leading = [each for each in zip(shape[:-1], strides[:-1], strict=True) if each[0] != 1]
    if any(outer != extent * inner for (_, outer), (extent, inner) in pairwise(leading)):
        return None
    return leading[-1][1] if leading else shape[-1]


def place(operands: Sequence[Operand]) -> bool | None:
    """Where all of the operands are: True: device memory, False: host memory, None: all are raw
    addresses. A raw address is where the others are."""
    known = [each for each in operands if each.on_device is not None]
    for each in known:
        if each.on_device != known[0].on_device:
            places = "; ".join(
                f"{one.name} is in {'device' if one.on_device else 'host'} memory"
                for one in (known[0], each)
            )
            raise InvalidArgument(f"{places}; expected all of them in one place")
    return known[0].on_device if known else None


def on_device(operands: Sequence[Operand]) -> bool:
    """Are the operands device memory? Raw addresses alone are."""
    return place(operands) is not False
