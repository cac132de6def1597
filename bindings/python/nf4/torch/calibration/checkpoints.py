"""Calibrates the weights of a dense checkpoint. Imports transformers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from nf4._convert import NUMPY_DTYPES
from nf4.checkpoint import Checkpoint
from nf4.checkpoint.dtypes import FILE_TO_NF4
from nf4.checkpoint.errors import FormatError, OptionError, add_note
from nf4.checkpoint.quantize_plan import QuantizeOptions
from nf4.checkpoint.steps import AnyQuantized
from nf4.checkpoint.transaction import hidden_beside
from nf4.errors import InvalidArgument
from nf4.info import cpu_variant, version
from nf4.int4 import Int4Tensor
from nf4.torch import comparing
from nf4.torch._checks import is_finite, torch_dtype
from nf4.torch._replacing_layers import replace_one
from nf4.torch.calibration import models
from nf4.torch.calibration.kept import Kept
from nf4.torch.calibration.layers import Seen, decoder_layers
from nf4.torch.distributed.loading import load_alone
from nf4.torch.modules import Int4Linear, NF4Linear
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

    device        torch's name; on the CPU the model computes in fp32, elsewhere in its own dtype
    destination   the output. What `calibrate` has done is kept beside it, and goes at the end of a
                  context without an error. After an interrupt the same call continues from there
    say           called with a sentence about layers that an earlier call has kept

    Raises as comparing.Judge.
    """

    def __init__(
        self,
        source: str,
        options: QuantizeOptions,
        ids: Tensor,
        device: str,
        destination: str,
        say: Callable[[str], None],
    ):
        self._source, self._options, self._ids = source, options, ids
        self._destination, self._say = os.path.realpath(destination), say
        self._kept: Kept | None = None
        self._device = comparing.device_of(device)
        dtype = "fp32" if self._device.type == "cpu" else None
        self._model = comparing.causal_model(source, dtype, WINDOW)
        models.require(ids, options, self._model)

    def __enter__(self) -> Calibrator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        kept = self._kept
        if kept is None:
            return
        # The same call would end with the same error.
        if error is None or isinstance(error, (InvalidArgument, FormatError)):
            kept.remove()
            return
        if kept.count:
            add_note(error, f"{kept.path} keeps what is done: the same command continues from it")
        kept.close()

    def calibrate(
        self, names: Sequence[str], progress: Callable[[int], Callable[[str, int], None]]
    ) -> dict[str, AnyQuantized]:
        """Quantizes the weights of these tensors, as far as the model calls their layers for the
        tokens. progress: called with the number of decoder layers, and returns what is called for
        each."""
        places, dtypes = self._places(names)
        decoders = list(decoder_layers(self._model, list(places)))
        advance, kept = progress(len(decoders)), self._opened(names)
        make = maker(self._options, None, None, {})
        taken = _Taken(self._model, decoders, places, dtypes, make, kept)

        def done(decoder: str) -> None:
            taken.keep(decoder)
            advance(decoder, 1)

        with comparing.memory_errors():
            load_alone(self._model, self._source, self._device)
            self._model.to(self._device)
            for name in places:
                self._require_finite(name, places[name])
            models.replace(
                self._model, list(places), self._ids, taken.quantized, done, taken.restore
            )
        return taken.all

    def _opened(self, names: Sequence[str]) -> Kept:
        path = hidden_beside(self._destination, "nf4-calibration")
        kept = self._kept = Kept(path, self._inputs(names), self._device)
        if kept.is_of_other_inputs:
            self._say(f"{path} was kept by a calibration with other inputs; it begins anew")
        elif kept.count:
            self._say(f"continuing after {kept.count} decoder layers that {path} keeps")
        return kept

    def _inputs(self, names: Sequence[str]) -> str:
        """A digest of what the 4-bit weights follow from."""
        said = {
            "versions": [version(), torch.__version__, transformers.__version__],
            "options": dataclasses.asdict(dataclasses.replace(self._options, threads=0)),
            "names": list(names),
            "ids": self._ids.tolist(),
            "machine": [str(self._device), *_machine(self._device)],
        }
        digest = hashlib.sha256(json.dumps(said).encode())
        with Checkpoint(self._source) as checkpoint:
            digest.update(json.dumps(checkpoint.config, sort_keys=True).encode())
            for name, file in checkpoint.files.items():
                digest.update(name.encode())
                for info in file.tensors.values():
                    digest.update(repr(info).encode())
                    for _, piece in file.pieces(info):
                        digest.update(piece)
        return digest.hexdigest()

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


class _Taken:
    """The 4-bit weights so far.

    all             by tensors' names, in numpy
    places, dtypes  tensors and dtypes of weights by the names of layers
    """

    def __init__(
        self,
        model: nn.Module,
        decoders: Sequence[str],
        places: Mapping[str, str],
        dtypes: Mapping[str, torch.dtype],
        make: models.Quantized,
        kept: Kept,
    ):
        self._model, self._decoders, self._make, self._kept = model, decoders, make, kept
        self._places, self._dtypes = places, dtypes
        self.all: dict[str, AnyQuantized] = {}
        # The weights of the decoder layer at hand are on the device.
        self._own: dict[str, AnyQuantized] = {}

    def quantized(self, name: str, layer: nn.Module, seen: Seen | None = None) -> nn.Module:
        # The dtypes of scales follow from the file's dtype.
        weight = layer.weight.detach().to(self._dtypes[name])
        layer.weight = nn.Parameter(weight, requires_grad=False)
        made = self._make(name, layer, seen)
        self._own[self._places[name]] = made.quantized
        self.all[self._places[name]] = _on_host(made.quantized)
        return made

    def keep(self, decoder: str) -> None:
        """Keeps a decoder layer that is done."""
        layer = self._decoders.index(decoder)
        if layer >= self._kept.count:
            self._kept.save(layer, self._own)
        self._own.clear()

    def restore(self, decoder: str) -> bool:
        """Replaces the layers of a decoder layer if it is kept."""
        found = self._kept.load(self._decoders.index(decoder))
        if found is None:
            return False
        for name, tensor in self._places.items():
            if (weight := found.get(tensor)) is not None:
                replace_one(self._model, name, partial(_layer_of, weight))
                self.all[tensor] = _on_host(weight)
        return True


def _machine(device: torch.device) -> list[str]:
    """What the order of sums depends on, beside the versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_variant()
    return [name, str(torch.get_num_threads())]


def _layer_of(weight: AnyQuantized, layer: nn.Module) -> nn.Module:
    """The 4-bit layer in place of a dense one."""
    kind = Int4Linear if isinstance(weight, Int4Tensor) else NF4Linear
    return kind.from_quantized(weight, layer.bias, compute_dtype=None).train(layer.training)


def _on_host(weight: AnyQuantized) -> Any:
    """The weight in arrays of numpy."""
    parts = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
    arrays = {name: _array(part.cpu()) for name, part in parts.items() if isinstance(part, Tensor)}
    return dataclasses.replace(weight, **arrays)


def _array(part: Tensor) -> np.ndarray:
    if part.dtype == torch.bfloat16:
        return part.view(torch.int16).numpy().view(NUMPY_DTYPES["bf16"])
    return part.numpy()
