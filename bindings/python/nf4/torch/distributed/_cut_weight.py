"""cut: makes a weight of rows or columns of a 4-bit weight in memory:

part = cut(weight, 0, [(0, 4096)])                       # rows 0..4095
part = cut(weight, 0, [(0, 512), (8192, 8320)])          # in two projections of one weight
part = cut(weight, 1, [(4096, 8192)])                    # columns
"""

from __future__ import annotations

from torch import Tensor

import nf4
from nf4.errors import InvalidArgument
from nf4.torch import _int4_columns
from nf4.torch.distributed._cuts import Ranges
from nf4.torch.distributed._cuts_int4 import Int4Cut
from nf4.torch.distributed._cuts_nf4 import NF4Cut
from nf4.weight import Weight, no_weight


def cut(weight: Weight[Tensor], dim: int, ranges: Ranges) -> Weight[Tensor]:
    """Returns rows (dim 0) or columns (dim 1) of a weight whose parts are tensors. They are in new
    memory, except for tables that all weights share and parts that are needed whole.

    If a cut of an NF4 or FP4 weight falls inside a group of nested scales, the part has smaller
    groups, or float32 scales (NF4Cut.nested_blocksize). Columns of integers with act order keep all
    scales; a weight that nf4.reorder sorted is cut in the checkpoint's order.

    Raises InvalidArgument if a range does not begin and end at a block, a group or a word, and for
    a weight whose rows have several global scales.
    """
    if isinstance(weight, nf4.Int4Tensor):
        return _cut_int4(weight, dim, ranges)
    if not isinstance(weight, nf4.QuantizedTensor):
        raise no_weight("weight", weight)
    if weight.scale_bytes and weight.nested_blocksize:
        raise InvalidArgument("weight has a global scale for a part of its rows; expected one")
    made = NF4Cut.plan(weight.shape, weight.blocksize, weight.nested_blocksize, dim, ranges)
    parts = made.narrowed({name: getattr(weight, name) for name in made.reads})
    if weight.scale_bytes:
        parts["nested_absmax"] = weight.nested_absmax
    return made.assemble(parts, weight.format, weight.dtype, weight.scale_rule)


def _cut_int4(weight: nf4.Int4Tensor[Tensor], dim: int, ranges: Ranges) -> nf4.Int4Tensor[Tensor]:
    if dim == 1:
        weight = _int4_columns.in_order_of_checkpoint(weight)
    made = Int4Cut.plan(
        weight.layout,
        weight.shape,
        weight.group_size,
        dim,
        ranges,
        zeros=weight.zeros is not None,
        act_order=weight.g_idx is not None,
    )
    parts = made.narrowed({name: getattr(weight, name) for name in made.reads})
    return made.assemble({**parts, "permutation": weight.permutation if dim == 0 else None})
