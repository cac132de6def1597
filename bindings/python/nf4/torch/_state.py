"""A 4-bit weight in a state_dict, under the keys that bitsandbytes gives its parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

import nf4
from nf4.checkpoint.bnb import State, parse_state
from nf4.checkpoint.weights import fields_of
from nf4.errors import InvalidArgument, kind_of
from nf4.torch._weight import Spec, WeightParts

_MARK = "quant_state.bitsandbytes__"
_NAMES = {"absmax": "absmax", "nested_absmax": "nested_absmax", "nested_code": "nested_quant_map"}
_FAST = (Tensor, nn.Parameter)


class QuantState(Protocol):
    """The attributes of bitsandbytes' QuantState that are read here. state2 and offset are None if
    flat."""

    absmax: Tensor
    code: Tensor
    shape: Sequence[int]
    dtype: torch.dtype
    blocksize: int
    quant_type: str
    nested: bool
    offset: Tensor | None
    state2: QuantState | None


class Loaded(NamedTuple):
    """A weight in a state_dict: its keys, without the prefix, and the weight."""

    keys: set[str]
    weight: nf4.QuantizedTensor | None


def standard_table(format: str, device: torch.device) -> Tensor:
    """Returns the codebook as bitsandbytes writes it: FP4's code 8 is +0 there, though its CUDA
    kernels decode it as -0, like libnf4."""
    return (torch.from_numpy(nf4.codebook(format).copy()) + 0.0).to(device)


def require_standard_table(name: str, table: Tensor | None, format: str) -> None:
    """Requires the stored table to be the format's codebook, because a layer computes with that
    one, and so does bitsandbytes whatever the table says. bitsandbytes stores it in torch's default
    dtype, so it is compared in its own dtype."""
    if table is None:
        return
    expected = standard_table(format, table.device).to(table.dtype)
    if not table.is_floating_point() or not torch.equal(table, expected):
        raise InvalidArgument(f"{name} is not the table of {format}; libnf4 uses no other table")


def save(weight: nf4.QuantizedTensor) -> dict[str, Tensor]:
    """Returns every part except packed, by its key after "weight.". On meta these are meta
    tensors."""
    device = weight.packed.device
    parts = {
        key: getattr(weight, name)
        for name, key in _NAMES.items()
        if getattr(weight, name) is not None
    }
    if weight.nested:
        # Layers may share the table, and safetensors refuses tensors that share memory.
        parts["nested_quant_map"] = weight.nested_code.clone()
    if not weight.scale_bytes:
        parts["quant_map"] = standard_table(weight.format, device)
    has_offset = weight.nested and device.type != "meta"
    state = State(
        weight.format,
        weight.blocksize,
        weight.dtype,
        weight.shape,
        weight.nested_blocksize,
        weight.nested_offset.item() if has_offset else 0.0,
        weight.scale_rule,
    )
    blob = torch.frombuffer(bytearray(state.to_json()), dtype=torch.uint8)
    parts[_MARK + weight.format] = blob.to(device) if device.type == "meta" else blob
    return parts


def _parse(blob: Tensor, format: str) -> State:
    try:
        fields = json.loads(bytes(blob.detach().cpu().to(torch.uint8).tolist()).decode())
        if not isinstance(fields, dict):
            raise ValueError("no JSON object")
        return parse_state(fields, format)
    except ValueError as error:  # covers UnicodeDecodeError and JSONDecodeError
        raise InvalidArgument(f"weight.{_MARK}{format}: {error}") from None


def as_bytes(packed: Tensor) -> Tensor:
    """Returns packed bytes as uint8, from any quant_storage. Memory is shared if they are
    contiguous."""
    if packed.dtype != torch.uint8:
        return packed.contiguous().view(torch.uint8)
    # The C++ extension takes no subclass of Parameter, such as bitsandbytes' Params4bit.
    kept = type(packed) in _FAST or not isinstance(packed, nn.Parameter)
    return packed if kept else packed.detach()


def bytes_of(packed: Tensor) -> Tensor:
    """Returns the same as [n, 1], the shape in which layers hold them."""
    return as_bytes(packed.detach()).contiguous().view(-1, 1)


def under(state_dict: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Returns the entries `name` and "name.*", without that prefix."""
    return {
        key.removeprefix(name).removeprefix("."): value
        for key, value in state_dict.items()
        if key == name or key.startswith(f"{name}.")
    }


def assembled(
    parts: Mapping[str, Tensor], state: State, codebook: Tensor | None = None
) -> nf4.QuantizedTensor:
    """Returns the weight of the parts of a quant_state, by their names in a checkpoint. Memory is
    shared. codebook: as in nf4.QuantizedTensor."""
    offset = torch.tensor(state.nested_offset, dtype=torch.float32, device=parts[""].device)
    return nf4.QuantizedTensor(
        packed=bytes_of(parts[""]),
        absmax=parts["absmax"],
        nested_absmax=parts["nested_absmax"] if "nested_absmax" in state.tables() else None,
        nested_code=parts["nested_quant_map"] if state.nested else None,
        nested_offset=offset if state.nested else None,
        codebook=codebook,
        **fields_of(state),
    )


def load(parts: dict[str, Tensor]) -> Loaded:
    """Returns the weight of a layer from the entries that `under` finds for "weight". `weight` is
    None if there is no quant_state. Raises InvalidArgument for a weight that is incomplete or
    contradicts itself."""
    marks = [key for key in parts if key.startswith(_MARK)]
    if not marks or "" not in parts:
        return Loaded(set(), None)
    format = marks[0].removeprefix(_MARK)
    state = _parse(parts[marks[0]], format)
    needed = list(state.tables())
    missing = [key for key in needed if key not in parts]
    if missing:
        raise InvalidArgument(f"weight.{missing[0]} is missing beside weight.{marks[0]}")
    require_standard_table("weight.quant_map", parts.get("quant_map"), format)
    weight = assembled(parts, state)
    return Loaded({"", *marks, *needed}, weight)


def require_quant_state(name: str, state: object) -> None:
    if not hasattr(state, "state2"):  # no other class has it
        raise InvalidArgument(f"{name} is {kind_of(state)}; expected a QuantState of bitsandbytes")


def require_layout(state: QuantState) -> None:
    if getattr(state, "packing_format_for_cpu", False):
        raise InvalidArgument(
            "the weight is in bitsandbytes' layout for CPUs, which its Linear4bit changes to when "
            "it is first used in eval mode; expected it as it was loaded"
        )


def parts_of(data: Tensor, state: QuantState) -> WeightParts:
    """Returns a weight of bitsandbytes from its packed bytes and its QuantState. Memory is shared,
    except for 16-bit scales. No value is read, so that nothing waits for a GPU."""
    outer = state.state2 if state.nested else None
    scales = (outer.absmax, outer.code, state.offset) if outer else (None, None, None)
    nested_blocksize = outer.blocksize if outer else 0
    spec = Spec.of(state.shape, state.quant_type, state.blocksize, nested_blocksize)
    parts = WeightParts(as_bytes(data), state.absmax, *scales, None, spec)
    return parts.with_float_scales()


def of_bitsandbytes(data: Tensor, state: QuantState) -> nf4.QuantizedTensor:
    """Returns the weight that a QuantState describes."""
    if data.is_meta:
        raise InvalidArgument(
            "the weight is on meta, where accelerate leaves offloaded weights; expected a loaded "
            "one"
        )
    require_layout(state)
    require_standard_table("quant_state.code", state.code, state.quant_type)
    parts = parts_of(data.detach(), state)
    return parts._replace(packed=bytes_of(parts.packed)).quantized(state.dtype)
