"""to_dense: replaces the 4-bit layers of a model by torch.nn.Linear, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nf4.torch import experts
from nf4.torch._checks import DTYPES, torch_dtype
from nf4.torch._replacing_layers import OURS, is_in_4_bits, replace
from nf4.typing import DTypeLike


def to_dense(model: nn.Module, dtype: DTypeLike | None = None) -> list[str]:
    """Replaces every NF4Linear and Int4Linear in a model by a torch.nn.Linear with the dequantized
    weight, and every NF4Experts and Int4Experts of a transformers model by a parameter. To merge
    adapters without rounding to 4 bits: to_dense(model), then PEFT's model.merge_and_unload().

    dtype  "fp32", "fp16", "bf16" or torch's. By default each weight gets the dtype that it had
           before it was quantized, or that of its scales if a checkpoint stores integers. If no
           parameter of the model has that dtype, it gets the dtype of most parameters

    Shared layers, hooks, the result and errors are as in convert. A transformers model that has no
    4-bit layer left is no longer marked as quantized, so that it saves as a dense model.
    """
    if dtype is not None:
        dtype = torch_dtype(dtype)

    dtypes = _dense_dtypes(model)

    def dense(dequantize: Callable[[Any], Any]) -> Any:
        """Returns a weight, dequantized to the wanted dtype."""
        made = dequantize(dtype)
        own = getattr(made, "weight", made).dtype
        if dtype is not None or not dtypes or own in dtypes:
            return made
        return dequantize(max(dtypes, key=dtypes.__getitem__))

    replaced = replace(
        model,
        lambda layer: (lambda each: dense(each.to_linear)) if type(layer) in OURS else None,
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
    dequantize() does, and those of layers that were in FP8."""
    for each in model.modules():
        for mark in ("quantization_config", "_is_quantized"):
            getattr(getattr(each, "config", None), "__dict__", {}).pop(mark, None)
        notes = vars(each)
        for mark in ("hf_quantizer", "quantization_method", "was_in_fp8"):
            notes.pop(mark, None)
        for flag in ("is_quantized", "is_loaded_in_4bit"):
            if flag in notes:
                notes[flag] = False
