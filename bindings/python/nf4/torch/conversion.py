"""convert: every Linear4bit of bitsandbytes in a model becomes an NF4Linear, in place; and
to_dense: every NF4Linear a torch.nn.Linear."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from nf4.errors import InvalidArgument, kind_of
from nf4.torch._checks import torch_dtype
from nf4.torch.modules import NF4Linear
from nf4.typing import DTypeLike

_ACCELERATE = "_hf_hook"


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
    base layers within PEFT's adapters are swapped too. Forward hooks of torch go along, and those
    by which accelerate moves what a layer is given to its device. The model itself must not be a
    Linear4bit: there is nowhere to put another.

    Adapters that PEFT put beside a Linear4bit cannot be merged once that is swapped, not even
    after to_dense, since they look for its quant_state: where they shall be, convert comes before
    PEFT.

    Returns the names of what was swapped. Raises InvalidArgument for a layer that is not
    quantized yet, is in bitsandbytes' layout for CPUs, is offloaded, or has a forward of its own;
    then nothing was swapped.
    """
    return _swap(model, _linear4bit(), NF4Linear.from_bitsandbytes, "NF4Linear.from_bitsandbytes")


def to_dense(model: nn.Module, dtype: DTypeLike | None = None) -> list[str]:
    """Swaps every NF4Linear in a model for a torch.nn.Linear of its numbers, as adapters need that
    are to be merged: to_dense(model), then PEFT's model.merge_and_unload().

    dtype  "fp32", "fp16", "bf16" or torch's; by default that of each weight before it was quantized

    What is kept, returned and refused is as in convert. A model of transformers in which no 4-bit
    layer is left is no longer said to be quantized, so that what it saves is loaded as it is.
    """
    if dtype is not None:
        dtype = torch_dtype(dtype)
    swapped = _swap(
        model, (NF4Linear,), lambda layer: layer.to_linear(dtype), "NF4Linear.to_linear"
    )
    in_4bit = (NF4Linear, *_linear4bit())  # and what is derived from them, which is not swapped
    if swapped and not any(isinstance(each, in_4bit) for each in model.modules()):
        _forget_quantization(model)
    return swapped


def _forget_quantization(model: nn.Module) -> None:
    """Takes away what transformers notes on a model that it loads in 4 bits, as its own
    dequantize() does."""
    for each in model.modules():
        config = getattr(each, "config", None)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        notes = vars(each)
        notes.pop("hf_quantizer", None)
        for flag in ("is_quantized", "is_loaded_in_4bit"):
            if flag in notes:
                notes[flag] = False


def _swap(
    model: nn.Module, kinds: tuple[type, ...], make: Callable[[Any], nn.Module], instead: str
) -> list[str]:
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is {kind_of(model)}; expected a torch.nn.Module")
    if type(model) in kinds:
        raise InvalidArgument(
            f"model is {kind_of(model)} itself; expected what holds it, or use {instead}"
        )
    made: dict[int, nn.Module] = {}
    places: list[tuple[nn.Module, str, str, nn.Module]] = []
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():  # named_children() leaves out repetitions
            if type(child) not in kinds:
                continue
            full = f"{path}.{name}".lstrip(".")
            if id(child) not in made:
                made[id(child)] = _made(full, child, make)
            places.append((parent, name, full, child))
    for layer in {id(child): child for *_, child in places}.values():
        _take_along(layer, made[id(layer)])
    for parent, name, _, child in places:
        setattr(parent, name, made[id(child)])
    return [full for _, _, full, _ in places]


def _made(name: str, layer: nn.Module, make: Callable[[Any], nn.Module]) -> nn.Module:
    try:
        if "forward" in vars(layer) and not hasattr(layer, _ACCELERATE):
            raise InvalidArgument("the layer has a forward of its own, which would be lost")
        return make(layer)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from None


def _take_along(layer: nn.Module, made: nn.Module) -> None:
    """Gives another layer the hooks of one that it takes the place of."""
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs",
                  "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
                  "_backward_hooks", "_backward_pre_hooks"):  # fmt: skip
        getattr(made, hooks).update(getattr(layer, hooks))
    if hasattr(layer, _ACCELERATE):
        from accelerate.hooks import add_hook_to_module  # which put it there

        add_hook_to_module(made, getattr(layer, _ACCELERATE))
