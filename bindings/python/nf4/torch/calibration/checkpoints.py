"""Calibrates the weights of a dense checkpoint. Imports transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nf4._convert import NUMPY_DTYPES
from nf4.checkpoint import Checkpoint
from nf4.checkpoint.dtypes import FILE_TO_NF4
from nf4.checkpoint.errors import FormatError, OptionError
from nf4.checkpoint.quantize_plan import QuantizeOptions
from nf4.checkpoint.steps import AnyQuantized
from nf4.torch import comparing
from nf4.torch._checks import is_finite, torch_dtype
from nf4.torch.calibration import models
from nf4.torch.calibration.layers import Seen, decoder_layers
from nf4.torch.distributed.loading import load_alone
from nf4.torch.quantizing import maker

# Tokens of a window, and the most of all texts together.
WINDOW, TOKENS = 512, 32768


def windows_of(source: str, texts: Sequence[tuple[str, str]]) -> Tensor:
    """Returns windows of texts (names and contents), [windows, WINDOW], of each text as many as of
    the others if it has them. Each begins with the special tokens that a text begins with. Raises
    as comparing.encoded, and OptionError for too many texts or too little text."""
    if len(texts) > TOKENS // WINDOW:
        raise OptionError(
            f"the calibration has {len(texts)} texts; {TOKENS // WINDOW} are used at most"
        )
    found = comparing.encoded([source], texts, WINDOW, WINDOW // 2)
    rows = []
    for text in found:
        own = WINDOW - len(text.prefix)
        count = min(len(text.tokens) // own, TOKENS // len(found) // WINDOW)
        if not count:
            raise OptionError(
                f"{text.name} has {len(text.tokens)} tokens; a window of the calibration has {own}"
            )
        part = torch.tensor(text.tokens[: count * own]).view(count, own)
        prefix = torch.tensor(text.prefix, dtype=part.dtype).expand(count, -1)
        rows.append(torch.cat([prefix, part], 1))
    ids = torch.cat(rows)
    if ids.numel() < models.LEAST_TOKENS:
        raise OptionError(
            f"the calibration has {ids.numel()} tokens in whole windows of {WINDOW}; at least "
            f"{models.LEAST_TOKENS} are needed, and {TOKENS} are used at most"
        )
    return ids


class Calibrator:
    """A dense checkpoint's model, whose layers become 4-bit one after the other.

    device   torch's name; on the CPU the model computes in fp32, elsewhere in its own dtype

    Raises as comparing.Judge.
    """

    def __init__(self, source: str, options: QuantizeOptions, ids: Tensor, device: str):
        self._source, self._options, self._ids = source, options, ids
        self._device = comparing.device_of(device)
        dtype = "fp32" if self._device.type == "cpu" else None
        self._model = comparing.causal_model(source, dtype, WINDOW)
        models.require(ids, options, self._model)

    def calibrate(
        self, names: Sequence[str], progress: Callable[[int], Callable[[str, int], None]]
    ) -> dict[str, AnyQuantized]:
        """Quantizes the weights of these tensors, as far as the model calls their layers for the
        tokens. progress: called with the number of decoder layers, and returns what is called for
        each."""
        places, dtypes = self._places(names)
        advance = progress(len(decoder_layers(self._model, list(places))))
        make, made = maker(self._options, None, None, {}), {}

        def quantized(name: str, layer: nn.Module, seen: Seen | None = None) -> nn.Module:
            # The dtypes of scales follow from the file's dtype.
            weight = layer.weight.detach().to(dtypes[name])
            layer.weight = nn.Parameter(weight, requires_grad=False)
            result = make(name, layer, seen)
            made[places[name]] = _on_host(result.quantized)
            return result

        with comparing.memory_errors():
            load_alone(self._model, self._source, self._device)
            self._model.to(self._device)
            for name in places:
                self._require_finite(name, places[name])
            models.replace(
                self._model, list(places), self._ids, quantized, lambda name: advance(name, 1)
            )
        return made

    def _places(self, names: Sequence[str]) -> tuple[dict[str, str], dict[str, torch.dtype]]:
        """The tensors and the dtypes of weights, by the names of the model's layers. Tensors that
        are not the whole weight of a layer are left out."""
        from nf4.checkpoint.meta_model import LoadPlan

        plan, places, dtypes = LoadPlan(self._model), {}, {}
        with Checkpoint(self._source) as checkpoint:
            for name in names:
                target = plan.target(name)[0]
                info, parameter = checkpoint.info(name), plan.parameters.get(target)
                if parameter is not None and tuple(parameter.shape) == info.shape:
                    place = target.removesuffix(".weight")
                    places[place] = name
                    dtypes[place] = torch_dtype(FILE_TO_NF4[info.dtype])
        return places, dtypes

    def _require_finite(self, name: str, tensor: str) -> None:
        if not is_finite(self._model.get_submodule(name).weight):
            raise FormatError(self._source, "it has NaN or Inf, which calibration refuses", tensor)


def _on_host(weight: AnyQuantized) -> Any:
    """The weight in arrays of numpy."""
    parts = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
    arrays = {name: _array(part.cpu()) for name, part in parts.items() if isinstance(part, Tensor)}
    return dataclasses.replace(weight, **arrays)


def _array(part: Tensor) -> np.ndarray:
    if part.dtype == torch.bfloat16:
        return part.view(torch.int16).numpy().view(NUMPY_DTYPES["bf16"])
    return part.numpy()
