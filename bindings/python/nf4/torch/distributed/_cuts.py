"""Rows or columns of a 4-bit weight, cut out of its parts as they are stored. No code of a weight
is dequantized, and the part's values are those of the whole.

plan() says which elements of each stored part a cut needs, without reading any, and what the part
is made of; cut() does both on a weight in memory:

    part = cut(weight, 0, [(0, 4096)])                       # rows 0..4095
    part = cut(weight, 0, [(0, 512), (8192, 8320)])          # of two projections in one weight
    part = cut(weight, 1, [(4096, 8192)])                    # columns
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import nf4
from nf4.errors import InvalidArgument
from nf4.weight import Weight, no_weight

Ranges = Sequence[tuple[int, int]]
# A nested group has this many scales at least: wgmma kernels take no fewer, and with fewer the
# scales are hardly smaller than flat ones.
_SMALLEST_NESTED = 8
AXES = ("rows", "columns")


class CutOf(NamedTuple):
    """Which part of a weight a layer has: of its shape, rows (dim 0) or columns."""

    shape: tuple[int, int]
    dim: int
    ranges: Ranges


class Read(NamedTuple):
    """The elements of a stored part that a cut needs: of its elements in memory, seen as `view`,
    these ranges along `dim`, one after another."""

    view: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, part: Tensor) -> Tensor:
        """In new memory, [..., the ranges' sum, ...]."""
        seen = part.reshape(self.view)
        pieces = [seen.narrow(self.dim, begin, end - begin) for begin, end in self.ranges]
        return torch.cat(pieces, self.dim)

    def runs(self) -> list[tuple[int, int]]:
        """The same as ranges of the stored elements in order, (first, past the last)."""
        inner = math.prod(self.view[self.dim + 1 :])
        step = self.view[self.dim] * inner
        outer = range(0, math.prod(self.view[: self.dim]) * step, step) if step else ()
        return [
            (at + begin * inner, at + end * inner) for at in outer for begin, end in self.ranges
        ]


@dataclass(frozen=True)
class Cut:
    """What is read for a part of a weight, and what the part is made of.

    reads    by the parts' names; None: all of it. Parts that the weight has not are not there
    shape    of the part, (rows, columns)
    """

    reads: dict[str, Read | None]
    shape: tuple[int, int]

    def narrowed(self, parts: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """What is read, of whole parts in memory."""
        found = {}
        for name, read in self.reads.items():
            part = parts.get(name)
            found[name] = part if read is None or part is None else read.of(part)
        return found


@dataclass(frozen=True)
class NF4Cut(Cut):
    """Of a QuantizedTensor. nested_blocksize, of the part: that of the weight, or less where the
    cut falls inside its nested groups, or 0: the part's scales are made flat."""

    blocksize: int
    nested_blocksize: int
    _whole_nested: int  # nested_blocksize of the whole weight

    @classmethod
    def plan(
        cls,
        shape: tuple[int, int],
        blocksize: int,
        nested_blocksize: int,
        dim: int,
        ranges: Ranges,
    ) -> NF4Cut:
        """dim 0: rows; 1: columns. Raises InvalidArgument where a range does not begin and end
        with a block."""
        ranges, made = _checked(shape, dim, ranges)
        rows, cols = shape
        in_weight = f"a weight of shape {shape} and blocksize {blocksize}"
        if dim == 0:
            scale, total = cols, rows * cols
            views = ((-(-total // 2),), (-(-total // blocksize),))
        else:
            if cols % blocksize and cols:
                raise InvalidArgument(
                    f"columns cannot be cut from {in_weight}: its blocks run across rows"
                )
            scale, total = 1, cols
            views = ((rows, cols // 2), (rows, cols // blocksize))
        elements = [(begin * scale, end * scale) for begin, end in ranges]
        lengths = list(itertools.accumulate(end - begin for begin, end in elements))
        inside = [*(begin for begin, _ in elements), *lengths[:-1]]
        if dim == 1:
            inside += lengths[-1:]
        for at in inside:
            if at % blocksize:
                raise InvalidArgument(
                    f"{_named(dim, ranges)} cannot be cut from {in_weight}: a cut is inside a block"
                )
        reads: dict[str, Read | None] = {
            name: Read(view, dim, tuple((a // size, -(-b // size)) for a, b in elements))
            for name, view, size in zip(("packed", "absmax"), views, (2, blocksize), strict=True)
        }
        of_row = cols // blocksize if dim else 0
        nested = _nested_blocksize(nested_blocksize, [at // blocksize for at in inside], of_row)
        if nested_blocksize:
            reads |= dict.fromkeys(("nested_absmax", "nested_code", "nested_offset"))
        return cls({**reads, "codebook": None}, made, blocksize, nested, nested_blocksize)

    def assemble(
        self, parts: Mapping[str, Tensor | None], format: str, dtype: str = "fp32"
    ) -> nf4.QuantizedTensor[Tensor]:
        """The part, from what was read. dtype: as in QuantizedTensor."""
        made = {**parts, "packed": parts["packed"].reshape(-1, 1)}
        made["absmax"] = absmax = parts["absmax"].reshape(-1)
        if self._whole_nested:
            made |= self._nested(absmax, parts)
        return nf4.QuantizedTensor(
            **made,
            shape=self.shape,
            format=format,
            blocksize=self.blocksize,
            nested_blocksize=self.nested_blocksize,
            dtype=dtype,
        )

    def _nested(
        self, absmax: Tensor, parts: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor | None]:
        """The parts of scales."""
        whole, code, offset = (
            parts[name] for name in ("nested_absmax", "nested_code", "nested_offset")
        )
        read = self.reads["absmax"]  # and by the same read, where each block was
        blocks = torch.arange(math.prod(read.view), device=absmax.device)
        group = read.of(blocks).reshape(-1)[:: self.nested_blocksize or 1] // self._whole_nested
        scales = whole.reshape(-1)[group]
        if self.nested_blocksize:
            return {"nested_absmax": scales}
        # As nf4.h has it: the product is rounded, then the sum.
        flat = code.reshape(-1)[absmax.long()].float() * scales.float() + offset.float()
        none = dict.fromkeys(("nested_absmax", "nested_code", "nested_offset"))
        return {"absmax": flat, **none}


def _nested_blocksize(whole: int, boundaries: Sequence[int], blocks_of_row: int) -> int:
    """The most scales that have one second-level scale in the whole weight and in the part; 0 where
    that are too few."""
    if whole == 0:
        return 0
    size = math.gcd(whole, blocks_of_row, *boundaries)
    return size if size >= min(_SMALLEST_NESTED, whole) else 0


def _checked(
    shape: tuple[int, int], dim: int, ranges: Ranges
) -> tuple[tuple[tuple[int, int], ...], tuple[int, int]]:
    """The ranges, and the shape of what they hold."""
    if len(shape) != 2:
        raise InvalidArgument(f"weight is of shape {shape}; expected two dimensions")
    if dim not in (0, 1):
        raise InvalidArgument(f"dim is {dim}; expected 0, of rows, or 1, of columns")
    found = tuple((int(begin), int(end)) for begin, end in ranges)
    if not found or any(not 0 <= begin < end <= shape[dim] for begin, end in found):
        raise InvalidArgument(
            f"ranges is {list(found)}; expected (begin, end) within the {shape[dim]} {AXES[dim]} "
            f"of the weight"
        )
    count = sum(end - begin for begin, end in found)
    return found, ((count, shape[1]) if dim == 0 else (shape[0], count))


def _named(dim: int, ranges: Ranges) -> str:
    return f"{AXES[dim]} {', '.join(f'{begin}:{end}' for begin, end in ranges)}"


def cut(weight: Weight[Tensor], dim: int, ranges: Ranges) -> Weight[Tensor]:
    """Rows (dim 0) or columns (dim 1) of a weight whose parts are tensors, in new memory, except
    what all weights share and what a part needs whole.

    Where a cut of an NF4 or FP4 weight falls inside a group of nested scales, the part's groups are
    smaller, or its scales are float32 (NF4Cut.nested_blocksize). Of integers with act order, a
    part of columns keeps all scales; one that nf4.reorder sorted is in the checkpoint's order.

    Raises InvalidArgument where a range does not begin and end with a block, a group, or a word.
    """
    if isinstance(weight, nf4.QuantizedTensor):
        made = NF4Cut.plan(weight.shape, weight.blocksize, weight.nested_blocksize, dim, ranges)
        parts = made.narrowed({name: getattr(weight, name) for name in made.reads})
        return made.assemble(parts, weight.format, weight.dtype)
    if isinstance(weight, nf4.Int4Tensor):
        from nf4.torch.distributed._cuts_int4 import cut_int4  # which imports this

        return cut_int4(weight, dim, ranges)
    raise no_weight("weight", weight)
