"""Fills a quantized layer from its weight in a checkpoint. A rank reads only its own part."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import nf4
from nf4.checkpoint import Checkpoint, FormatError
from nf4.checkpoint.int4 import Int4Weight
from nf4.checkpoint.weights import Weight
from nf4.torch._int4_weight import KEYS
from nf4.torch.distributed import _reading
from nf4.torch.distributed._cuts_int4 import Int4Cut
from nf4.torch.distributed._cuts_nf4 import NF4Cut
from nf4.torch.modules import Int4Linear, QuantizedLinear
from nf4.torch.modules.base import CutOf, QuantizedModule
from nf4.torch.modules.nf4_weight import NF4Weight


def fill_layer(layer: QuantizedModule, weight: Weight, checkpoint: Checkpoint) -> None:
    """Fills a layer. Raises FormatError if it is of another kind, format, blocksize or shape."""
    _require_alike(layer, weight)
    state = layer.state_dict()
    if layer.cut_of is not None:
        _fill_cut(layer, weight, checkpoint)
    elif not any(isinstance(each, DTensor) for each in state.values()):
        _fill_whole(layer, weight, checkpoint)
    elif isinstance(weight, Int4Weight):
        _fill_int4(layer, state, weight, checkpoint)
    else:
        _fill_nf4(layer, state, weight, checkpoint)
    if getattr(layer, "weight_shape", None) is not None:  # only compressed-tensors has it
        layer.weight_shape.copy_(torch.tensor((layer.out_features, layer.in_features)))


def _require_alike(layer: QuantizedModule, weight: Weight) -> None:
    is_int4 = isinstance(weight, Int4Weight)
    if isinstance(layer, Int4Linear) != is_int4:
        reason = f"it is in {weight.format}, but {type(layer).__name__} in the model"
        raise FormatError(weight.path, reason, weight.name)
    stored = {"format": weight.format, **weight.describe()}
    # A cut of a weight may have other groups of scales than the whole.
    names = ("layout",) if is_int4 else ("format", "blocksize")
    if layer.cut_of is None:
        names += ("group_size",) if is_int4 else ("nested_blocksize",)
    if not is_int4:
        stored["scale_rule"] = weight.state.scale_rule
        names += ("scale_rule",)
    pairs = {name: (stored[name], getattr(layer, name)) for name in names}
    pairs["shape"] = (weight.shape, _whole_shape(layer))
    for name, (theirs, own) in pairs.items():
        if theirs != own:
            reason = f"its {name} is {theirs}, but {own} in the model"
            raise FormatError(weight.path, reason, weight.name)


def _whole_shape(layer: Any) -> tuple[int, ...]:
    if layer.cut_of is not None:
        return layer.cut_of.shape
    if isinstance(layer, NF4Weight):
        return layer.spec.shape
    return layer.out_features, layer.in_features


def tensor_of(array: np.ndarray) -> Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _fill_whole(layer: Any, weight: Weight, checkpoint: Checkpoint) -> None:
    read = weight.load(checkpoint)
    if getattr(read, "codebook", None) is not None:
        raise _not_standard(weight)
    tensors = {part.name: tensor_of(getattr(read, part.name)) for part in read.parts()}
    _take(layer, dataclasses.replace(read, **tensors))


def _take(layer: Any, read: nf4.Weight[Tensor]) -> None:
    """Copies the parts into the layer's memory."""
    with torch.no_grad():
        if isinstance(layer, Int4Linear):
            parts = {part.name: getattr(read, part.name) for part in read.parts()}
            layer._load_weight(parts, assign=False)
            return
        offset = read.nested_offset  # the shapes that a layer has
        shaped = {} if offset is None else {"nested_offset": offset.reshape(())}
        packed = read.packed.reshape(-1, 1)
        layer._load_weight(dataclasses.replace(read, packed=packed, **shaped), assign=False)


