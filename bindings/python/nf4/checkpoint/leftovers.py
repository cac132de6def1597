"""Finds tensors that quantizers store beside 4-bit weights and that nothing here reads. A model
that is loaded without them computes something else, so each is an error."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nf4.checkpoint.architecture import Model
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.rules import choose_rules
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.weights import Survey

# Last parts of names that only quantizers use, and no transformers model: GPTQ, AWQ (whose
# ScaledActivation has "scales"), compressed-tensors, ModelOpt, bitsandbytes in 8 bits, FP8.
_OF = r"(weight|input|output|act|activation|pre_quant|smooth|smoothing|channel)_(global_)?"
PART = re.compile(
    rf"q?scales|q?zeros|qweight|g_idx|SCB|scale_inv|zero_points?|.*_amax|"
    rf"{_OF}(scales?|scale_inv|zeros?|zero_points?|shape|packed|g_idx)"
)
# These change no weight: the scales of a quantized KV cache, which libnf4 does not quantize
# (compressed-tensors' KVCacheScaleType), and buffers that a model computes itself, which older
# versions of transformers stored.
_HARMLESS = re.compile(
    r"[qkv]_scale|masked_bias|(original_)?inv_freq|position_ids|relative_position_index"
)
_DENSE_DTYPES = ("F64", "F32", "F16", "BF16", "C64", "BOOL", "I64", "U64")


def is_harmless(info: TensorInfo) -> bool:
    """Tells if a model computes the same without this tensor. A bias of several dimensions is the
    mask of causal attention."""
    last = info.name.rpartition(".")[2]
    is_mask = last == "bias" and len(info.shape) > 2
    return is_mask or _HARMLESS.fullmatch(last) is not None


def unread(checkpoint: Checkpoint, found: Survey) -> Iterator[FormatError]:
    """Yields an error for each dense tensor of a survey that is part of something quantized."""
    modules = {name.removesuffix(".weight") for name in found.weights}.union(found.weights)
    for name, info in found.dense.items():
        module, _, last = name.rpartition(".")
        parts = module.split(".")
        above = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        owner = next((each for each in above if each in modules), None)
        if is_harmless(info):
            continue
        reason, is_bias = None, last == "bias" and owner == module
        if owner is not None and not is_bias:
            reason = f"it is beside the 4-bit {owner}, and is not read"
        elif PART.fullmatch(last):
            reason = f"{last} is a part of something quantized, and is not read"
        elif _is_no_number(last, info):
            reason = _of_dtype(found, module, info)
        if reason is not None:
            yield FormatError(checkpoint.owner[name].path, reason, name)


def _is_no_number(last: str, info: TensorInfo) -> bool:
    """Tells if a tensor has a dtype that no dense weight has. Floats of 8 bits need a scale,
    whatever the name of a matrix; so do biases."""
    is_matrix = len(info.shape) > 1
    if info.dtype.startswith("F8_"):
        return is_matrix or last in ("weight", "bias")
    return is_matrix and last == "weight" and info.dtype not in _DENSE_DTYPES


def strangers(checkpoint: Checkpoint, found: Survey) -> list[FormatError]:
    """Returns the errors of without_place. Builds the model only if a dense tensor beside 4-bit
    weights is neither a weight nor a bias. Returns no error if no model can be built."""
    unusual = any(
        not (name.endswith((".weight", ".bias")) or is_harmless(info))
        for name, info in found.dense.items()
    )
    if not unusual or not found.weights:
        return []
    rules, _ = choose_rules(checkpoint.config, found)
    return [] if rules.model is None else without_place(checkpoint, found, rules.model)


def without_place(checkpoint: Checkpoint, found: Survey, model: Model) -> list[FormatError]:
    """Returns an error for each dense tensor that the model of config.json has no place for."""
    return [
        FormatError(checkpoint.owner[name].path, "the model has no place for it", name)
        for name in model.unexpected
        if name in found.dense and not is_harmless(found.dense[name])
    ]


def _of_dtype(found: Survey, module: str, info: TensorInfo) -> str:
    if info.dtype == "U32" and f"{module}.scales" in found.dense:
        return "it is quantized by MLX (U32 beside scales), which is not read"
    return f"it is {info.dtype}, which no dense weight is"
