"""Initialises PEFT adapters that are on meta, as in a model on meta, with the values that PEFT
begins with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nf4.errors import InvalidArgument
from nf4.torch.distributed._reading import parts_of


class Untrained(NamedTuple):
    """An untrained adapter of a LoRA layer, and its halves."""

    layer: Any
    name: str
    how: Any  # init_lora_weights in its LoraConfig
    halves: tuple[nn.Module, nn.Module]

    def tensors(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        for half in self.halves:
            for name, parameter in half.named_parameters():
                yield half, name, parameter

    def begin(self) -> None:
        """Draws the whole adapter, which is small, and keeps this rank's part."""
        held = list(self.tensors())
        for half, name, own in held:
            half._parameters[name] = nn.Parameter(
                torch.empty(own.shape, dtype=own.dtype, device="cpu")
            )
        try:
            self.layer.reset_lora_parameters(self.name, self.how)
            for half, name, own in held:
                _keep(own, half._parameters[name])
        finally:
            for half, name, own in held:
                half._parameters[name] = own


def _keep(own: Tensor, whole: Tensor) -> None:
    with torch.no_grad():
        for local, offsets in parts_of(own):
            places = (slice(at, at + n) for at, n in zip(offsets, local.shape, strict=True))
            local.copy_(whole[tuple(places)])


def untrained(model: nn.Module) -> list[Untrained]:
    """Returns the adapters on meta. Raises InvalidArgument for one whose first values depend on the
    weight."""
    configs: dict[str, Any] = {}
    for module in model.modules():
        configs.update(getattr(module, "peft_config", None) or {})
    return [
        _of(path, layer, name, configs.get(name))
        for path, layer in model.named_modules()
        for name, half in (getattr(layer, "lora_A", None) or {}).items()
        if any(parameter.is_meta for parameter in half.parameters())
    ]


def _of(path: str, layer: nn.Module, name: str, config: Any) -> Untrained:
    how = getattr(config, "init_lora_weights", None)
    if how not in (True, "gaussian") or name in getattr(layer, "lora_variant", {}):
        raise InvalidArgument(
            f"{path} has adapter {name!r} on meta with init_lora_weights={how!r}; expected True or "
            f"'gaussian', and no DoRA or other variant: their values depend on the weight"
        )
    return Untrained(layer, name, how, (layer.lora_A[name], layer.lora_B[name]))


def begin(adapters: list[Untrained], seed: int) -> None:
    """Draws the same values on every rank, whatever it has drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # manual_seed would seed the GPUs' too
        for each in adapters:
            each.begin()
