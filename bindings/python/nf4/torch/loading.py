"""load: loads a checkpoint of integers, of MXFP4 or NVFP4, or with experts in 4 bits, as a
transformers model."""

from __future__ import annotations

import os

import torch

from nf4.checkpoint import Checkpoint, FormatError, Survey, survey
from nf4.checkpoint.bnb import BnbWeight
from nf4.checkpoint.int4 import Int4Weight
from nf4.checkpoint.kinds import require_readable
from nf4.checkpoint.quantization import config_path
from nf4.checkpoint.stacks import is_stack
from nf4.torch import _siblings
from nf4.torch._annotations import PreTrainedModel
from nf4.torch._checks import torch_dtype
from nf4.torch._model_source import require_folder
from nf4.torch.modules.base import torch_device
from nf4.typing import DTypeLike


def load(
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    device: torch.device | str | int | None = None,
) -> PreTrainedModel:
    """Loads a checkpoint as a transformers model. GPTQ, AWQ, AutoRound (in the packings of these)
    and compressed-tensors (pack-quantized 4-bit integers) become Int4Linear, and Int4Experts for
    stacked experts. MXFP4 and NVFP4 of gpt-oss, compressed-tensors, ModelOpt and DeepSeek-V4 become
    NF4Linear and NF4Experts, and so does a checkpoint with experts in NF4 or FP4; transformers'
    from_pretrained loads the latter too, but only warns of missing tensors. Layers in FP8 beside
    MXFP4 and NVFP4 are dequantized, and are dense in the model. This needs transformers, and none
    of the packages that made the checkpoint.

    path    a directory with config.json and safetensors files
    dtype   "fp32", "fp16", "bf16" or torch's, for tensors that are not quantized; by default that
            of config.json. Scales stay as they are stored
    device  the device to load to; by default the CPU

    Siblings are joined as in convert. save_pretrained writes such a checkpoint again, but raises an
    error for a model with Int4Experts, or with layers that were in FP8: call to_dense first. For
    layers with act order see Int4Linear.reorder_.

    The quantization settings are read from any place where transformers, vLLM and their tools write
    them; model.config then has them. A quantized output head is not tied to dense embeddings.

    Raises nf4.checkpoint.FormatError, which names the file and the tensor, if a tensor breaks the
    format, contradicts config.json or the model, is missing, or has no place in the model (unless
    its class ignores it), or if a g_idx is out of range. Raises InvalidArgument for wrong
    arguments, and transformers' own errors.
    """
    wanted = "auto" if dtype is None else torch_dtype(dtype)
    moved_to = torch_device(device)
    require_folder(path)
    with Checkpoint(path) as checkpoint:
        found = survey(checkpoint)
        require_readable(checkpoint, found, fp8=True)
        known = (BnbWeight, Int4Weight)  # which transformers and _int4_quantizer load
        if any(is_stack(each) or not isinstance(each, known) for each in found.weights.values()):
            return _by_tensors(path, dtype, moved_to)
        weights, act_order = _integer_weights(checkpoint, found)
        from nf4.torch import _int4_quantizer  # imports transformers

        model = _int4_quantizer.load_model(checkpoint, weights, act_order, wanted)
    _siblings.join(model)
    return model if moved_to is None else model.to(moved_to)


def _by_tensors(
    path: str | os.PathLike[str], dtype: DTypeLike | None, device: torch.device | None
) -> PreTrainedModel:
    """Builds the model without memory, and reads it tensor by tensor."""
    from nf4.torch.distributed.empty_models import empty_model
    from nf4.torch.distributed.loading import load_alone

    model = empty_model(path, dtype=dtype)
    load_alone(model, path, device)
    return model if device is None else model.to(device)


def _integer_weights(
    checkpoint: Checkpoint, found: Survey
) -> tuple[dict[str, Int4Weight], frozenset[str]]:
    """Checks the g_idx and zeros of the weights. Returns the weights by name, and the names of
    those with act order."""
    others = [name for name, each in found.weights.items() if not isinstance(each, Int4Weight)]
    if others or not found.weights:
        has = f"{others[0]} is not of integers" if others else "it has no quantized weights"
        instead = "" if others else ", and quantize_model then quantizes it"
        reason = (
            f"{has}; expected GPTQ, AWQ, compressed-tensors, MXFP4, NVFP4 or experts in 4 bits: "
            f"transformers' from_pretrained loads this checkpoint{instead}"
        )
        raise FormatError(config_path(checkpoint), reason)
    act_order = set()
    for name, weight in found.weights.items():
        if weight.g_idx(checkpoint) is not None:
            act_order.add(name)
        weight.zeros(checkpoint)
    return found.weights, frozenset(act_order)
