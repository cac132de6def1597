"""Replaces the layers of a dense model by calibrated 4-bit ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from nf4.checkpoint.quantize_plan import QuantizeOptions
from nf4.errors import InvalidArgument, kind_of
from nf4.torch._annotations import PreTrainedModel
from nf4.torch._replacing_layers import is_in_4_bits, replace_one
from nf4.torch.calibration.layers import Seen, round_layers

FORMATS = ("nf4", "fp4", "int4")
# Fewer tokens are refused: their statistics are those of a few sentences.
LEAST_TOKENS = 2048
# A layer that sees fewer, such as that of an expert, is not calibrated.
_FLOOR = 256
# Tokens of a forward pass of a decoder layer.
_BATCH = 4096


class Quantized(Protocol):
    """Returns the 4-bit layer in place of a dense one. seen: None without calibration."""

    def __call__(self, name: str, layer: nn.Module, seen: Seen | None = None) -> nn.Module: ...


def require(ids: Tensor, options: QuantizeOptions, model: PreTrainedModel) -> None:
    """Raises InvalidArgument for options without calibration, and for wrong token ids."""
    if options.format not in FORMATS:
        raise InvalidArgument(
            f'calibration is given with format "{options.format}"; expected one of '
            f"{', '.join(FORMATS)}"
        )
    if options.experts:
        raise InvalidArgument(
            "calibration is given with experts=True; expected False, since stacks of experts are "
            "not calibrated"
        )
    if options.format == "int4" and not options.symmetric:
        raise InvalidArgument(
            "calibration is given with asymmetric integers, for which it was not shown to help; "
            "expected symmetric ones"
        )
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 2:
        kind = f"{ids.dtype} of {ids.dim()} dimensions" if isinstance(ids, Tensor) else kind_of(ids)
        raise InvalidArgument(f"calibration is {kind}; expected int64 [windows, tokens]")
    if ids.numel() < LEAST_TOKENS:
        raise InvalidArgument(
            f"calibration has {ids.numel()} tokens; at least {LEAST_TOKENS} are needed, and some "
            f"ten thousand are better"
        )
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and ids.shape[1] > most:
        raise InvalidArgument(
            f"calibration has windows of {ids.shape[1]} tokens; the model takes {most} at most"
        )
    known = model.get_input_embeddings().weight.shape[0]
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= known:
        wrong = low if low < 0 else high
        raise InvalidArgument(f"calibration has the token {wrong}; the model has {known}")


def replace(
    model: PreTrainedModel,
    names: Sequence[str],
    ids: Tensor,
    quantized: Quantized,
    advance: Callable[[str], None] = lambda name: None,
    restore: Callable[[str], bool] = lambda name: False,
) -> None:
    """Replaces the dense layers of `names` that see enough of these tokens, in the order of the
    calls: each is calibrated by what it sees when those before it are in 4 bits. advance and
    restore: as for round_layers."""

    def rounds(name: str, layer: nn.Module, seen: Seen) -> None:
        if seen.tokens >= _FLOOR and not is_in_4_bits(layer):
            replace_one(model, name, partial(quantized, name, seen=seen))

    batches = ids.to(model.device).split(max(1, _BATCH // ids.shape[1]))
    training = {name for name, each in model.named_modules() if each.training}
    model.eval()
    try:
        round_layers(model, names, batches, rounds, advance, restore)
    finally:
        for name, each in model.named_modules():
            each.training = name in training
