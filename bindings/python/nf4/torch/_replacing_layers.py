"""Replaces layers of a model in place, and keeps their hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from nf4.errors import InvalidArgument, kind_of
from nf4.torch import _foreign_int4
from nf4.torch.modules import Int4Linear, NF4Linear

_ACCELERATE = "_hf_hook"
OURS = (NF4Linear, Int4Linear)

Maker: TypeAlias = Callable[[Any], nn.Module]


def linear4bit() -> tuple[type, ...]:
    """Returns bitsandbytes' classes with Linear4bit's forward; () if bitsandbytes is not imported,
    because then no model has one."""
    modules = getattr(sys.modules.get("bitsandbytes"), "nn", None)
    names = ("Linear4bit", "LinearNF4", "LinearFP4")
    return tuple(getattr(modules, name) for name in names if hasattr(modules, name))


def is_in_4_bits(layer: nn.Module) -> bool:
    """Tells if a layer is in 4 bits. Classes derived from ours or Linear4bit count, though nothing
    replaces them."""
    return isinstance(layer, (*OURS, *linear4bit()))


def replace(
    model: nn.Module, maker_of: Callable[[nn.Module], Maker | None], instead: str
) -> list[str]:
    """Replaces the layers for which there is a maker."""
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is {kind_of(model)}; expected a torch.nn.Module")
    if maker_of(model) is not None:
        raise InvalidArgument(
            f"model is {kind_of(model)} itself; expected what holds it, or use {instead}"
        )
    made: dict[int, nn.Module] = {}
    places: list[tuple[nn.Module, str, str, nn.Module]] = []
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():  # named_children() leaves out repetitions
            make = None if child is None else maker_of(child)
            if make is None:
                continue
            full = f"{path}.{name}".lstrip(".")
            if id(child) not in made:
                made[id(child)] = made_of(full, child, make)
            places.append((parent, name, full, child))
    for layer in {id(child): child for *_, child in places}.values():
        take_along(layer, made[id(layer)])
    for parent, name, _, child in places:
        setattr(parent, name, made[id(child)])
    return [full for _, _, full, _ in places]


def made_of(name: str, layer: nn.Module, make: Maker) -> nn.Module:
    """Returns the layer that replaces one. Raises InvalidArgument, with its name, if it cannot."""
    try:
        if type(layer) not in OURS and any(
            hasattr(each, "to_local") for each in layer.parameters()
        ):
            raise InvalidArgument(
                "its weight is a DTensor, as from_pretrained(tp_plan=...) or fully_shard makes it; "
                "expected a whole one: load the model without a plan, make its layers 4-bit, then "
                "parallelize_module(model, mesh, nf4.torch.distributed.plan_of(model))"
            )
        if _foreign_int4.has_own_forward(layer) and not hasattr(layer, _ACCELERATE):
            raise InvalidArgument(
                "the layer has a forward of its own, which would be lost; expected that of its "
                "class: del layer.forward removes the other"
            )
        return make(layer)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from None


def take_along(layer: nn.Module, made: nn.Module) -> None:
    """Gives a layer the hooks of the one that it replaces."""
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs",
                  "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
                  "_backward_hooks", "_backward_pre_hooks"):  # fmt: skip
        getattr(made, hooks).update(getattr(layer, hooks))
    if hasattr(layer, _ACCELERATE):
        from accelerate.hooks import add_hook_to_module  # accelerate put the hook there

        add_hook_to_module(made, getattr(layer, _ACCELERATE))


def replace_one(model: nn.Module, name: str, make: Maker) -> None:
    """Replaces a layer. It is a function of its own, so that no variable holds the dense layer any
    longer."""
    layer = model.get_submodule(name)
    made = made_of(name, layer, make)
    take_along(layer, made)
    model.set_submodule(name, made)
