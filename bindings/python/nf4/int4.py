"""A weight of 4-bit integers, as its parts: GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from nf4 import _abi, _convert, _torch
from nf4._load import check, library
from nf4._operand import read
from nf4.errors import InvalidArgument, shown
from nf4.typing import Int4Layout, MemoryLike, ScalesDTypeName
from nf4.weight import Packed, Part, Weight

_CODES_IN_A_WORD = 8
_BYTES = {"int32": 4, "fp16": 2, "bf16": 2}
# The caller's names for arguments that have others in C.
_NAMES = {name: f"{name} of shape" for name in ("rows * cols", "rows", "cols")}


class Int4Shapes(NamedTuple):
    """The shapes of a weight's parts as checkpoints have them, and the groups of a row. packed and
    zeros are words of int32 that hold eight codes or zero points."""

    groups: int
    packed: tuple[int, int]
    scales: tuple[int, int]
    zeros: tuple[int, int]


def scales_dtype_of(value: object) -> ScalesDTypeName:
    """The name "fp16" or "bf16" of that name or of a dtype of numpy or torch."""
    name = _convert.dtype_name(value, "scales_dtype")
    if name == "fp32":
        raise InvalidArgument(f'scales_dtype is {shown(value)}; expected "fp16" or "bf16"')
    return cast(ScalesDTypeName, name)


def dtype_of(scales: object) -> str:
    """The dtype of an array of scales; of a tensor without memory too, as on the meta device."""
    if _torch.is_tensor(scales):
        dtype: str | None = _torch.dtype_name(scales.dtype)
    else:
        dtype = read("scales", scales).dtype
    if dtype not in ("fp16", "bf16"):
        given = "an address" if dtype is None else f"of {dtype}"
        raise InvalidArgument(f"scales is {given}; expected fp16 or bf16, or scales_dtype")
    return dtype


def shape_of(value: Iterable[int], name: str = "shape") -> tuple[int, int]:
    """(rows, cols); the library checks that they are not negative."""
    shape = _convert.shape(value)
    if len(shape) != 2:
        raise InvalidArgument(f"{name} is {shown(shape)}; expected (rows, cols)")
    return shape[0], shape[1]


def descriptor(
    layout: Int4Layout, shape: tuple[int, int], group_size: int, scales_dtype: str, zeros: bool
) -> _abi.Int4Tensor:
    """An nf4_int4_tensor without pointers, of a weight with or without zeros."""
    number, zero_offset = _convert.int4_layout(layout)
    return _abi.Int4Tensor(
        struct_size=ctypes.sizeof(_abi.Int4Tensor),
        layout=number,
        scales_dtype=_convert.DTYPES[scales_dtype],
        group_size=group_size,
        zero_offset=zero_offset if zeros else 0,
        rows=shape[0],
        cols=shape[1],
    )


def int4_shapes(layout: Int4Layout, shape: tuple[int, int], group_size: int) -> Int4Shapes:
    """The shapes of the parts. Raises InvalidArgument for what the layout cannot hold."""
    tensor = descriptor(layout, shape, group_size, "fp16", False)
    counts = _abi.Int4Sizes(struct_size=ctypes.sizeof(_abi.Int4Sizes))
    check(library().nf4_int4_tensor_sizes(ctypes.byref(tensor), ctypes.byref(counts)), _NAMES)
    (rows, cols), groups = shape, counts.groups
    row_words, col_words = (-(-extent // _CODES_IN_A_WORD) for extent in shape)
    if layout == "compressed-tensors":
        return Int4Shapes(groups, (rows, col_words), (rows, groups), (row_words, groups))
    packed = (cols, row_words) if layout == "awq" else (col_words, rows)
    return Int4Shapes(groups, packed, (groups, rows), (groups, row_words))


@dataclass(frozen=True, eq=False, kw_only=True)
class Int4Tensor(Weight[Packed]):
    """A weight of 4-bit integers, scale * (code - zero), in the arrays of a checkpoint. It holds
    the objects that it is given and copies none.

    layout       "gptq" (checkpoint_format gptq), "gptq_v2", "awq" (version gemm) or
                 "compressed-tensors" (pack-quantized). The words of zeros in "gptq" are those of
                 "gptq_v2" minus 0x11111111
    shape        (rows, cols), which are (out_features, in_features); or (experts, rows, cols), a
                 stack of experts for matmul_grouped, whose parts have a first dimension of experts
    group_size   columns that share a scale: a multiple of 8 that divides cols; -1: all
    packed       int32, eight codes a word: qweight, or weight_packed
    scales       fp16 or bf16: scales, or weight_scale
    zeros        int32, eight zero points a word: qzeros, or weight_zero_point. None: all are 8
    g_idx        int32 [cols], the group of each column, for weights with act order. None:
                 column / group_size
    permutation  int32 [cols], the column of the weight that each stored column is, in the result of
                 `reorder`; or None
    scales_dtype  "fp16" or "bf16"; by default the dtype of scales. Required if scales is an address

    With G groups a row, the shapes are

        layout              packed                  scales     zeros
        gptq, gptq_v2       [cols / 8, rows]        [G, rows]  [G, ceil(rows / 8)]
        awq                 [cols, rows / 8]        [G, rows]  [G, rows / 8]
        compressed-tensors  [rows, ceil(cols / 8)]  [rows, G]  [ceil(rows / 8), G]

    Each part is an object that QuantizedTensor accepts, and is read at the first use, like the
    parts of a QuantizedTensor. Values of g_idx and permutation are checked on the CPU, at each use.
    On a GPU they are not checked: a value out of range reads memory outside the weight.

    Raises InvalidArgument for an invalid layout, shape, group size or dtype; other errors are found
    at the first use.
    """

    prefix = "nf4_int4_"

    layout: Int4Layout
    shape: tuple[int, ...]
    group_size: int
    packed: Packed = field(repr=False)
    scales: MemoryLike = field(repr=False)
    zeros: MemoryLike | None = field(default=None, repr=False)
    g_idx: MemoryLike | None = field(default=None, repr=False)
    permutation: MemoryLike | None = field(default=None, repr=False)
    scales_dtype: ScalesDTypeName | None = None

    def __post_init__(self) -> None:
        _convert.int4_layout(self.layout)
        shape = _convert.shape(self.shape)
        object.__setattr__(self, "shape", shape if len(shape) == 3 else shape_of(shape))
        object.__setattr__(self, "group_size", _convert.integer("group_size", self.group_size, 32))
        dtype = dtype_of(self.scales) if self.scales_dtype is None else self.scales_dtype
        object.__setattr__(self, "scales_dtype", scales_dtype_of(dtype))

    @property
    def dtype(self) -> ScalesDTypeName:
        """That of scales."""
        return cast(ScalesDTypeName, self.scales_dtype)

    @property
    def is_stack(self) -> bool:
        return len(self.shape) == 3

    def expert(self, index: int) -> Int4Tensor[Any]:
        """One weight of a stack, whose parts are arrays. Memory is shared."""
        if not self.is_stack:
            raise InvalidArgument(
                f"the weight is of shape {self.shape}; expected a stack of "
                "experts, (experts, rows, cols)"
            )
        parts = {part.name: getattr(self, part.name)[index] for part in self.parts()}
        return dataclasses.replace(self, shape=self.shape[1:], **parts)

    @functools.cached_property
    def shapes(self) -> Int4Shapes:
        """The shapes that the parts should have, of a stack those of an expert."""
        rows, cols = self.shape[-2:]
        return int4_shapes(self.layout, (rows, cols), self.group_size)

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return self.shapes.groups

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(_BYTES[part.dtype] * part.elements for part in self.parts())

    def descriptor(self) -> _abi.Int4Tensor:
        zeros, (rows, cols) = self.zeros is not None, self.shape[-2:]
        return descriptor(self.layout, (rows, cols), self.group_size, self.dtype, zeros)

    def parts(self) -> list[Part]:
        shapes, cols, experts = self.shapes, self.shape[-1:], self.shape[:-2]
        expected: dict[str, tuple[int, ...]] = {
            "packed": (*experts, *shapes.packed),
            "scales": (*experts, *shapes.scales),
            "zeros": (*experts, *shapes.zeros),
            "g_idx": (*experts, *cols),
            "permutation": (*experts, *cols),
        }
        return [
            Part(name, self.dtype if name == "scales" else "int32", math.prod(shape), shape)
            for name, shape in expected.items()
            if name in ("packed", "scales") or getattr(self, name) is not None
        ]
