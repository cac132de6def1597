"""Determines the kind of 4-bit weights of a checkpoint from its settings and the names of its
tensors."""

from __future__ import annotations

import dataclasses
import os

from nf4.checkpoint import bnb
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.int4 import Int4Weight, add_integers
from nf4.checkpoint.int4_config import PARSERS, Settings
from nf4.checkpoint.int4_layouts import GPTQ
from nf4.checkpoint.leftovers import unread
from nf4.checkpoint.quantization import (
    BITSANDBYTES,
    OF_EXPERTS,
    Quantization,
    quantization,
)
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.weights import Survey

# The warning for integers without settings.
ASSUMED = "nothing tells gptq from gptq_v2 here; gptq is assumed"
_OF_BITSANDBYTES = (BITSANDBYTES, OF_EXPERTS)


def integer_settings(checkpoint: Checkpoint) -> Settings | None:
    """Returns the checkpoint's settings of integer weights; None if it has none. Raises FormatError
    for weights that cannot be read, such as 8-bit ones."""
    said = quantization(checkpoint)
    parse = None if said is None else PARSERS.get(str(said.method))
    if said is None or parse is None:
        return None
    try:
        settings = parse(said.config)
    except ValueError as error:
        reason = f"the model is quantized by {said.method!r}: {error}"
        raise FormatError(said.path, reason) from None
    return dataclasses.replace(settings, method=said.method, file=os.path.basename(said.path))


def survey(checkpoint: Checkpoint) -> Survey:
    """Finds the 4-bit weights of a checkpoint. Reads only the tensors that tell their shapes.
    Raises FormatError if the settings are of integers that cannot be read."""
    settings, said = integer_settings(checkpoint), quantization(checkpoint)
    found = bnb.survey(checkpoint)
    if settings is not None or said is None:
        add_integers(found, checkpoint, settings)
    found.unread = list(unread(checkpoint, found))
    known = said is not None and (settings is not None or said.method in _OF_BITSANDBYTES)
    if known or found.weights:
        found.faults += found.unread
    return found


def require_loadable(checkpoint: Checkpoint, found: Survey) -> None:
    """Raises FormatError for a quantization that cannot be read, for the first fault of a survey,
    and for a directory that could name its version of GPTQ and does not."""
    problem = method_problem(quantization(checkpoint))
    if problem is not None:
        raise problem
    found.require_sound()
    if checkpoint.directory is not None and is_assumed(checkpoint, found):
        reason = "no quantization_config tells whether it is in gptq or gptq_v2"
        raise FormatError(checkpoint.path, reason)


def require_readable(checkpoint: Checkpoint, found: Survey) -> None:
    """Raises FormatError unless every tensor of a survey is understood: for everything that
    require_loadable refuses, and for tensors in the layout of another library."""
    require_loadable(checkpoint, found)
    for fault in found.unread:
        raise fault


def is_assumed(checkpoint: Checkpoint, found: Survey) -> bool:
    """Tells if nothing distinguishes gptq from gptq_v2."""
    return quantization(checkpoint) is None and any(
        isinstance(weight, Int4Weight) and weight.state.layout is GPTQ
        for weight in found.weights.values()
    )


def method_problem(said: Quantization | None) -> FormatError | None:
    """Returns an error for a quantization that is not read, by its name."""
    if said is None or said.method in PARSERS or said.method == OF_EXPERTS:
        return None
    if said.method is None:
        reason = f"{said.place} has no quant_method, so it is not read"
    elif said.method != BITSANDBYTES:
        reason = f"the model is quantized by {said.method!r}, which is not read"
    elif said.config.get("load_in_4bit", said.config.get("_load_in_4bit")):
        return None
    else:
        reason = "the model is quantized by bitsandbytes, but not in 4 bits"
    return FormatError(said.path, reason)
