"""Checks integer weights: their data, and their config.json."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.int4 import BORROWS, Int4Weight, labelled_as_other
from nf4.checkpoint.int4_config import Settings
from nf4.checkpoint.int4_layouts import COMPRESSED_TENSORS, GPTQ, GPTQ_V2
from nf4.checkpoint.rules import architectures, dense_linear
from nf4.checkpoint.scales import count_problem, scale_problems
from nf4.checkpoint.skips import SkipMatcher
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.weights import Survey

_OF_GPTQ = (GPTQ, GPTQ_V2)
# The key in which a method lists the modules that it leaves dense.
_KEYS_OF_DENSE = {
    "gptq": "dynamic",
    "awq": "modules_to_not_convert",
    "auto-round": "extra_config",
    "compressed-tensors": "ignore",
}


def int4_value_problems(weight: Int4Weight, checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Lists (severity, problem) for each fault in the scales, zero points and g_idx of a weight."""
    found: list[tuple[str, str]] = []
    scales = weight.scales(checkpoint).astype(np.float32)
    # Some quantizers choose negative scales; q - z then has the other sign.
    found += scale_problems(scales.reshape(-1), "scales", negative="warning")
    found += count_problem("warning", scales.reshape(-1) == 0, "are 0", "scales")
    for check in (_zeros_problems, _g_idx_problems):
        try:
            found += check(weight, checkpoint)
        except FormatError as error:
            found.append(("fault", error.reason))
    return found


def _zeros_problems(weight: Int4Weight, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    zeros = weight.zeros(checkpoint)
    if zeros is None or weight.state.layout not in _OF_GPTQ:
        return
    layout = weight.state.layout
    other = labelled_as_other(layout, zeros)
    if other is not None:
        yield (
            "warning",
            f"all its zero points read as {layout.name} are {zeros.flat[0]}: they look like those "
            f"of a symmetric weight in {other.name}",
        )
    elif layout is GPTQ and (zeros == 0).any():
        yield (
            "warning",
            f"{np.count_nonzero(zeros == 0)} zero points are 0, {BORROWS}",
        )


def _g_idx_problems(weight: Int4Weight, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    if weight.g_idx(checkpoint) is not None and weight.state.act_order is False:
        yield (
            "warning",
            f"its g_idx is not column / group_size, but {weight.state.file} says that it has no "
            "act order, and some programs then ignore g_idx",
        )


def int4_config_problems(
    checkpoint: Checkpoint, settings: Settings, found: Survey, modules: list[str]
) -> Iterator[tuple[str, str]]:
    """Yields (severity, problem) if config.json contradicts the weights or cannot be judged."""
    yield from _dense_problems(settings, modules)
    if settings.layout is COMPRESSED_TENSORS:
        yield from _ignore_problems(checkpoint, settings, found, modules)
    if settings.layout in _OF_GPTQ and not settings.symmetric:
        yield (
            "warning",
            "zero points of asymmetric weights cannot tell gptq from gptq_v2; "
            f"checkpoint_format {settings.layout.name} is taken as it is",
        )


def _dense_problems(settings: Settings, modules: list[str]) -> Iterator[tuple[str, str]]:
    """Finds entries of the list of dense modules that name a 4-bit module."""
    key = _KEYS_OF_DENSE[settings.method]
    matcher, names = SkipMatcher(modules), set(modules)
    for entry in settings.dense:
        if settings.method != "awq":
            module = entry if entry in names else None
        else:
            module = matcher.first(entry)
        if module is not None:
            yield "fault", f"{key} has {entry!r}, which leaves the 4-bit {module} dense"


def _ignore_problems(
    checkpoint: Checkpoint, settings: Settings, found: Survey, modules: list[str]
) -> Iterator[tuple[str, str]]:
    """Finds dense layers that compressed-tensors would take for 4-bit ones. Patterns are not
    run."""
    ignored = set(settings.dense)
    if any(entry.startswith("re:") for entry in ignored):
        return
    for module in dense_linear(found.dense.values(), modules, architectures(checkpoint.config)):
        if module not in ignored:
            yield "warning", f"ignore lacks {module}, whose weight is dense"
