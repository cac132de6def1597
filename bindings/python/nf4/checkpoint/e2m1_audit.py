"""Checks MXFP4 and NVFP4 weights: their scales, and their config.json."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nf4.checkpoint.e2m1 import E2m1Weight
from nf4.checkpoint.e2m1_config import Settings
from nf4.checkpoint.scales import scale_problems
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.weights import Survey


def e2m1_value_problems(weight: E2m1Weight, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yields (severity, problem) for each fault in the scales of a weight."""
    names, given = weight.state.layout.names, weight.global_scale(checkpoint)
    if given is not None and not (np.isfinite(given).all() and (given > 0).all()):
        yield "fault", f"{names['global'][1:]}: {given[0]}; expected a positive number"
        return
    yield from scale_problems(weight.scales(checkpoint), names["scales"][1:], negative="warning")


def e2m1_config_problems(
    checkpoint: Checkpoint, settings: Settings | None, found: Survey
) -> Iterator[tuple[str, str]]:
    """Yields (severity, problem) if config.json contradicts the weights."""
    floats = {weight.module for weight in found.weights.values() if isinstance(weight, E2m1Weight)}
    if settings is None:
        if checkpoint.directory is not None and checkpoint.config:
            yield "fault", "it has 4-bit weights, but no quantization_config"
        return
    others = len(found.weights) - len(floats)
    if others:
        method = settings.method
        yield "fault", f"the model is quantized by {method!r}, but {others} weights are not"
    if not floats:
        yield "fault", "it has a quantization_config, but no 4-bit weights"
    for entry in settings.dense:
        if entry in floats:
            yield "fault", f"the settings leave {entry} dense, but it is in 4 bits"
