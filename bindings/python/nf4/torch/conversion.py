"""convert and to_dense: replace a model's layers in place, those of other libraries by NF4Linear
and Int4Linear, and these by torch.nn.Linear."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from nf4.errors import InvalidArgument, kind_of, shown
from nf4.torch import _foreign_int4, _siblings, experts
from nf4.torch._checks import DTYPES, torch_dtype
from nf4.torch.modules import Int4Linear, NF4Linear
from nf4.typing import DTypeLike

_ACCELERATE = "_hf_hook"
_OURS = (NF4Linear, Int4Linear)

Maker: TypeAlias = Callable[[Any], nn.Module]


def _linear4bit() -> tuple[type, ...]:
    """bitsandbytes' classes with Linear4bit's forward. None where it is not imported: then no
    model has one."""
    modules = getattr(sys.modules.get("bitsandbytes"), "nn", None)
    names = ("Linear4bit", "LinearNF4", "LinearFP4")
    return tuple(getattr(modules, name) for name in names if hasattr(modules, name))


def is_in_4_bits(layer: nn.Module) -> bool:
    """Also of a class that is derived from ours or Linear4bit, which nothing replaces."""
    return isinstance(layer, (*_OURS, *_linear4bit()))


def _from_others(layer: nn.Module) -> Maker | None:
    """What makes a layer of ours of another library's; None if it is none."""
    if type(layer) in _linear4bit():
        return NF4Linear.from_bitsandbytes
    if not _foreign_int4.is_quantized(layer):
        return None
    return Int4Linear.from_module if _foreign_int4.why_left_alone(layer) is None else None


def convert(model: nn.Module, *, siblings: bool | Literal["all"] = True) -> list[str]:
    """Replaces the 4-bit linear layers of other libraries in a model, on the same memory:

    bitsandbytes        Linear4bit, by NF4Linear
    GPTQModel, AutoAWQ  those that hold the words of the checkpoint (backend torch or triton, GEMM),
                        by Int4Linear. GPTQModel reads GPTQ v1 as v2, and so is the layer's layout
    compressed-tensors  compressed layers of pack-quantized integers, by Int4Linear

    A layer that is in several places stays one layer. Layers that are converted already are left
    alone, and so are other classes derived from Linear4bit, which may compute something else. So
    are integers of other than 4 bits and layers with quantized activations, with a warning. The
    base layers within PEFT's adapters are replaced too. torch's forward hooks go along, and
    accelerate's, which move inputs to a layer's device. The model itself must not be such a layer,
    as nothing holds it.

    siblings    layers of one parent whose names say that they get the same x, such as q_proj,
                k_proj and v_proj, or gate_proj and up_proj, are multiplied in one call where
                torch.compile traces the model and while a CUDA graph is captured. Results have the
                same bits if nothing writes to x, a bias or a weight between the calls of these
                layers. It goes for all NF4Linear and Int4Linear in the model, converted or not.
                True: where the class of the parent is defined in transformers.models. "all": in
                every parent, for models that you know not to write so. False: each by itself

    PEFT merges adapters into an NF4Linear, whose weight is quantized again. LoRA that was added
    beside a Linear4bit is merged, too, before and after to_dense. Adapters of PEFT's other tuners
    that were added beside a Linear4bit look for its quant_state and cannot be merged: convert the
    model before PEFT adds them.

    Returns the names of the replaced layers. Raises InvalidArgument for a layer that is not
    quantized yet, is repacked (by bitsandbytes' CPU kernels, or for Marlin, Machete, ExLlama and
    the like), is offloaded, or has a forward of its own; then nothing was replaced.
    """
    if siblings not in (True, False, "all"):
        raise InvalidArgument(f"siblings is {shown(siblings)}; expected True, False or 'all'")
    instead = "NF4Linear.from_bitsandbytes or Int4Linear.from_module"
    replaced = _replace(model, _from_others, instead)
    _warn_of_others(model)
    _remove_decompression(model)
    if "transformers.quantizers.quantizer_bnb_4bit" in sys.modules and not any(
        isinstance(each, _linear4bit()) for each in model.modules()
    ):
        from nf4.torch import _marks  # which imports transformers

        _marks.take_over(model)
    if siblings:
        _siblings.join(model, unknown=siblings == "all")
    else:
        _siblings.separate(model)
    return replaced


