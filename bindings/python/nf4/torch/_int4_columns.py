"""The column order of integer weights: detects a g_idx without act order, and puts sorted columns
back in the checkpoint's order."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

import nf4
from nf4.errors import InvalidArgument
from nf4.torch._int4_weight import Int4Spec

_CODES_IN_A_WORD = 8
_BITS = 4


def plain_g_idx(weight: nf4.Int4Tensor | Int4Spec, device: torch.device | None = None) -> Tensor:
    """Returns the g_idx of a weight without act order."""
    cols = weight.shape[1]
    size = cols if weight.group_size == -1 else weight.group_size
    return torch.arange(cols, dtype=torch.int32, device=device) // max(size, 1)


def without_plain_g_idx(weight: nf4.Int4Tensor[Tensor], name: str = "g_idx") -> nf4.Int4Tensor:
    """Returns the weight without its g_idx if that is column / group_size or -1 throughout, because
    kernels are faster without one; else with the g_idx on the device of packed. Waits for a GPU.
    Raises InvalidArgument for an index that is out of range; `name` is the name of g_idx."""
    given = weight.g_idx
    if given is None or given.is_meta or weight.packed.is_meta:
        return weight
    columns = weight.shape[1:]
    if given.dtype not in (torch.int32, torch.int64) or tuple(given.shape) != columns:
        raise InvalidArgument(
            f"{name} is {given.dtype} of shape {tuple(given.shape)}; expected torch.int32 of "
            f"{columns}"
        )
    host = given.detach().cpu()
    if torch.equal(host, plain_g_idx(weight).to(host.dtype)) or bool((host == -1).all()):
        return dataclasses.replace(weight, g_idx=None)
    wrong = ((host < 0) | (host >= weight.groups)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise InvalidArgument(
            f"{name}[{at}] is {int(host[at])}; expected a group, 0 to {weight.groups - 1}"
        )
    return dataclasses.replace(weight, g_idx=given.to(weight.packed.device, torch.int32))


def in_order_of_checkpoint(weight: nf4.Int4Tensor[Tensor]) -> nf4.Int4Tensor[Tensor]:
    """Undoes nf4.reorder: returns the weight with g_idx and without a permutation."""
    if weight.permutation is None:
        return weight
    packed, cols = weight.packed, weight.shape[1]
    axis = 1 if weight.layout == "compressed-tensors" else 0
    stored = torch.empty_like(weight.permutation)  # column k is stored as column stored[k]
    stored[weight.permutation.long()] = torch.arange(cols, dtype=torch.int32, device=stored.device)
    g_idx = plain_g_idx(weight, stored.device)[stored.long()]
    words = packed.shape[axis]
    padding = torch.arange(cols, words * _CODES_IN_A_WORD, device=stored.device)
    places = torch.cat([stored.long(), padding]).view(words, _CODES_IN_A_WORD)
    along = (1, -1) if axis == 1 else (-1, 1)
    found = torch.zeros_like(packed)
    for nibble in range(_CODES_IN_A_WORD):
        place = places[:, nibble]
        source = packed.index_select(axis, place // _CODES_IN_A_WORD)
        codes = (source >> (place % _CODES_IN_A_WORD * _BITS).int().view(along)) & 15
        found |= codes << (nibble * _BITS)
    return dataclasses.replace(weight, packed=found, g_idx=g_idx, permutation=None)
