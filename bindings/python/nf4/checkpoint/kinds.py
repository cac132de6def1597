"""Determines the kind of 4-bit weights of a checkpoint from its settings and the names of its
tensors."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from nf4.checkpoint import bnb, e2m1_config, e2m1_plan, int4_config, int4_plan
from nf4.checkpoint.e2m1 import E2m1Weight, add_e2m1
from nf4.checkpoint.e2m1_audit import e2m1_config_problems, e2m1_value_problems
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.int4 import ASSUMED, Int4Weight, add_integers, is_assumed
from nf4.checkpoint.int4_audit import int4_config_problems, int4_value_problems
from nf4.checkpoint.leftovers import unread
from nf4.checkpoint.plans import Writer
from nf4.checkpoint.quantization import BITSANDBYTES, OF_EXPERTS, quantization
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.weights import Survey, Weight

_OF_BITSANDBYTES = (BITSANDBYTES, OF_EXPERTS)
Settings: TypeAlias = int4_config.Settings | e2m1_config.Settings
# (severity, problem) for each.
Problems: TypeAlias = Iterable[tuple[str, str]]


class Kind(NamedTuple):
    """A kind of weights other than those of bitsandbytes, whose quant_state describes each.

    weight           the class of its weights
    settings         the class of what a checkpoint says of them
    parser           returns, for a quant_method and its settings, the function that reads these;
                     None if they are of another kind
    add              moves its weights from the dense tensors of a survey to the weights
    value_problems   finds faults in the values of a weight
    config_problems  finds faults in the settings, given the modules that have weights
    writer           how dense weights become weights of the kind
    """

    weight: type[Weight]
    settings: type[Settings]
    parser: Callable[[str | None, Mapping[str, Any]], Callable[..., Settings] | None]
    add: Callable[[Survey, Checkpoint, Any], None]
    value_problems: Callable[[Any, Checkpoint], Problems]
    config_problems: Callable[[Checkpoint, Any, Survey, list[str]], Problems]
    writer: Writer


# Where nothing says which kind there is, they look for their tensors in this order.
KINDS = (
    Kind(
        E2m1Weight,
        e2m1_config.Settings,
        e2m1_config.parser,
        add_e2m1,
        e2m1_value_problems,
        e2m1_config_problems,
        e2m1_plan.WRITER,
    ),
    Kind(
        Int4Weight,
        int4_config.Settings,
        int4_config.parser,
        add_integers,
        int4_value_problems,
        int4_config_problems,
        int4_plan.WRITER,
    ),
)
# Rows are in the order in which messages list formats. Other formats are of bitsandbytes.
WRITERS = {format: kind.writer for kind in reversed(KINDS) for format in kind.writer.layouts}
LAYOUTS = [*dict.fromkeys(each for name, of in WRITERS.items() for each in of.layouts[name])]


def settings_of(checkpoint: Checkpoint) -> Settings | None:
    """Returns what the checkpoint says of its weights of KINDS; None if it has none. Raises
    FormatError for weights that cannot be read, such as 8-bit ones."""
    said = quantization(checkpoint)
    if said is None:
        return None
    # DeepSeek-V4 has this key at the top of config.json.
    config = {"expert_dtype": checkpoint.config.get("expert_dtype"), **said.config}
    parsers = (kind.parser(said.method, config) for kind in KINDS)
    parse = next(filter(None, parsers), None)
    if parse is None:
        return None
    try:
        settings = parse(config)
    except ValueError as error:
        reason = f"the model is quantized by {said.method!r}: {error}"
        raise FormatError(said.path, reason) from None
    return dataclasses.replace(settings, method=said.method, file=os.path.basename(said.path))


def survey(checkpoint: Checkpoint) -> Survey:
    """Finds the 4-bit weights of a checkpoint. Reads only the tensors that tell their shapes.
    Raises FormatError if the settings are of weights that cannot be read."""
    settings, said = settings_of(checkpoint), quantization(checkpoint)
    found = bnb.survey(checkpoint)
    for kind in KINDS:
        if said is None or isinstance(settings, kind.settings):
            kind.add(found, checkpoint, settings)
    found.unread += unread(checkpoint, found)
    known = said is not None and (settings is not None or said.method in _OF_BITSANDBYTES)
    if known or found.weights:
        found.faults += found.unread
    return found


def require_loadable(checkpoint: Checkpoint, found: Survey) -> None:
    """Raises FormatError for a quantization that cannot be read, for the first fault of a survey,
    and for a directory that could name its version of GPTQ and does not."""
    problem = method_problem(checkpoint)
    if problem is not None:
        raise problem
    found.require_sound()
    if checkpoint.directory is not None and is_assumed(checkpoint, found):
        reason = "no quantization_config tells whether it is in gptq or gptq_v2"
        raise FormatError(checkpoint.path, reason)


def require_readable(checkpoint: Checkpoint, found: Survey, *, fp8: bool = False) -> None:
    """Raises FormatError unless every tensor of a survey is understood: for everything that
    require_loadable refuses, and for tensors in the layout of another library. fp8: the caller
    reads weights in FP8; else they are refused too."""
    require_loadable(checkpoint, found)
    for fault in found.unread:
        raise fault
    for weight in () if fp8 else found.fp8.values():
        raise FormatError(weight.path, "it is in FP8, which is not read here", weight.name)


def doubts(checkpoint: Checkpoint, found: Survey) -> list[str]:
    """Returns warnings of what was assumed to read the weights."""
    return [ASSUMED] if is_assumed(checkpoint, found) else []


def method_problem(checkpoint: Checkpoint) -> FormatError | None:
    """Returns an error for a quantization that is not read, by its name."""
    said = quantization(checkpoint)
    if said is None or said.method == OF_EXPERTS or settings_of(checkpoint) is not None:
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
