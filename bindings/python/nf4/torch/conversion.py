"""convert: replaces the 4-bit layers of other libraries by NF4Linear and Int4Linear, in place."""

from __future__ import annotations

import sys
import warnings
from typing import Literal

from torch import nn

from nf4.errors import InvalidArgument, shown
from nf4.torch import _foreign_int4, _siblings
from nf4.torch._replacing_layers import Maker, linear4bit, replace
from nf4.torch.modules import Int4Linear, NF4Linear


def _from_others(layer: nn.Module) -> Maker | None:
    """Returns what makes our layer from another library's; None if this is not such a layer."""
    if type(layer) in linear4bit():
        return NF4Linear.from_bitsandbytes
    if not _foreign_int4.is_quantized(layer):
        return None
    return Int4Linear.from_module if _foreign_int4.why_left_alone(layer) is None else None


def convert(model: nn.Module, *, siblings: bool | Literal["all"] = True) -> list[str]:
    """Replaces the 4-bit linear layers of other libraries in a model. The new layers share their
    memory:

    bitsandbytes        Linear4bit, by NF4Linear
    GPTQModel, AutoAWQ  layers that hold the words of the checkpoint (backend torch or triton,
                        GEMM), by Int4Linear. GPTQModel converts GPTQ v1 to v2, which is the layer's
                        layout
    compressed-tensors  compressed layers of pack-quantized integers, by Int4Linear

    A layer that is in several places stays one layer. Converted layers are left alone, and so are
    other classes derived from Linear4bit, which may compute something else. Integers of other than
    4 bits and layers with quantized activations are left alone with a warning. The base layers
    within PEFT's adapters are replaced too. The new layers keep torch's hooks and accelerate's,
    which move inputs to a layer's device. The model itself must not be such a layer, because it has
    no parent to replace it in.

    siblings    layers of one parent whose names say that they get the same x, such as q_proj,
                k_proj and v_proj, or gate_proj and up_proj, are multiplied in one call where
                torch.compile traces the model and while a CUDA graph is captured. Results have the
                same bits if nothing writes to x, a bias or a weight between the calls of these
                layers. This covers all NF4Linear and Int4Linear in the model, converted or not.
                True: where the class of the parent is defined in transformers.models. "all": in
                every parent, for models that you know to make no such write. False: no siblings

    PEFT merges adapters into an NF4Linear, whose weight is then quantized again. LoRA that was
    added to a Linear4bit can be merged too, before and after to_dense. Adapters of PEFT's other
    tuners that were added to a Linear4bit look for its quant_state and cannot be merged: convert
    the model before PEFT adds them.

    Returns the names of the replaced layers. Raises InvalidArgument for a layer that is not
    quantized yet, is repacked (by bitsandbytes' CPU kernels, or for Marlin, Machete, ExLlama and
    the like), is offloaded, or has a forward of its own. Then nothing is replaced.
    """
    if siblings not in (True, False, "all"):
        raise InvalidArgument(f"siblings is {shown(siblings)}; expected True, False or 'all'")
    instead = "NF4Linear.from_bitsandbytes or Int4Linear.from_module"
    replaced = replace(model, _from_others, instead)
    _warn_of_others(model)
    _remove_decompression(model)
    if "transformers.quantizers.quantizer_bnb_4bit" in sys.modules and not any(
        isinstance(each, linear4bit()) for each in model.modules()
    ):
        from nf4.torch import _marks  # imports transformers

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
    """Removes the hook of compressed-tensors that decompresses its layers in the first forward
    pass, if none of its layers is left."""
    hook = getattr(model, "ct_decompress_hook", None)
    if hook is not None and not any(map(_foreign_int4.is_quantized, model.modules())):
        hook.remove()
        del model.ct_decompress_hook
