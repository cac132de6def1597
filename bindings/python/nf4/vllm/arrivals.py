"""Puts a quantized weight together from the tensors of a checkpoint, which vLLM's loaders hand over
one by one and in any order."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

import nf4
from nf4.checkpoint.bnb import FORMATS as READ_FORMATS
from nf4.checkpoint.bnb import STATE_MARK, State, parse_state
from nf4.checkpoint.jsonio import parse_object
from nf4.torch._weight import PARTS as TENSORS

FORMATS = ("nf4", "fp4")
# The parts of bitsandbytes' weights in a checkpoint, and the names of vLLM's parameters for them.
# "" is the packed bytes, or a dense weight.
PARTS = ("", "absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state")
RENAMED = {
    **{f".weight.{part}": f".weight_{part}" for part in PARTS[1:5]},
    **{f".weight{STATE_MARK}{format}": ".weight_quant_state" for format in READ_FORMATS},
}
# The same for stacks of experts (docs/experts.md), which vLLM knows by the names of dense stacks.
_STACK = r"(\.experts\.(?:gate_up|down)_proj)\.weight"
RENAMED_STACKS = {
    re.compile(rf"{_STACK}$"): r"\1",
    re.compile(rf"{_STACK}\.({'|'.join(PARTS[1:5])})$"): r"\1_\2",
    re.compile(rf"{_STACK}\.quant_state\..*$"): r"\1_quant_state",
    re.compile(r"\.block_sparse_moe\.experts\.gate_up_proj"): ".block_sparse_moe.experts.w13",
    re.compile(r"\.block_sparse_moe\.experts\.down_proj"): ".block_sparse_moe.experts.w2",
}
Quantizer: TypeAlias = Callable[[Tensor], nf4.QuantizedTensor]
_DTYPES = {"U8": torch.uint8, "F32": torch.float32}


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a layer's tensors are expected to be. vLLM warns of tensors of other dtypes."""

    is_dense: bool
    absmax: torch.dtype

    def dtypes(self, of_model: torch.dtype) -> dict[str, torch.dtype]:
        """Returns the dtype of each part."""
        return {
            **dict.fromkeys(PARTS, torch.float32),
            "": of_model if self.is_dense else torch.uint8,
            "absmax": self.absmax,
            "quant_state": torch.uint8,
        }


class Arrivals:
    """The parts of one weight that have arrived. name: of the weight, for errors."""

    def __init__(self, name: str):
        self.name = name
        self._parts: dict[str, Tensor] = {}
        self._state: State | None = None

    def add(self, part: str, tensor: Tensor) -> nf4.QuantizedTensor | Tensor | None:
        """Returns the weight, or a dense one [rows, cols], if this part makes it complete; else
        None. Raises ValueError for parts that are not of one weight in NF4 or FP4."""
        if part in self._parts:
            raise ValueError(f"{self.name} has two tensors for {part or 'its packed bytes'}")
        self._parts[part] = tensor
        if part == "" and is_dense(tensor):
            return tensor
        if part == "quant_state":  # other formats have other parts: this one says which it is
            self._state = self._parsed(tensor)
        return None if self._state is None or self.missing() else self._made(self._state)

    def missing(self) -> list[str]:
        """Returns the names of parts that have not arrived."""
        needed = {"", "absmax", "quant_map", "quant_state"}
        if any(part.startswith("nested") for part in self._parts) or (
            "absmax" in self._parts and self._parts["absmax"].dtype == torch.uint8
        ):
            needed |= {"nested_absmax", "nested_quant_map"}
        return sorted(part or "weight" for part in needed - self._parts.keys())

    def _made(self, state: State) -> nf4.QuantizedTensor:
        for part, (dtype, elements) in state.tables().items():
            found = self._parts.get(part)
            is_map = part == "quant_map"  # in torch's default dtype
            if (
                found is None
                or found.numel() != elements
                or not (is_map or found.dtype == _DTYPES[dtype])
            ):
                raise ValueError(f"{self.name}: its {part} is not what its quant_state says")
        packed = self._parts[""].contiguous().view(torch.uint8).view(-1)
        if packed.numel() != state.packed_bytes:
            raise ValueError(
                f"{self.name} has {packed.numel()} packed bytes; its shape takes "
                f"{state.packed_bytes}"
            )
        nested = state.nested_blocksize != 0
        offset = torch.tensor([state.nested_offset], dtype=torch.float32, device="cpu")
        return nf4.QuantizedTensor(
            packed=packed,
            absmax=self._parts["absmax"].view(-1),
            nested_absmax=self._parts["nested_absmax"].view(-1) if nested else None,
            nested_code=self._parts["nested_quant_map"].view(-1) if nested else None,
            nested_offset=offset if nested else None,
            codebook=self._own_codebook(state.format),
            shape=state.shape,
            format=state.format,
            blocksize=state.blocksize,
            nested_blocksize=state.nested_blocksize,
            dtype=state.dtype,
        )

    def _parsed(self, quant_state: Tensor) -> State:
        data = bytes(quant_state.cpu().numpy().tobytes())
        fields = parse_object(data, self.name, "its quant_state")
        format = fields.get("quant_type")
        if format not in FORMATS:
            raise ValueError(f"{self.name} is of {format!r}, neither nf4 nor fp4")
        try:
            return parse_state(fields, format)
        except ValueError as error:
            raise ValueError(f"{self.name}: its quant_state: {error}") from None

    def _own_codebook(self, format: str) -> Tensor | None:
        """Returns quant_map; None if it is the format's codebook in quant_map's dtype."""
        table = self._parts["quant_map"].view(-1)
        standard = torch.from_numpy(nf4.codebook(format).copy()).to(table)
        return None if torch.equal(table, standard) else table.float()


def is_dense(tensor: Tensor) -> bool:
    """Tells a dense matrix from packed bytes, which are a column of any dtype."""
    return tensor.is_floating_point() and tensor.dim() == 2 and tensor.shape[1] != 1


def to_device(weight: nf4.QuantizedTensor, device: torch.device) -> nf4.QuantizedTensor:
    """Returns the weight with its parts on a device, contiguous and in memory of their own."""
    moved = {
        name: torch.empty_like(part, device=device).copy_(part)
        for name in TENSORS
        if (part := getattr(weight, name)) is not None
    }
    return dataclasses.replace(weight, **moved)
