"""Sets the marks of a quantized transformers model; docs/pytorch.md says who reads each. Imports
transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.utils.quantization_config import QuantizationMethod

from nf4.torch._frozen_quantizer import FrozenQuantizer, OurLayers, StoredConfig


class LinearQuantizer(OurLayers, Bnb4BitHfQuantizer):
    """The quantizer of a model whose layers are saved in bitsandbytes' format."""


def mark(model: PreTrainedModel, config: Mapping[str, Any]) -> None:
    """Marks a model as quantized for transformers, PEFT, TRL and accelerate, as from_pretrained
    does. config: its quantization_config."""
    if config.get("quant_method") == QuantizationMethod.BITS_AND_BYTES:
        stored = BitsAndBytesConfig.from_dict(dict(config))
        quantizer = LinearQuantizer(stored, pre_quantized=True)
    else:
        stored = StoredConfig(config)
        quantizer = FrozenQuantizer(stored)
    model.hf_quantizer, model.config.quantization_config = quantizer, stored
    mark_as(model, stored.quant_method)


def mark_as(model: PreTrainedModel, method: str) -> None:
    """Sets the marks beside hf_quantizer and quantization_config."""
    model.is_quantized, model.quantization_method = True, method
    # transformers imports bitsandbytes when it finds this mark.
    if importlib.util.find_spec("bitsandbytes") is not None:
        model.is_loaded_in_4bit = True
    for each in model.modules():
        if isinstance(each, PreTrainedModel):
            each.config._is_quantized = True
            # Attention reads this dtype, because quantized weights do not tell it. It is missing in
            # a model that was built from its class, and outdated in one that was cast.
            if each.config.dtype not in {parameter.dtype for parameter in each.parameters()}:
                each.config.dtype = each.dtype


def take_over(model: nn.Module) -> None:
    """Replaces the quantizer of models that transformers loaded with bitsandbytes. Their layers are
    ours now, so that their quantizer's dequantize() would find no layer and remove the marks."""
    for each in model.modules():
        theirs = vars(each).get("hf_quantizer")
        if type(theirs) is Bnb4BitHfQuantizer:
            each.hf_quantizer = LinearQuantizer(
                theirs.quantization_config, pre_quantized=theirs.pre_quantized
            )
