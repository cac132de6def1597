"""Converts integer weights from one layout to another, bit for bit: only the order of codes, zero
points and scales changes. e2m1_repack.py converts floats."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from nf4.checkpoint.e2m1 import E2m1Weight
from nf4.checkpoint.e2m1_repack import convert_floats
from nf4.checkpoint.errors import FormatError, OptionError
from nf4.checkpoint.int4 import BORROWS, Int4Weight
from nf4.checkpoint.int4_config import METHOD_OF, Settings
from nf4.checkpoint.int4_layouts import (
    AWQ,
    COMPRESSED_TENSORS,
    GPTQ,
    LAYOUTS,
    SYMMETRIC_ZERO,
    Layout,
)
from nf4.checkpoint.int4_plan import Int4Plan, integer_config
from nf4.checkpoint.kinds import doubts, require_readable, settings_of, survey
from nf4.checkpoint.leftovers import strangers
from nf4.checkpoint.output import Progress, output_target, write_checkpoint
from nf4.checkpoint.quantization import quantization, without_quantization
from nf4.checkpoint.rules import architectures, untied
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.steps import FromWeight, Result, steps_in_place
from nf4.checkpoint.weights import Survey, Weight
from nf4.checkpoint.writer import SafetensorsWriter

_REMOVED = (
    "the weights are in act order (weight_g_idx, actorder group), which the package "
    "compressed-tensors loads only up to 0.18"
)


# The targets of a conversion, and the kinds of weights that have each.
TARGETS: dict[str, set[type[Weight]]] = {
    **{name: {Int4Weight} for name in LAYOUTS},
    "compressed-tensors": {Int4Weight, E2m1Weight},
    "modelopt": {E2m1Weight},
    "nf4": {E2m1Weight},
}


@dataclasses.dataclass(frozen=True)
class Repack(FromWeight):
    """The step that converts a weight to another layout."""

    weight: Int4Weight
    plan: Int4Plan

    def run(self, writer: SafetensorsWriter, result: Result) -> None:
        weight, to, started = self.weight, self.plan.layout, time.perf_counter()
        layout = weight.state.layout
        zeros = weight.zero_points(self.checkpoint)
        scales = weight.scales(self.checkpoint)
        if layout.same_words(to):
            packed = weight.words(self.checkpoint)
        else:
            packed = to.packed(weight.codes(self.checkpoint))
        tensors = self.plan.tensors(
            {
                "packed": packed,
                "scales": scales if layout.by_row == to.by_row else scales.T.copy(),
                "zeros": to.stored_zeros(zeros),
                "g_idx": weight.g_idx(self.checkpoint),
            }
        )
        written = sum(array.nbytes for array in tensors.values())
        result.count(self, weight.elements, weight.nbytes + written, started)
        for name, array in tensors.items():
            writer.write(name, array)


@dataclasses.dataclass(frozen=True)
class _Found:
    """Facts about the data of all weights. symmetric: all zero points are 8. act_order: there is a
    g_idx that matters. borrows: there are zero points of 0."""

    symmetric: bool
    act_order: bool
    borrows: bool


def _read(checkpoint: Checkpoint, weights: list[Int4Weight], to: Layout) -> _Found:
    """Reads the zero points and g_idx of all weights. Raises FormatError if `to` cannot hold
    them."""
    symmetric, act_order, borrows = True, False, False
    for weight in weights:
        problem = to.misfit(weight.shape)
        zeros = weight.zero_points(checkpoint)
        symmetric = symmetric and bool((zeros == SYMMETRIC_ZERO).all())
        if weight.g_idx(checkpoint) is not None:
            act_order = True
            if to is AWQ:
                problem = "awq has no g_idx, and this weight's columns are in act order"
        borrows = borrows or bool((zeros == 0).any())
        if problem is not None:
            raise FormatError(weight.path, f"cannot become {to.name}: {problem}", weight.name)
    return _Found(symmetric, act_order, borrows)


def _config(
    checkpoint: Checkpoint, found: Survey, steps: list[Repack], settings: Settings | None
) -> dict[str, Any]:
    """Returns config.json of the output. Raises FormatError if its quantization_config cannot
    describe the weights."""
    plans = [step.plan for step in steps]
    to, said = plans[0].layout, quantization(checkpoint)
    config = untied(without_quantization(checkpoint.config), found)
    old = {} if said is None else said.config
    if settings is not None and settings.method == METHOD_OF[to.name]:
        renamed = {"checkpoint_format": to.name, **({"format": to.name} if "format" in old else {})}
        return {**config, "quantization_config": {**old, **renamed}}
    if said is not None and old.get("kv_cache_scheme"):
        reason = f"cannot become {to.name}, which has no kv_cache_scheme"
        raise FormatError(said.path, reason)
    names = architectures(checkpoint.config)
    made = integer_config(plans, found.dense.values(), names, checkpoint.path)
    return {**config, "quantization_config": made}


def convert_checkpoint(
    source: str,
    destination: str,
    layout: str,
    *,
    threads: int = 0,
    replace: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Converts the weights of a checkpoint to another layout without loss (a dequantized weight has
    the same bits before and after), or weights in MXFP4 and NVFP4 to NF4.

    layout: for integers "gptq", "gptq_v2", "awq" or "compressed-tensors". Scales stay fp16 or bf16.
    Symmetric weights stay symmetric. For MXFP4 and NVFP4 "compressed-tensors", "modelopt" (NVFP4;
    the bits are those of the model's dtype) or "nf4", whose error Result.losses has. Dense tensors
    are copied bit for bit. threads: CPU threads for "nf4"; 0: all. source, destination, replace and
    progress: as in quantize_checkpoint.

    Raises FormatError, also for a weight that the layout cannot hold (a g_idx in awq, rows or
    columns that are not a multiple of 8, a global scale whose inverse is not exact), OptionError,
    OutputRefused and OSError; the destination is then unchanged.
    """
    if layout not in TARGETS:
        raise OptionError(f"layout is {layout!r}; expected {', '.join(TARGETS)}")
    with Checkpoint(source) as checkpoint:
        target = output_target(checkpoint, destination, replace)
        settings: Any = settings_of(checkpoint)  # of integers, where it is used
        found = survey(checkpoint)
        require_readable(checkpoint, found)
        kinds = {type(weight) for weight in found.weights.values()}
        of_kind = TARGETS[layout]
        if kinds and not kinds & {E2m1Weight, Int4Weight}:
            raise FormatError(source, "nothing to convert: its weights are of bitsandbytes")
        if len(kinds) == 1 and kinds.isdisjoint(of_kind):
            expected = ", ".join(each for each, known in TARGETS.items() if kinds <= known)
            raise OptionError(
                f"{source}: layout is {layout!r}; expected {expected} for its weights"
            )
        if kinds == {E2m1Weight}:
            for stranger in strangers(checkpoint, found):
                raise stranger
            return convert_floats(checkpoint, found, layout, target, threads, progress)
        to = LAYOUTS[layout]
        weights = [weight for weight in found.weights.values() if isinstance(weight, Int4Weight)]
        if not weights or len(weights) != len(found.weights):
            reason = "of bitsandbytes" if found.weights else "dense"
            raise FormatError(source, f"nothing to convert: its weights are {reason}")
        is_named = settings is None or settings.method == METHOD_OF[to.name]
        if is_named and all(weight.state.layout is to for weight in weights):
            raise OptionError(f"{source}: it is in {to.name} already")
        for stranger in strangers(checkpoint, found):
            raise stranger
        data = _read(checkpoint, weights, to)
        said = settings.symmetric if settings is not None else None
        symmetric = data.symmetric if said is None else said
        made = {
            weight.packed.name: _repack(checkpoint, weight, to, symmetric, data.act_order)
            for weight in weights
        }
        repacked = [*made.values()]
        config = _config(checkpoint, found, repacked, settings) if checkpoint.config else {}
        steps = steps_in_place(checkpoint, found, made)
        result = write_checkpoint(checkpoint, steps, config, target, progress)
        if data.act_order and to is COMPRESSED_TENSORS:
            result.warnings.append(_REMOVED)
        result.warnings += doubts(checkpoint, found)
        if data.borrows and to is GPTQ:
            result.warnings.append(f"there are zero points of 0, {BORROWS}")
        return result


def _repack(
    checkpoint: Checkpoint, weight: Int4Weight, to: Layout, symmetric: bool, act_order: bool
) -> Repack:
    scales, size = weight.parts["scales"].dtype, weight.state.group_size
    plan = Int4Plan(weight.name, to, weight.shape, size, scales, symmetric, act_order)
    return Repack(checkpoint, weight, plan)
