"""convert and to_dense: replace a model's layers in place, Linear4bit of bitsandbytes by NF4Linear,
and NF4Linear by torch.nn.Linear."""

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
    """bitsandbytes' classes with Linear4bit's forward. None where it is not imported: then no
    model has one."""
    modules = getattr(sys.modules.get("bitsandbytes"), "nn", None)
    names = ("Linear4bit", "LinearNF4", "LinearFP4")
    return tuple(getattr(modules, name) for name in names if hasattr(modules, name))


def convert(model: nn.Module) -> list[str]:
    """Replaces every bitsandbytes Linear4bit in a model by an NF4Linear around the same memory.

    A layer that is in several places stays one layer. Layers that are converted already are left
    alone, and so are other classes derived from Linear4bit, which may compute something else. The
    base layers within PEFT's adapters are replaced too. torch's forward hooks go along, and
    accelerate's, which move inputs to a layer's device. The model itself must not be a Linear4bit,
    as nothing holds it.

    PEFT's adapters beside a Linear4bit cannot be merged once it is replaced, not even after
    to_dense, since they look for its quant_state. To merge them, convert the model before PEFT
    adds them.

    Returns the names of the replaced layers. Raises InvalidArgument for a layer that is not
    quantized yet, is repacked for bitsandbytes' CPU kernels, is offloaded, or has a forward of its
    own; then nothing was replaced.
    """
    return _replace(
        model, _linear4bit(), NF4Linear.from_bitsandbytes, "NF4Linear.from_bitsandbytes"
    )


def to_dense(model: nn.Module, dtype: DTypeLike | None = None) -> list[str]:
    """Replaces every NF4Linear in a model by a torch.nn.Linear with the dequantized weight. To
    merge adapters: to_dense(model), then PEFT's model.merge_and_unload().

    dtype  "fp32", "fp16", "bf16" or torch's; by default that of each weight before it was quantized

    Shared layers, hooks, the result and errors are as in convert. A transformers model without
    4-bit layers left is no longer marked as quantized, so that what it saves loads as dense.
    """
    if dtype is not None:
        dtype = torch_dtype(dtype)
    replaced = _replace(
        model, (NF4Linear,), lambda layer: layer.to_linear(dtype), "NF4Linear.to_linear"
    )
    in_4bit = (NF4Linear, *_linear4bit())  # and what is derived from them, which is not replaced
    if replaced and not any(isinstance(each, in_4bit) for each in model.modules()):
        _forget_quantization(model)
    return replaced


def _forget_quantization(model: nn.Module) -> None:
    """Removes the marks that transformers puts on a model that it loads in 4 bits, as its own
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


def _replace(
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
    """Gives a layer the hooks of the one that it replaces."""
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs",
                  "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
                  "_backward_hooks", "_backward_pre_hooks"):  # fmt: skip
        getattr(made, hooks).update(getattr(layer, hooks))
    if hasattr(layer, _ACCELERATE):
        from accelerate.hooks import add_hook_to_module  # which put it there

        add_hook_to_module(made, getattr(layer, _ACCELERATE))
