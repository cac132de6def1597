"""A quantizer for the quant_method "nf4", by which transformers' from_pretrained loads a checkpoint
with experts in 4 bits. This module is imported while transformers is being imported, so it imports
nothing of it but its registries."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer

from nf4.checkpoint import Checkpoint, FormatError, bnb
from nf4.checkpoint.quantization import OF_EXPERTS
from nf4.checkpoint.stacks import parameter_of
from nf4.checkpoint.weights import Weight
from nf4.errors import InvalidArgument
from nf4.torch import _siblings
from nf4.torch._annotations import PreTrainedModel
from nf4.torch._frozen_quantizer import FrozenQuantizer, StoredConfig
from nf4.torch._replacing_layers import take_along
from nf4.torch.distributed._reading import dtype_of, read_part
from nf4.torch.distributed.empty_models import compute_dtype_of, put_layers
from nf4.torch.experts import save_as_stacks
from nf4.torch.modules.nf4_weight import NF4Weight

# The tensors beside a weight's codes. transformers has no place for them.
_SCALES = r"\.(nested_)?(absmax|quant_map)$|\.quant_state\.bitsandbytes__(nf4|fp4)$"


@register_quantization_config(OF_EXPERTS)
class NF4Config(StoredConfig):
    """The quantization_config of such a checkpoint, as config.json has it."""


class _Codes(nn.Module):
    """Stands for a layer while transformers loads the model: transformers allocates the codes on
    the right device, as for any parameter."""

    def __init__(self, layer: NF4Weight, weight: Weight, codes: Tensor):
        super().__init__()
        self.made = (layer, weight)  # a tuple, so that the layer is not registered as a submodule
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.bias = getattr(layer, "bias", None)


@register_quantizer(OF_EXPERTS)
class NF4Quantizer(FrozenQuantizer):
    """Lets transformers load the codes and all dense tensors, and adds the scales after that."""

    def _process_model_before_weight_loading(
        self,
        model: PreTrainedModel,
        checkpoint_files: Sequence[str] | None = None,
        **_: Any,
    ) -> PreTrainedModel:
        if not checkpoint_files:
            raise InvalidArgument(
                "no checkpoint_files are given; expected those of from_pretrained(folder)"
            )
        self.files = list(checkpoint_files)
        config = self.quantization_config.to_dict()
        with self._checkpoint() as checkpoint:
            found = bnb.survey(checkpoint)
            found.require_sound()
            places = put_layers(model, checkpoint, found.weights, compute_dtype_of(config))
            for name, place in places.items():
                info = found.weights[name].packed
                codes = torch.empty(
                    info.shape, dtype=dtype_of(checkpoint.owner[info.name], info), device="meta"
                )
                layer = model.get_submodule(place)
                model.set_submodule(place, _Codes(layer, found.weights[name], codes))
        in_own_place = [f"^{re.escape(place)}" for name, place in places.items()
                        if name == parameter_of(name)]  # fmt: skip
        for kind, patterns in (
            ("unexpected", [_SCALES, *(f"{each}$" for each in in_own_place)]),
            ("missing", [rf"{each}\.weight$" for each in in_own_place]),
        ):
            attribute = f"_keys_to_ignore_on_load_{kind}"
            setattr(model, attribute, {*patterns, *(getattr(model, attribute, None) or ())})
        return model

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **_: Any
    ) -> PreTrainedModel:
        from nf4.torch._marks import mark_as  # this needs all of transformers

        places = [(name, m) for name, m in model.named_modules() if isinstance(m, _Codes)]
        with self._checkpoint() as checkpoint:
            for name, codes in places:
                made = _filled(name, codes, checkpoint).train(codes.training)
                take_along(codes, made)
                model.set_submodule(name, made)
        save_as_stacks(model)
        # to_dense needs all conversions, and not only those that loading used.
        model.dense_conversions = None
        _siblings.join(model)
        mark_as(model, self.quantization_config.quant_method)
        return model

    def _checkpoint(self) -> Checkpoint:
        """Opens the files that transformers reads. A folder may also have files of other
        variants."""
        several = len(self.files) > 1
        path = os.path.dirname(self.files[0]) if several else self.files[0]
        return Checkpoint(path, shards=self.files)


def _filled(name: str, codes: _Codes, checkpoint: Checkpoint) -> NF4Weight:
    layer, weight = codes.made
    packed = codes.weight.detach()
    if packed.is_meta:
        raise InvalidArgument(
            f"{name}: device_map offloads it; expected all of the model on GPUs, or on the CPU"
        )
    if hasattr(packed, "to_local"):
        raise InvalidArgument(
            f"{name}: its weight is a DTensor, as from_pretrained(tp_plan=...) makes it; expected "
            f"no plan: nf4.torch.distributed shards such a model"
        )
    # transformers has not found the codes if they have another name, such as the dense parameter's.
    state = {"weight": packed} if getattr(codes.weight, "_is_hf_initialized", False) else {}
    for info in weight.parts.values():
        key = f"weight{info.name.removeprefix(weight.name)}"
        if key not in state:
            state[key] = read_part(checkpoint.owner[info.name], info, None).to(packed.device)
    bias = codes.bias
    if bias is not None:
        state["bias"] = bias
    try:
        layer.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise FormatError(weight.path, str(error).splitlines()[-1].strip(), weight.name) from None
    if bias is not None:
        layer.bias.requires_grad_(False)
    return layer
