"""Checks MXFP4 and NVFP4 weights: their scales, and their config.json."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nf4.checkpoint.e2m1 import E2m1Weight, decoded_scales
from nf4.checkpoint.e2m1_config import Settings
from nf4.checkpoint.e2m1_plan import fused_with
from nf4.checkpoint.scales import scale_problems
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.weights import Survey
from nf4.tensor import QuantizedTensor


def e2m1_value_problems(weight: E2m1Weight, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yields (severity, problem) for each fault in the scales of a weight."""
    names = {part: name[1:] for part, name in weight.state.layout.names.items()}
    yield from scale_byte_problems(
        weight.without_codes(checkpoint), names["scales"], names.get("global", "")
    )


def usable_global_scales(scales: np.ndarray) -> np.ndarray:
    """Returns which global scales of NVFP4 are finite and positive."""
    return np.isfinite(scales) & (scales > 0)


def scale_byte_problems(
    weight: QuantizedTensor, scales: str, of_all: str
) -> Iterator[tuple[str, str]]:
    """Yields the same for a weight in MXFP4 or NVFP4. scales, of_all: the names of its parts."""
    given = weight.nested_absmax
    if given is not None and not (usable := usable_global_scales(given)).all():
        yield "fault", f"{of_all}: {given[~usable][0]}; expected a positive number"
        return
    yield from scale_problems(decoded_scales(weight).reshape(-1), scales, negative="warning")


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
    yield from _unequal_scales(checkpoint, found)


def _unequal_scales(checkpoint: Checkpoint, found: Survey) -> Iterator[tuple[str, str]]:
    """Yields a warning if weights of NVFP4 that engines fuse have several global scales."""
    scales = {
        name: weight.global_scale(checkpoint)
        for name, weight in found.weights.items()
        if isinstance(weight, E2m1Weight) and "global" in weight.parts
    }
    groups = [group for name in scales if len(group := fused_with(name, scales)) > 1]
    unequal = [group for group in groups if any(scales[n] != scales[group[0]] for n in group)]
    if unequal:
        yield (
            "warning",
            f"{len(unequal)} weights do not have the global scale of those that engines fuse them "
            f"with, such as {', '.join(unequal[0])}; an engine that uses one scale for all, such "
            f"as vLLM, computes with other weights",
        )
