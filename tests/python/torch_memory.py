"""Weights in torch tensors, and the ways to hand those to nf4."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import nf4
import numpy as np
import torch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PARTS = ("packed", "absmax", "nested_absmax", "nested_code", "nested_offset", "codebook")
Weight = TypeVar("Weight", nf4.QuantizedTensor, nf4.Int4Tensor)
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def tensor_of(array: np.ndarray, device: str) -> torch.Tensor:
    """A copy of a numpy array; numpy's bfloat16 is none of numpy's own, so by its bits."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).to(device).view(torch.bfloat16)
    return torch.from_numpy(np.array(array)).to(device)


def parts_of(q: Weight) -> dict[str, Any]:
    """The parts that it has, by name."""
    return {part.name: getattr(q, part.name) for part in q.parts()}


def weight_on(q: Weight, device: str) -> Weight:
    """A copy of a weight whose parts are torch tensors."""
    tensors = {name: tensor_of(np.asarray(part), device) for name, part in parts_of(q).items()}
    return dataclasses.replace(q, **tensors)


def empty_like(q: nf4.QuantizedTensor, device: str) -> nf4.QuantizedTensor:
    """A weight on the device to quantize into; the tables are copied, the rest is of 0x5a."""
    on_device = weight_on(q, device)
    for name in ("packed", "absmax", "nested_absmax", "nested_offset"):
        if getattr(on_device, name) is not None:
            getattr(on_device, name).view(-1).view(torch.uint8).fill_(0x5A)
    return on_device


def workspace_for(q: nf4.QuantizedTensor, device: str) -> torch.Tensor | None:
    needed = q.sizes.workspace_bytes
    return torch.empty(needed, dtype=torch.uint8, device=device) if needed else None


class DlpackOnly:
    """A tensor that can be had by DLPack only."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.tensor.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


ACCESS = {
    "cuda array interface": lambda tensor: tensor,
    "dlpack": DlpackOnly,
    "address": lambda tensor: tensor.data_ptr(),
}


def accessed(q: Weight, access: str) -> Weight:
    """The weight with every part handed over in one of the ways of ACCESS."""
    parts = {name: ACCESS[access](part) for name, part in parts_of(q).items()}
    return dataclasses.replace(q, **parts)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits, all NaNs as one."""
    raw = tensor.contiguous().view(_SIGNED[tensor.element_size()])
    if tensor.is_floating_point():
        return raw.masked_fill(torch.isnan(tensor), -1)
    return raw


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements differ in any bit; NaNs are alike."""
    assert (a.numel(), a.dtype) == (b.numel(), b.dtype)
    return int((bits(a.reshape(-1)) != bits(b.reshape(-1))).sum())