def _fill_cut(layer: QuantizedLinear, weight: Weight, checkpoint: Checkpoint) -> None:
    cut = _int4_cut if isinstance(weight, Int4Weight) else _nf4_cut
    plan = cut(layer.cut_of, weight, checkpoint)
    is_int4 = isinstance(weight, Int4Weight)
    parts = {name: tensor_of(part) for name, part in weight.whole_parts(checkpoint).items()}
    for name, read in plan.reads.items():
        info = weight.stored(name)
        if info is not None:
            file, as_bytes = checkpoint.owner[info.name], name == "packed" and not is_int4
            parts[name] = _reading.read_part(file, info, read, as_bytes=as_bytes)
    if is_int4:
        _take(layer, plan.assemble(parts))
        return
    rule = weight.state.scale_rule
    _take(layer, plan.assemble({**parts, "codebook": None}, weight.format, weight.dtype, rule))


def _nf4_cut(of: CutOf, weight: Weight, checkpoint: Checkpoint) -> NF4Cut:
    _require_standard(weight, checkpoint)
    state = weight.state
    return NF4Cut.plan(of.shape, state.blocksize, state.nested_blocksize, of.dim, of.ranges)


def _int4_cut(of: CutOf, weight: Int4Weight, checkpoint: Checkpoint) -> Int4Cut:
    return Int4Cut.plan(
        weight.state.layout.name,
        of.shape,
        weight.state.group_size,
        of.dim,
        of.ranges,
        zeros="zeros" in weight.parts,
        act_order=weight.g_idx(checkpoint) is not None,
    )


def _not_standard(weight: Weight) -> FormatError:
    reason = f"its quant_map is not the table of {weight.format}; libnf4 uses no other table"
    return FormatError(weight.path, reason, weight.name)


def _require_standard(weight: Weight, checkpoint: Checkpoint) -> None:
    if weight.own_codebook(checkpoint) is not None:
        raise _not_standard(weight)


def _fill_nf4(
    layer: NF4Weight,
    state: dict[str, Tensor],
    weight: Weight,
    checkpoint: Checkpoint,
) -> None:
    _require_standard(weight, checkpoint)
    if weight.stored("packed") is None:  # its experts have a tensor each
        _fill_joined(layer, state, weight, checkpoint)
        return
    for part in ("packed", "absmax", "nested_absmax"):
        info, is_packed = weight.stored(part), part == "packed"
        if info is not None:
            own = state["weight" if is_packed else f"weight.{part}"]
            _reading.fill(own, checkpoint.owner[info.name], info, as_bytes=is_packed)
    table = weight.stored("nested_code")
    if table is not None:
        code = checkpoint.read(table.name).view(np.float32)
        # The copy is in new memory, because layers may share the one that they have.
        layer.nested_code = torch.from_numpy(code).to(layer.nested_code.device)
        layer.nested_offset.fill_(weight.state.nested_offset)
    layer.dtype_before = weight.dtype


def _fill_joined(
    layer: NF4Weight, state: dict[str, Tensor], weight: Weight, checkpoint: Checkpoint
) -> None:
    """Reads a stack from the matrices of its experts into host memory, and copies this rank's
    part."""
    read = weight.load(checkpoint)
    whole = {"weight": read.packed.reshape(-1, 1), "weight.absmax": read.absmax.reshape(-1)}
    if read.nested_absmax is not None:
        whole["weight.nested_absmax"] = read.nested_absmax
    with torch.no_grad():
        for key, array in whole.items():
            for local, offsets in _reading.parts_of(state[key]):
                begin = offsets[0]
                local.copy_(tensor_of(array[begin : begin + local.shape[0]]))
    layer.dtype_before = weight.dtype


def _fill_int4(
    layer: Int4Linear, state: dict[str, Tensor], weight: Int4Weight, checkpoint: Checkpoint
) -> None:
    keys = KEYS[layer.layout]
    for part in ("packed", "scales", "zeros"):
        if part in weight.parts:
            info = weight.parts[part]
            _reading.fill(state[keys[part]], checkpoint.owner[info.name], info)
        if part == "zeros" and part in weight.parts:
            for local, _ in _reading.parts_of(state[keys[part]]):
                weight.check_zeros(local.cpu().numpy())
    g_idx = weight.g_idx(checkpoint)
    device = state[keys["packed"]].device
    setattr(
        layer, keys.get("g_idx", "g_idx"), None if g_idx is None else tensor_of(g_idx).to(device)
    )
