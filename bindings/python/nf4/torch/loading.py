"""load: a checkpoint of integers, or with experts in 4 bits, as a transformers model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from nf4.checkpoint import Checkpoint, FormatError, Survey, survey
from nf4.checkpoint.int4 import Int4Weight
from nf4.checkpoint.kinds import require_readable
from nf4.checkpoint.quantization import config_path
from nf4.checkpoint.stacks import is_stack
from nf4.errors import InvalidArgument
from nf4.torch import _siblings
from nf4.torch._checks import torch_dtype
from nf4.torch._model_source import require_no_adapter
from nf4.torch.modules.base import torch_device
from nf4.typing import DTypeLike

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    device: torch.device | str | int | None = None,
) -> PreTrainedModel:
    """The transformers model of a checkpoint of GPTQ, AWQ, AutoRound (in the packings of these) or
    compressed-tensors (pack-quantized integers of 4 bits), its quantized layers as Int4Linear and
    its experts stacked as Int4Experts, or of one with experts in NF4 or FP4, as NF4Experts and
    NF4Linear. Needs transformers, and none of the packages that made the checkpoint. transformers'
    from_pretrained loads the latter too, and only warns of missing tensors.

    path    a directory with config.json and safetensors files
    dtype   "fp32", "fp16", "bf16" or torch's, of what is not quantized; by default that of
            config.json. Scales stay as they are stored
    device  where to; by default the CPU

    Siblings are joined as by convert. save_pretrained writes such a checkpoint again, but raises an
    error for a model with Int4Experts: make it dense with to_dense first. Layers with act order:
    see Int4Linear.reorder_.

    How the checkpoint is quantized is read from wherever transformers, vLLM and the tools of these
    say it; model.config then has it. A quantized output head is not tied to dense embeddings.

    Raises nf4.checkpoint.FormatError, which names the file and the tensor, for what breaks the
    format, contradicts config.json or the model, is missing, or has no place in the model (unless
    its class ignores that), and for a g_idx that is out of range; InvalidArgument for arguments;
    and what transformers raises.
    """
    wanted = "auto" if dtype is None else torch_dtype(dtype)
    moved_to = torch_device(device)
    if not os.path.isdir(path):
        raise InvalidArgument(f"path is {os.fspath(path)!r}; expected a directory with config.json")
    require_no_adapter(path)
    with Checkpoint(path) as checkpoint:
        found = survey(checkpoint)
        require_readable(checkpoint, found)
        if any(map(is_stack, found.weights.values())):
            return _with_experts(path, dtype, moved_to)
        weights, act_order = _integer_weights(checkpoint, found)
        from nf4.torch import _int4_quantizer  # which imports transformers

        model = _int4_quantizer.load_model(checkpoint, weights, act_order, wanted)
    _siblings.join(model)
    return model if moved_to is None else model.to(moved_to)


def _with_experts(
    path: str | os.PathLike[str], dtype: DTypeLike | None, device: torch.device | None
) -> PreTrainedModel:
    """Read into its memory tensor by tensor."""
    from nf4.torch.distributed.empty_models import empty_model
    from nf4.torch.distributed.loading import load_alone

    model = empty_model(path, dtype=dtype)
    load_alone(model, path, device)
    return model if device is None else model.to(device)


def _integer_weights(
    checkpoint: Checkpoint, found: Survey
) -> tuple[dict[str, Int4Weight], frozenset[str]]:
    """The weights by their names, their g_idx and zeros checked; which have act order."""
    others = [name for name, each in found.weights.items() if not isinstance(each, Int4Weight)]
    if others or not found.weights:
        has = f"{others[0]} is not of integers" if others else "it has no quantized weights"
        reason = (
            f"{has}; load is for GPTQ, AWQ, compressed-tensors and experts, transformers' "
            "from_pretrained for bitsandbytes"
        )
        raise FormatError(config_path(checkpoint), reason)
    act_order = set()
    for name, weight in found.weights.items():
        if weight.g_idx(checkpoint) is not None:
            act_order.add(name)
        weight.zeros(checkpoint)
    return found.weights, frozenset(act_order)
