"""The keyword arguments that the overloads of an operation share, for type checkers and
typing.get_type_hints."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from nf4._lora import Lora
from nf4.typing import (
    ArrayLike,
    CudaStreamLike,
    DTypeLike,
    FormatName,
    Int4Layout,
    MemoryLike,
    ScaleRuleName,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
else:
    Unpack = getattr(typing, "Unpack", None)  # Python 3.10 has none, and keeps no overloads


class Run(TypedDict, total=False):
    threads: int
    stream: CudaStreamLike | None


class Product(Run, total=False):
    workspace: MemoryLike | None


class Matmul(Product, total=False):
    bias: MemoryLike | None
    lora: Lora | None


class MatmulGrad(Product, total=False):
    lora: Lora | None


class MatmulBatch(Product, total=False):
    bias: Sequence[MemoryLike | None] | None


class Grouped(Product, total=False):
    x_index: ArrayLike | None
    bias: MemoryLike | None
    row_scale: MemoryLike | None


class GroupedGrad(Product, total=False):
    y_index: ArrayLike | None
    row_scale: MemoryLike | None


class LoraGrad(Run, total=False):
    dtype: DTypeLike | None


class Quantize(Product, total=False):
    format: FormatName | None
    blocksize: int | None
    nested_blocksize: int | None
    scale_rule: ScaleRuleName | None
    codebook: MemoryLike | None


class QuantizeInt4(Run, total=False):
    layout: Int4Layout | None
    group_size: int | None
    symmetric: bool
    scales_dtype: DTypeLike | None
