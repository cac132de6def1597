"""Puts a quantized weight together from the tensors of a checkpoint, which vLLM's loaders hand over
one by one and in any order."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

import nf4
from nf4._prepared import prepare
from nf4.checkpoint.bnb import FORMATS as READ_FORMATS
from nf4.checkpoint.bnb import STATE_MARK, State, parse_state
from nf4.checkpoint.jsonio import parse_object
from nf4.torch._state import assembled

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
# The dtypes that the parts of a layer are expected to have, as vLLM warns of others. None: the
# model's, of a dense weight.
Expected: TypeAlias = dict[str, torch.dtype | None]
Quantizer: TypeAlias = Callable[[Tensor], nf4.QuantizedTensor]


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
        try:
            if part == "quant_state":  # other formats have other parts: this one says which it is
                self._state = self._parsed(tensor)
            return None if self._state is None or self.missing() else self._made(self._state)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def missing(self) -> list[str]:
        """Returns the names of parts that have not arrived."""
        return sorted(part or "weight" for part in self._needed() - self._parts.keys())

    def _needed(self) -> set[str]:
        return {"", "quant_state", *(self._state.tables() if self._state else ())}

    def _made(self, state: State) -> nf4.QuantizedTensor:
        for part in self._parts.keys() - self._needed():
            raise ValueError(f"it has {part}, but its quant_state is not nested")
        weight = assembled(self._parts, state, self._own_codebook(state.format))
        prepare(weight)  # checks the parts
        return weight

    def _parsed(self, quant_state: Tensor) -> State:
        data = quant_state.cpu().numpy().tobytes()
        fields = parse_object(data, "its quant_state", "it")
        format = fields.get("quant_type")
        if format not in FORMATS:
            raise ValueError(f"it is of {format!r}, neither nf4 nor fp4")
        return parse_state(fields, format)

    def _own_codebook(self, format: str) -> Tensor | None:
        """Returns quant_map; None if it is the format's codebook in quant_map's dtype."""
        table = self._parts["quant_map"].view(-1)
        standard = torch.from_numpy(nf4.codebook(format).copy()).to(table)
        return None if torch.equal(table, standard) else table.float()


def is_dense(tensor: Tensor) -> bool:
    """Tells a dense matrix from packed bytes, which are a column of any dtype."""
    return tensor.is_floating_point() and tensor.dim() == 2 and tensor.shape[1] != 1
