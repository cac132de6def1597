"""Cuts (_cuts.py) of integer weights: GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

import nf4
from nf4.errors import InvalidArgument
from nf4.int4 import int4_shapes
from nf4.torch.distributed._cuts import Cut, Ranges, Read, checked, named
from nf4.typing import Int4Layout

_CODES_IN_A_WORD = 8


class _Axis(NamedTuple):
    """How a layout stores a part along rows or columns: the dimension, and how many rows or columns
    an element holds."""

    dim: int
    step: int


def _axes(layout: Int4Layout, dim: int, group: int) -> dict[str, _Axis | None]:
    """Returns the axis of each part, for rows (dim 0) or columns in groups of `group`. None: all of
    it is needed."""
    by_row = layout == "compressed-tensors"
    if dim == 0:
        packed = {"awq": _Axis(1, _CODES_IN_A_WORD), "compressed-tensors": _Axis(0, 1)}
        along = 0 if by_row else 1
        return {
            "packed": packed.get(layout, _Axis(1, 1)),
            "scales": _Axis(along, 1),
            "zeros": _Axis(along, _CODES_IN_A_WORD),
            "g_idx": None,
        }
    words = {"awq": _Axis(0, 1), "compressed-tensors": _Axis(1, _CODES_IN_A_WORD)}
    groups = _Axis(1 if by_row else 0, group) if group else None
    return {
        "packed": words.get(layout, _Axis(0, _CODES_IN_A_WORD)),
        "scales": groups,
        "zeros": groups,
        "g_idx": _Axis(0, 1),
    }


@dataclass(frozen=True)
class Int4Cut(Cut):
    """A cut of an Int4Tensor. group_size: that of the new weight."""

    layout: Int4Layout
    group_size: int

    @classmethod
    def plan(
        cls,
        layout: Int4Layout,
        shape: tuple[int, int],
        group_size: int,
        dim: int,
        ranges: Ranges,
        *,
        zeros: bool,
        act_order: bool = False,
    ) -> Int4Cut:
        """Plans a cut. dim 0: rows; 1: columns. zeros, act_order: whether the weight has zero
        points, and a g_idx. Raises InvalidArgument if a range does not begin and end at a group and
        a word."""
        ranges, made = checked(shape, dim, ranges)
        shapes = int4_shapes(layout, shape, group_size)
        views = {name: getattr(shapes, name) for name in ("packed", "scales", "zeros")}
        views["g_idx"] = shape[1:]
        size, group = group_size, 0
        if dim == 1:
            size, group = _groups(shape, shapes.groups, made[1], ranges, act_order)
        reads: dict[str, Read | None] = {}
        for name, axis in _axes(layout, dim, group).items():
            if (name == "zeros" and not zeros) or (name == "g_idx" and not act_order):
                continue
            if axis is None:
                reads[name] = None
                continue
            extent, step = shape[dim], axis.step
            in_words = name == "packed" or (name == "zeros" and dim == 0)
            if in_words and not _fits(ranges, extent, step, name == "packed"):
                raise InvalidArgument(
                    f"{named(dim, ranges)} cannot be cut from a weight of shape {shape}, layout "
                    f"{layout} and group_size {group_size}: a word of {name} has {step} of them"
                )
            found = tuple((begin // step, -(-end // step)) for begin, end in ranges)
            reads[name] = Read(views[name], axis.dim, found)
        int4_shapes(layout, made, size)  # also a part that the layout lacks
        return cls(reads, made, layout, size)

    def assemble(self, parts: Mapping[str, Tensor | None]) -> nf4.Int4Tensor[Tensor]:
        """Makes the new weight from what was read."""
        return nf4.Int4Tensor(
            **parts, layout=self.layout, shape=self.shape, group_size=self.group_size
        )


def _fits(ranges: Ranges, extent: int, step: int, is_packed: bool) -> bool:
    """Tells if each range begins and ends at an element, which holds `step` rows or columns. The
    last range may end anywhere in a word of zeros, the rest of which is not read then, and at the
    end of the weight."""
    ends = list(itertools.accumulate(end - begin for begin, end in ranges))
    whole = [*(begin for begin, _ in ranges), *ends[:-1]]
    if is_packed and ranges[-1][1] != extent:
        whole.append(ranges[-1][1])
    return all(at % step == 0 for at in whole)


def _groups(
    shape: tuple[int, int], groups: int, cols: int, ranges: Ranges, act_order: bool
) -> tuple[int, int]:
    """Returns the group_size of a cut with this many columns, and the group size by which scales
    are cut; 0: the cut keeps all scales."""
    if groups <= 1:
        return -1, 0
    size = shape[1] // groups
    if act_order:
        # The cut's columns belong to any group. Its group_size only determines the number of
        # groups.
        if cols % groups or cols // groups % _CODES_IN_A_WORD:
            raise InvalidArgument(
                f"{named(1, ranges)} cannot be cut from a weight of shape {shape} with act order: "
                f"{cols} columns have no {groups} groups of a multiple of {_CODES_IN_A_WORD}"
            )
        return cols // groups, 0
    if any(at % size for each in ranges for at in each):
        if len(ranges) == 1 and ranges[0][0] // size == (ranges[0][1] - 1) // size:
            return -1, size  # all within one group
        raise InvalidArgument(
            f"{named(1, ranges)} cannot be cut from a weight of shape {shape} and group_size "
            f"{size}: a cut is inside a group"
        )
    return size, size
