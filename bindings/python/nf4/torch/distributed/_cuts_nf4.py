"""Cuts (_cuts.py) of a QuantizedTensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import nf4
from nf4.errors import InvalidArgument
from nf4.torch.distributed._cuts import Cut, Ranges, Read, checked, named
from nf4.typing import ScaleRuleName

# The smallest nested group, in scales: wgmma kernels take no fewer, and with fewer the scales are
# hardly smaller than flat ones.
_SMALLEST_NESTED = 8


@dataclass(frozen=True)
class NF4Cut(Cut):
    """A cut of a QuantizedTensor. nested_blocksize: that of the new weight, which is the whole
    weight's, or less if the cut falls inside its nested groups, or 0: the scales become flat."""

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
        """Plans a cut. dim 0: rows; 1: columns. Raises InvalidArgument if a range does not begin
        and end at a block."""
        ranges, made = checked(shape, dim, ranges)
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
                    f"{named(dim, ranges)} cannot be cut from {in_weight}: a cut is inside a block"
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
        self,
        parts: Mapping[str, Tensor | None],
        format: str,
        dtype: str = "fp32",
        scale_rule: ScaleRuleName | None = None,
    ) -> nf4.QuantizedTensor[Tensor]:
        """Makes the new weight from what was read. dtype and scale_rule: as in QuantizedTensor."""
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
            scale_rule=scale_rule,
            dtype=dtype,
        )

    def _nested(
        self, absmax: Tensor, parts: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor | None]:
        """Returns the parts of the scales."""
        whole, code, offset = (
            parts[name] for name in ("nested_absmax", "nested_code", "nested_offset")
        )
        read = self.reads["absmax"]  # the same read of indices: each block's old place
        blocks = torch.arange(math.prod(read.view), device=absmax.device)
        group = read.of(blocks).reshape(-1)[:: self.nested_blocksize or 1] // self._whole_nested
        scales = whole.reshape(-1)[group]
        if self.nested_blocksize:
            return {"nested_absmax": scales}
        return flat_scales(absmax, scales, code, offset)


def flat_scales(
    codes: Tensor, scales: Tensor, code: Tensor, offset: Tensor
) -> dict[str, Tensor | None]:
    """Returns the parts of float32 scales, by the names of nf4.QuantizedTensor. codes, scales: the
    scale codes of all blocks, and the second-level scale of each."""
    # nf4.h specifies this: the product is rounded, then the sum.
    flat = code.reshape(-1)[codes.long()].float() * scales.float() + offset.float()
    return {"absmax": flat, **dict.fromkeys(("nested_absmax", "nested_code", "nested_offset"))}


def _nested_blocksize(whole: int, boundaries: Sequence[int], blocks_of_row: int) -> int:
    """Returns the largest group of scales that has one second-level scale in the whole weight and
    in the cut; 0 if that is too small."""
    if whole == 0:
        return 0
    size = math.gcd(whole, blocks_of_row, *boundaries)
    return size if size >= min(_SMALLEST_NESTED, whole) else 0
