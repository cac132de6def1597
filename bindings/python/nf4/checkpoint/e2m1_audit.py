"""Checks MXFP4 and NVFP4 weights: their scales, and their config.json."""

from __future__ import annotations

from collections.abc import Iterator

from nf4.checkpoint.e2m1 import E2m1Weight
from nf4.checkpoint.e2m1_config import Settings
from nf4.checkpoint.e2m1_plan import fused_with
from nf4.checkpoint.scales import scale_byte_problems
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.weights import Survey


def e2m1_value_problems(weight: E2m1Weight, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yields (severity, problem) for each fault in the scales of a weight."""
    names = {part: name[1:] for part, name in weight.state.layout.names.items()}
    yield from scale_byte_problems(
        weight.without_codes(checkpoint), names["scales"], names.get("global", "")
    )


def e2m1_config_problems(
    checkpoint: Checkpoint, settings: Settings, found: Survey, modules: list[str]
) -> Iterator[tuple[str, str]]:
    """Yields (severity, problem) if config.json contradicts the weights."""
    known = set(modules)
    for entry in settings.dense:
        if entry in known:
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
