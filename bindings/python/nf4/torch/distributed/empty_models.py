"""empty_model: makes a checkpoint's model on the meta device, with libnf4's 4-bit layers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nf4.checkpoint import Checkpoint, FormatError, survey
from nf4.checkpoint.dtypes import TORCH_TO_NF4
from nf4.checkpoint.int4 import Int4Weight
from nf4.checkpoint.kinds import require_readable
from nf4.checkpoint.quantization import config_path, quantization
from nf4.checkpoint.stacks import is_stack, joined, names_of
from nf4.checkpoint.weights import Weight
from nf4.errors import InvalidArgument
from nf4.torch import _siblings
from nf4.torch._annotations import PreTrainedModel
from nf4.torch._checks import torch_dtype
from nf4.torch._model_source import class_and_config, require_folder, set_generation
from nf4.torch.experts import put, save_as_stacks
from nf4.torch.modules import NF4Experts
from nf4.typing import DTypeLike


def empty_model(
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
) -> PreTrainedModel:
    """Returns the transformers model of a checkpoint without its memory: parameters are on torch's
    meta device, and layers with 4-bit weights are NF4Linear, NF4Experts and Int4Linear. Shard it,
    then call load_checkpoint: no process ever holds the whole model.

    path    a directory with config.json and safetensors files of bitsandbytes, GPTQ, AWQ,
            compressed-tensors, ModelOpt, gpt-oss or DeepSeek-V4, or dense ones. Only their headers,
            and g_idx and zero points of integers, are read
    dtype   "fp32", "fp16", "bf16" or torch's, for tensors that are not quantized; by default that
            of config.json
    compute_dtype
            as for NF4Linear; by default bnb_4bit_compute_dtype of config.json, else the dtype of x

    Buffers that no checkpoint has, such as inv_freq of rotary embeddings, have their values.
    Siblings are joined as in nf4.torch.convert.

    Raises nf4.checkpoint.FormatError for a checkpoint that breaks the format or contradicts the
    model, InvalidArgument for wrong arguments, and transformers' own errors.
    """
    wanted = None if dtype is None else torch_dtype(dtype)
    computing = None if compute_dtype is None else torch_dtype(compute_dtype, "compute_dtype")
    require_folder(path)
    with Checkpoint(path) as checkpoint:
        found = survey(checkpoint)
        require_readable(checkpoint, found, fp8=True)
        model = _skeleton(checkpoint, wanted)
        said = quantization(checkpoint)
        stored = {} if said is None else said.config
        if stored:
            model.config.quantization_config = stored
        try:
            stored_dtype = compute_dtype_of(stored)
        except ValueError as error:
            raise FormatError(config_path(checkpoint), str(error)) from None
        put_layers(model, checkpoint, found.weights, computing or stored_dtype)
    if any(isinstance(module, NF4Experts) for module in model.modules()):
        save_as_stacks(model)
    _siblings.join(model)
    if found.weights and stored:
        _mark(model, checkpoint, stored)
    return model


def _mark(model: PreTrainedModel, checkpoint: Checkpoint, stored: dict[str, Any]) -> None:
    from nf4.torch._marks import mark

    try:
        mark(model, stored)
    except (AttributeError, TypeError, ValueError) as error:
        reason = f"transformers does not take the quantization_config: {error}"
        raise FormatError(config_path(checkpoint), reason) from None


def compute_dtype_of(quantization_config: Mapping[str, Any]) -> torch.dtype | None:
    """Returns the compute dtype that config.json gives. Raises ValueError if it is not one."""
    name = quantization_config.get("bnb_4bit_compute_dtype")
    if name is None:
        return None
    if not isinstance(name, str) or name not in TORCH_TO_NF4:
        expected = ", ".join(TORCH_TO_NF4)
        raise ValueError(f"bnb_4bit_compute_dtype is {name!r}; expected {expected}")
    return torch_dtype(TORCH_TO_NF4[name])


def _skeleton(checkpoint: Checkpoint, dtype: torch.dtype | None) -> PreTrainedModel:
    """Returns the dense model on meta."""
    kind, config = class_and_config(checkpoint)
    with torch.device("meta"):
        model = kind._from_config(config, **({} if dtype is None else {"dtype": dtype}))
    model.tie_weights()
    _fill_buffers(model, model)
    set_generation(model, checkpoint)
    return model.eval()


def _fill_buffers(module: nn.Module, owner: PreTrainedModel) -> None:
    """Computes the buffers that no checkpoint has, as transformers' from_pretrained does. owner:
    the nearest PreTrainedModel around a module, which knows how."""
    owner = module if hasattr(module, "_init_weights") else owner
    own = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
    lost = {name: each for name, each in own.items() if each is not None and each.is_meta}
    for name, each in lost.items():
        unset = float("nan") if each.is_floating_point() else 0
        module._buffers[name] = torch.full_like(each, unset, device="cpu")
    if lost:
        owner._init_weights(module)
    for name in lost:
        if module._buffers[name].isnan().any():
            kind = type(module).__name__
            raise InvalidArgument(f"{name} of {kind} is on meta, and transformers does not set it")
    for child in module.children():
        _fill_buffers(child, owner)


def put_layers(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    weights: Mapping[str, Weight],
    compute_dtype: torch.dtype | None,
) -> dict[str, str]:
    """Puts layers on meta into a dense model on meta. Returns their names in the model, by the
    weights' names; weights that the model's class ignores have none."""
    from nf4.checkpoint.meta_model import LoadPlan
    from nf4.torch._meta_layers import experts_on_meta, layer_on_meta, put_layer

    plan, places = LoadPlan(model), {}
    weights = joined(plan, weights)
    for name, weight in weights.items():
        if plan.is_ignored(name):
            continue
        if is_stack(weight):
            places[name] = parameter = plan.stack_of([name]).get(name, "")
            made = experts_on_meta(weight, model, parameter)
            owner, _, own = parameter.rpartition(".")
            put(plan.modules[owner], own, made)
            continue
        places[name] = target = plan.target(name)[0].rpartition(".")[0]
        found = plan.modules.get(target)
        layer = layer_on_meta(weight, found, target, checkpoint.owner, compute_dtype)
        if isinstance(weight, Int4Weight):
            weight.zeros(checkpoint)
            if weight.g_idx(checkpoint) is None and "g_idx" in weight.parts:
                layer.adopt(dataclasses.replace(layer.quantized, g_idx=None))
        put_layer(model, layer, target)
    if any(map(is_stack, weights.values())):
        _require_both(model, checkpoint)
    return places


def _require_both(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Requires all stacks of a module to be in 4 bits, because they are computed together."""
    for path, module in model.named_modules():
        kinds = {name: isinstance(getattr(module, name), NF4Experts) for name in names_of(module)}
        if any(kinds.values()) and not all(kinds.values()):
            dense = next(name for name, quantized in kinds.items() if not quantized)
            reason = f"{path}.{dense} is not in 4 bits, as the other experts of {path} are"
            raise FormatError(checkpoint.path, reason)
