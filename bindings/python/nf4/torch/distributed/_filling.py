"""A quantized layer from its weight in a checkpoint: a rank reads what it has of it."""

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
from nf4.checkpoint.bnb import BnbWeight
from nf4.checkpoint.int4 import Int4Weight
from nf4.checkpoint.weights import Weight
from nf4.torch.distributed import _reading
from nf4.torch.modules import Int4Linear, NF4Linear, QuantizedLinear
from nf4.torch.modules.int4_linear import KEYS


def fill_layer(layer: QuantizedLinear, weight: Weight, checkpoint: Checkpoint) -> None:
    """FormatError where the layer is of another kind, format, blocksize or shape."""
    _require_alike(layer, weight)
    state = layer.state_dict()
    if not any(isinstance(each, DTensor) for each in state.values()):
        _fill_whole(layer, weight, checkpoint)
    elif isinstance(weight, Int4Weight):
        _fill_int4(layer, state, weight, checkpoint)
    else:
        _fill_nf4(layer, state, weight, checkpoint)


def _require_alike(layer: QuantizedLinear, weight: Weight) -> None:
    is_int4 = isinstance(weight, Int4Weight)
    if isinstance(layer, Int4Linear) != is_int4:
        reason = f"it is in {weight.format}, but {type(layer).__name__} in the model"
        raise FormatError(weight.path, reason, weight.name)
    stored = {"format": weight.format, **weight.describe()}
    names = ("layout", "group_size") if is_int4 else ("format", "blocksize", "nested_blocksize")
    pairs = {name: (stored[name], getattr(layer, name)) for name in names}
    pairs["shape"] = (weight.shape, (layer.out_features, layer.in_features))
    for name, (theirs, own) in pairs.items():
        if theirs != own:
            reason = f"its {name} is {theirs}, but {own} in the model"
            raise FormatError(weight.path, reason, weight.name)


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _fill_whole(layer: Any, weight: Weight, checkpoint: Checkpoint) -> None:
    read = weight.load(checkpoint)
    if getattr(read, "codebook", None) is not None:
        raise _not_standard(weight)
    tensors = {part.name: _tensor(getattr(read, part.name)) for part in read.parts()}
    with torch.no_grad():
        if isinstance(layer, Int4Linear):
            layer._load_weight(tensors, assign=False)
        else:
            layer._load_weight(dataclasses.replace(read, **tensors), assign=False)


def _not_standard(weight: Weight) -> FormatError:
    reason = f"its quant_map is not the table of {weight.format}; no other is computed with"
    return FormatError(weight.path, reason, weight.name)


def _fill_nf4(
    layer: NF4Linear, state: dict[str, Tensor], weight: BnbWeight, checkpoint: Checkpoint
) -> None:
    table = checkpoint.read(weight.parts["quant_map"].name).view(np.float32)
    if not np.array_equal(table, nf4.codebook(weight.format)):
        raise _not_standard(weight)
    for part in ("", "absmax", "nested_absmax"):
        if part in weight.parts:
            info = weight.parts[part]
            own = state[f"weight.{part}".rstrip(".")]
            _reading.fill(own, checkpoint.owner[info.name], info, as_bytes=not part)
    if weight.state.nested_blocksize:
        code = checkpoint.read(weight.parts["nested_quant_map"].name).view(np.float32)
        # In memory of its own: layers may share the one that they have.
        layer.nested_code = torch.from_numpy(code).to(layer.nested_code.device)
        layer.nested_offset.fill_(weight.state.nested_offset)
    layer.dtype_before = weight.dtype


def _fill_int4(
    layer: Int4Linear, state: dict[str, Tensor], weight: Int4Weight, checkpoint: Checkpoint
) -> None:
    keys = KEYS[layer.layout]
    for part in ("packed", "scales", "zeros"):
        if part in weight.parts:
            info = weight.parts[part]
            _reading.fill(state[keys[part]], checkpoint.owner[info.name], info)
    if "zeros" in weight.parts:
        own = state[keys["zeros"]]
        own = own.to_local() if isinstance(own, DTensor) else own
        weight.check_zeros(own.cpu().numpy())
    g_idx = weight.g_idx(checkpoint)
    device = state[keys["packed"]].device
    setattr(layer, keys.get("g_idx", "g_idx"), None if g_idx is None else _tensor(g_idx).to(device))
    if layer.layout == "compressed-tensors":
        layer.weight_shape.copy_(torch.tensor(weight.shape))
