"""convert: every Linear4bit of bitsandbytes in a model becomes an NF4Linear, in place."""

from __future__ import annotations

import sys

from torch import nn

from nf4.errors import InvalidArgument
from nf4.torch.modules import NF4Linear


def _linear4bit() -> tuple[type, ...]:
    """bitsandbytes' classes whose forward is that of Linear4bit; none where it is not imported,
    for then no model has one."""
    modules = getattr(sys.modules.get("bitsandbytes"), "nn", None)
    names = ("Linear4bit", "LinearNF4", "LinearFP4")
    return tuple(getattr(modules, name) for name in names if hasattr(modules, name))


def convert(model: nn.Module) -> list[str]:
    """Swaps every bitsandbytes Linear4bit in a model for an NF4Linear around the same memory.

    A layer that is in several places stays one layer. What is converted already is left alone,
    and so are classes derived from Linear4bit elsewhere, which may compute something else; the
    base layers within PEFT's adapters are swapped too. Forward hooks of torch go along. The
    model itself must not be a Linear4bit: there is nowhere to put another.

    Returns the names of what was swapped. Raises InvalidArgument for a layer that is not
    quantized yet or is in bitsandbytes' layout for CPUs; then nothing was swapped.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    kinds = _linear4bit()
    if type(model) in kinds:
        raise InvalidArgument(
            f"model is a {type(model).__name__} itself; expected what holds it, or use "
            f"NF4Linear.from_bitsandbytes"
        )
    made: dict[int, NF4Linear] = {}
    places: list[tuple[nn.Module, str, str, int]] = []
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():  # named_children() leaves out repetitions
            if type(child) not in kinds:
                continue
            full = f"{path}.{name}".lstrip(".")
            if id(child) not in made:
                made[id(child)] = _converted(full, child)
            places.append((parent, name, full, id(child)))
    for parent, name, _, key in places:
        setattr(parent, name, made[key])
    return [full for _, _, full, _ in places]


def _converted(name: str, layer: nn.Module) -> NF4Linear:
    try:
        made = NF4Linear.from_bitsandbytes(layer)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from None
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs",
                  "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
                  "_backward_hooks", "_backward_pre_hooks"):  # fmt: skip
        getattr(made, hooks).update(getattr(layer, hooks))
    return made
