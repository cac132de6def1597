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


def _base_of(layer: Any) -> NF4Linear | None:
    base = layer.get_base_layer()
    return base if isinstance(base, NF4Linear) else None


def _mergeable(layer: Any) -> NF4Linear | None:
    require_mergeable(layer.get_base_layer())
    return _base_of(layer)


def merge(
    original: Callable[..., None],
    to_merge: Callable[..., Sequence[str] | None],
    base_of: Callable[[Any], Any] = _mergeable,
    add: Callable[[Any, Any, str], None] = _merge,
) -> Callable[..., None]:
    """Wraps `merge` of PEFT's layers. to_merge: PEFT's check_adapters_to_merge. base_of: returns
    the module that has a layer's weight; None leaves the layer to PEFT. add(layer, base, adapter):
    merges one adapter."""

    @functools.wraps(original)
    @torch.no_grad()
    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        base = base_of(self)
        if base is None:
            original(self, safe_merge=safe_merge, adapter_names=adapter_names)
            return
        for adapter in to_merge(self, adapter_names) or ():
            if adapter in self.lora_A:
                add(self, base, adapter)
                self.merged_adapters.append(adapter)

    return merge


def unmerge(
    original: Callable[..., None],
    base_of: Callable[[Any], Any] = _base_of,
    subtract: Callable[[Any, Any, str], None] = _unmerge,
) -> Callable[..., None]:
    """Wraps `unmerge`, likewise."""

    @functools.wraps(original)
    @torch.no_grad()
    def unmerge(self: Any) -> None:
        base = base_of(self)
        if base is None or not self.merged:
            original(self)  # it warns if nothing is merged
            return
        while self.merged_adapters:
            adapter = self.merged_adapters[-1]
            if adapter in self.lora_A:
                subtract(self, base, adapter)
            self.merged_adapters.pop()

    return unmerge
