"""Cuts rows or columns out of the stored parts of a 4-bit weight: computes which elements of each
part a cut needs, and assembles the new weight. No code is dequantized, and the cut's values are
those of the whole weight.

Each kind of weight has a Cut: NF4Cut (_cuts_nf4.py), Int4Cut (_cuts_int4.py). plan() reads nothing;
assemble() takes what was read. cut() (_cut_weight.py) calls both on a weight in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nf4.errors import InvalidArgument

Ranges = Sequence[tuple[int, int]]
AXES = ("rows", "columns")


class Read(NamedTuple):
    """The elements of a stored part that a cut needs: these ranges along `dim`, one after another,
    of the part's elements viewed as `view`."""

    view: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, part: Tensor) -> Tensor:
        """Reads from a tensor into new memory, [..., the ranges' sum, ...]."""
        seen = part.reshape(self.view)
        pieces = [seen.narrow(self.dim, begin, end - begin) for begin, end in self.ranges]
        return torch.cat(pieces, self.dim)

    def runs(self) -> list[tuple[int, int]]:
        """Returns the same as ranges (first, past the last) of the stored elements, in order."""
        inner = math.prod(self.view[self.dim + 1 :])
        step = self.view[self.dim] * inner
        outer = range(0, math.prod(self.view[: self.dim]) * step, step) if step else ()
        return [
            (at + begin * inner, at + end * inner) for at in outer for begin, end in self.ranges
        ]


@dataclass(frozen=True)
class Cut:
    """The reads for a cut of a weight, and the new weight's shape.

    reads    what is read of each part, by name; None: all. Parts that the weight lacks have no
             entry
    shape    of the new weight, (rows, columns)
    """

    reads: dict[str, Read | None]
    shape: tuple[int, int]

    def narrowed(self, parts: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Returns what is read, from whole parts in memory."""
        found = {}
        for name, read in self.reads.items():
            part = parts.get(name)
            found[name] = part if read is None or part is None else read.of(part)
        return found


def checked(
    shape: tuple[int, int], dim: int, ranges: Ranges
) -> tuple[tuple[tuple[int, int], ...], tuple[int, int]]:
    """Checks the ranges. Returns them and the shape of what they hold."""
    if len(shape) != 2:
        raise InvalidArgument(f"weight is of shape {shape}; expected two dimensions")
    if dim not in (0, 1):
        raise InvalidArgument(f"dim is {dim}; expected 0 for rows or 1 for columns")
    found = tuple((int(begin), int(end)) for begin, end in ranges)
    if not found or any(not 0 <= begin < end <= shape[dim] for begin, end in found):
        raise InvalidArgument(
            f"ranges is {list(found)}; expected (begin, end) within the {shape[dim]} {AXES[dim]} "
            f"of the weight"
        )
    count = sum(end - begin for begin, end in found)
    return found, ((count, shape[1]) if dim == 0 else (shape[0], count))


def named(dim: int, ranges: Ranges) -> str:
    return f"{AXES[dim]} {', '.join(f'{begin}:{end}' for begin, end in ranges)}"
