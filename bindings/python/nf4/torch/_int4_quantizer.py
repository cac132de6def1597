"""A quantizer by which transformers' from_pretrained loads integer weights into Int4Linear.
Importing this imports transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from nf4.checkpoint import Checkpoint, FormatError
from nf4.checkpoint.int4 import Int4Weight
from nf4.checkpoint.leftovers import is_harmless
from nf4.checkpoint.meta_model import LoadPlan
from nf4.checkpoint.quantization import config_path, quantization
from nf4.torch import _int4_stacks
from nf4.torch._frozen_quantizer import FrozenQuantizer, StoredConfig
from nf4.torch._marks import mark_as
from nf4.torch._meta_layers import empty, layer_on_meta, put_layer
from nf4.torch._model_source import class_and_config, set_generation, stored_tensors
from nf4.torch.experts import put
from nf4.torch.modules import Int4Linear

_METHOD = "nf4-int4"
_OF_AN_EXPERT = (
    r"\.experts\.\d+\..*\.(qweight|qzeros|scales|g_idx|weight_(packed|scale|shape|zero_point))$"
)


@register_quantization_config(_METHOD)
class Int4Config(QuantizationConfigMixin):
    """The quantizer's input. weights: the checkpoint's weights by name; biases: the names of its
    biases; act_order: the names of the weights with act order."""

    def __init__(
        self,
        quant_method: str = _METHOD,
        weights: Mapping[str, Int4Weight] | None = None,
        biases: frozenset[str] = frozenset(),
        act_order: frozenset[str] = frozenset(),
    ):
        self.quant_method, self.weights = quant_method, weights or {}
        self.biases, self.act_order = biases, act_order


@register_quantizer(_METHOD)
class Int4Quantizer(FrozenQuantizer):
    """Puts layers on meta into the model's skeleton, for transformers to load tensors into, and
    checks what was loaded. Experts are read after that. A model with experts cannot be saved."""

    def __init__(self, quantization_config: Int4Config, **options: Any):
        super().__init__(quantization_config, **options)
        self.without_g_idx: list[Int4Linear] = []
        self.stacks: list[_int4_stacks.Stack] = []

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, **_: Any
    ) -> PreTrainedModel:
        plan, ignored = LoadPlan(model), set()
        weights = {
            name: weight
            for name, weight in self.quantization_config.weights.items()
            if not plan.is_ignored(name)
        }
        act_order = self.quantization_config.act_order
        self.stacks = _int4_stacks.found(plan, weights, act_order)
        stacked = {weight.name for stack in self.stacks for weight in stack.weights}
        for stack in self.stacks:
            put(plan.modules[stack.experts], stack.name, nn.Module())
        for name, weight in weights.items():
            if name in stacked:
                continue
            target = plan.target(name)[0].rpartition(".")[0]
            layer = layer_on_meta(
                weight, plan.modules.get(target), target, self.quantization_config.biases
            )
            put_layer(model, layer, target)
            if "g_idx" not in weight.parts and "g_idx" in layer.state_dict():
                layer.g_idx = empty(weight.shape[1:], torch.int32)  # so that it counts as missing
                self.without_g_idx.append(layer)
                ignored.add(f"^{re.escape(target)}\\.g_idx$")
        ignored.update(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
        model._keys_to_ignore_on_load_missing = ignored
        if self.stacks:
            kept = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
            model._keys_to_ignore_on_load_unexpected = {_OF_AN_EXPERT, *kept}
        return model

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **_: Any
    ) -> PreTrainedModel:
        for layer in self.without_g_idx:
            layer.g_idx = None
        self.without_g_idx = []
        for layer in model.modules():
            if isinstance(layer, Int4Linear) and not layer.quantized.packed.is_meta:
                layer.adopt(layer.quantized)
        return model

    def is_serializable(self) -> bool:
        return not self.stacks


def load_model(
    checkpoint: Checkpoint,
    weights: Mapping[str, Int4Weight],
    act_order: frozenset[str],
    dtype: torch.dtype | str,
) -> PreTrainedModel:
    kind, config = class_and_config(checkpoint)
    said = quantization(checkpoint)
    biases = frozenset(name for name in checkpoint.owner if name.endswith(".bias"))
    config.quantization_config = {
        "quant_method": _METHOD, "weights": weights, "biases": biases, "act_order": act_order
    }  # fmt: skip
    # Calls the base class's from_pretrained: that of a derived class may read other files.
    model, info = PreTrainedModel.from_pretrained.__func__(
        kind,
        None,
        config=config,
        state_dict=stored_tensors(checkpoint),
        dtype=dtype,
        output_loading_info=True,
    )
    model.config.name_or_path = model.name_or_path = config.name_or_path
    set_generation(model, checkpoint)
    unexpected = [
        name
        for name in info["unexpected_keys"]
        if name not in checkpoint or not is_harmless(checkpoint.info(name))
    ]
    for names, wrong in (
        (info["missing_keys"], "the model needs it{more}, and the checkpoint does not have it"),
        (unexpected, "the checkpoint has it{more}, and the model has no place for it"),
    ):
        if names:
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            raise FormatError(config_path(checkpoint), wrong.format(more=more), min(names))
    for stack in model.hf_quantizer.stacks:
        experts = model.get_submodule(stack.experts)
        setattr(experts, stack.name, _int4_stacks.read(stack, checkpoint).eval())
    if model.hf_quantizer.stacks:
        # to_dense needs all conversions, and not only those that loading used.
        model._weight_conversions = None
    checkpoint.check_unchanged()
    described = StoredConfig({} if said is None else said.config)
    model.hf_quantizer.quantization_config = model.config.quantization_config = described
    if said is None:
        del model.config.quantization_config
    mark_as(model, described.quant_method)
    return model