def _warn_of_others(model: nn.Module) -> None:
    left = [
        f"{name}: {_foreign_int4.why_left_alone(layer)}"
        for name, layer in model.named_modules()
        if _foreign_int4.is_quantized(layer)
    ]
    if left:
        more = f", and {len(left) - 1} more" if len(left) > 1 else ""
        warnings.warn(f"quantized layers were left alone: {left[0]}{more}", stacklevel=3)


def _remove_decompression(model: nn.Module) -> None:
    """Of compressed-tensors, whose hook decompresses its layers in the first forward pass, where
    it has none left."""
    hook = getattr(model, "ct_decompress_hook", None)
    if hook is not None and not any(map(_foreign_int4.is_quantized, model.modules())):
        hook.remove()
        del model.ct_decompress_hook


def to_dense(model: nn.Module, dtype: DTypeLike | None = None) -> list[str]:
    """Replaces every NF4Linear and Int4Linear in a model by a torch.nn.Linear with the dequantized
    weight, and every NF4Experts and Int4Experts of a transformers model by a parameter. To merge
    adapters without rounding to 4 bits: to_dense(model), then PEFT's model.merge_and_unload().

    dtype  "fp32", "fp16", "bf16" or torch's. By default that of each weight before it was
           quantized, or of the scales of a checkpoint's integers; where no parameter of the model
           is of that dtype, the one that most of them are of

    Shared layers, hooks, the result and errors are as in convert. A transformers model without
    4-bit layers left is no longer marked as quantized, so that what it saves loads as dense.
    """
    if dtype is not None:
        dtype = torch_dtype(dtype)

    dtypes = _dense_dtypes(model)

    def dense(dequantize: Callable[[Any], Any]) -> Any:
        """Returns what a weight gives in the dtype that is wanted."""
        made = dequantize(dtype)
        own = getattr(made, "weight", made).dtype
        if dtype is not None or not dtypes or own in dtypes:
            return made
        return dequantize(max(dtypes, key=dtypes.__getitem__))

    replaced = _replace(
        model,
        lambda layer: (lambda each: dense(each.to_linear)) if type(layer) in _OURS else None,
        "its to_linear",
    )
    replaced += experts.make_dense(model, dense)
    if replaced and not any(map(is_in_4_bits, model.modules())):
        _forget_quantization(model)
    return replaced


def _dense_dtypes(model: nn.Module) -> Counter[torch.dtype]:
    """Counts the elements of a model's floating-point parameters, by dtype."""
    found = Counter[torch.dtype]()
    for parameter in model.parameters() if isinstance(model, nn.Module) else ():
        if parameter.dtype in DTYPES:
            found[parameter.dtype] += parameter.numel()
    return found


def _forget_quantization(model: nn.Module) -> None:
    """Removes the marks that transformers puts on a model that it loads in 4 bits, as its own
    dequantize() does."""
    for each in model.modules():
        for mark in ("quantization_config", "_is_quantized"):
            getattr(getattr(each, "config", None), "__dict__", {}).pop(mark, None)
        notes = vars(each)
        for mark in ("hf_quantizer", "quantization_method"):
            notes.pop(mark, None)
        for flag in ("is_quantized", "is_loaded_in_4bit"):
            if flag in notes:
                notes[flag] = False


def _replace(
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
    """What replaces a layer. InvalidArgument, with its name, where it cannot be replaced."""
    try:
        if type(layer) not in _OURS and any(
            hasattr(each, "to_local") for each in layer.parameters()
        ):
            raise InvalidArgument(
                "its weight is a DTensor, as from_pretrained(tp_plan=...) or fully_shard makes it; "
                "expected a whole one: load the model without a plan, make its layers 4-bit, then "
                "parallelize_module(model, mesh, nf4.torch.distributed.plan_of(model))"
            )
        if _foreign_int4.has_own_forward(layer) and not hasattr(layer, _ACCELERATE):
            raise InvalidArgument("the layer has a forward of its own, which would be lost")
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
        from accelerate.hooks import add_hook_to_module  # which put it there

        add_hook_to_module(made, getattr(layer, _ACCELERATE))
