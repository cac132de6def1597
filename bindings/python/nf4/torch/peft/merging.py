"""Merges PEFT's adapters into an NF4Linear, and unmerges them, as PEFT does for bitsandbytes'
Linear4bit: the weight is dequantized, changed and quantized again, which rounds it each time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nf4.torch._checks import is_finite
from nf4.torch.modules import Int4Linear, NF4Linear
from nf4.torch.peft.dense_weight import require_mergeable, whole


def dequantized(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps PEFT's dequantize_module_weight, by which DoRA reads weights."""

    @functools.wraps(original)
    def dequantize_module_weight(module: torch.nn.Module) -> Any:
        if isinstance(module, NF4Linear):
            return module.dequantize()
        if isinstance(module, Int4Linear):
            return whole(module)
        return original(module)

    return dequantize_module_weight


def require_finite(tensor: Tensor, adapter: str) -> None:
    """Refuses NaN and Inf, which 4 bits cannot store."""
    if not is_finite(tensor):
        raise ValueError(f"the merged weight is not finite; adapter {adapter} seems to be broken")


def _merge(layer: Any, base: NF4Linear, adapter: str) -> None:
    base.require_unprepared()
    dense = base.dequantize()
    if adapter in layer.lora_variant:
        merged = layer.lora_variant[adapter].merge_safe(layer, adapter, dense)
    else:
        merged = dense + layer.get_delta_weight(adapter)
    bias = None
    if layer.lora_bias[adapter]:
        if base.bias is None:
            raise RuntimeError(
                "an adapter with lora_bias=True cannot be merged: the base layer has no bias"
            )
        bias = base.bias + layer.lora_B[adapter].bias * layer.scaling[adapter]
        require_finite(bias, adapter)
    require_finite(merged, adapter)
    base.requantize(merged)
    if bias is not None:
        base.bias.data = bias.detach().to(base.bias.dtype)


def _unmerge(layer: Any, base: NF4Linear, adapter: str) -> None:
    base.require_unprepared()
    dense = base.dequantize()
    if adapter in layer.lora_variant:
        before = layer.lora_variant[adapter].unmerge(layer, adapter, dense)
    else:
        before = dense - layer.get_delta_weight(adapter)
    require_finite(before, adapter)
    base.requantize(before)
    if layer.lora_bias[adapter]:
        base.bias.data -= layer.lora_B[adapter].bias * layer.scaling[adapter]


def merge(
    original: Callable[..., None], to_merge: Callable[..., Sequence[str] | None]
) -> Callable[..., None]:
    """Wraps `merge` of PEFT's layers. to_merge: PEFT's check_adapters_to_merge."""

    @functools.wraps(original)
    @torch.no_grad()
    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        base = self.get_base_layer()
        require_mergeable(base)
        if not isinstance(base, NF4Linear):
            original(self, safe_merge=safe_merge, adapter_names=adapter_names)
            return
        for adapter in to_merge(self, adapter_names) or ():
            if adapter in self.lora_A:
                _merge(self, base, adapter)
                self.merged_adapters.append(adapter)

    return merge


def unmerge(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    @torch.no_grad()
    def unmerge(self: Any) -> None:
        base = self.get_base_layer()
        if not self.merged or not isinstance(base, NF4Linear):
            original(self)  # it warns if nothing is merged
            return
        while self.merged_adapters:
            adapter = self.merged_adapters[-1]
            if adapter in self.lora_A:
                _unmerge(self, base, adapter)
            self.merged_adapters.pop()

    return unmerge
