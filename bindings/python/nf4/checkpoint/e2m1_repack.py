"""Converts MXFP4 and NVFP4 weights: between the layouts of compressed-tensors and ModelOpt without
loss, and to NF4 with a loss that is measured."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from nf4._dequantize import dequantize
from nf4.checkpoint.bnb import NESTED_BLOCKSIZE, Plan, State
from nf4.checkpoint.difference import statistics_of
from nf4.checkpoint.dtypes import NF4_TO_FILE, NUMPY
from nf4.checkpoint.e2m1 import E2m1Weight
from nf4.checkpoint.e2m1_layouts import MXFP4, WRITTEN, Layout
from nf4.checkpoint.e2m1_plan import E2m1Plan, e2m1_config
from nf4.checkpoint.errors import FormatError, OptionError
from nf4.checkpoint.output import Progress, write_checkpoint
from nf4.checkpoint.quantization import quantization, without_quantization
from nf4.checkpoint.quantize_plan import QuantizeOptions, config_of
from nf4.checkpoint.rules import architectures, choose_rules, untied
from nf4.checkpoint.scales import E4M3, usable_global_scales
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.stacks import OF_AN_EXPERT, is_stack
from nf4.checkpoint.steps import FromWeight, Result, Step, steps_in_place
from nf4.checkpoint.transaction import DirectoryTarget, FileTarget
from nf4.checkpoint.weights import Survey
from nf4.checkpoint.writer import SafetensorsWriter
from nf4.tensor import QuantizedTensor

NF4 = "nf4"
_BLOCKSIZE = 64
_MAGNITUDES = np.array([0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


@dataclasses.dataclass(frozen=True)
class Relabel(FromWeight):
    """The step that writes a weight in another layout. The codes and the scales of blocks stay."""

    weight: E2m1Weight
    plan: E2m1Plan
    global_scale: np.ndarray | None

    def run(self, writer: SafetensorsWriter, result: Result) -> None:
        started = time.perf_counter()
        read = self.weight.load(self.checkpoint)
        made = dataclasses.replace(
            read, nested_absmax=self.global_scale, scale_rule=self.plan.layout.scale_rule
        )
        result.count(self, self.weight.elements, 2 * self.weight.nbytes, started)
        for name, array in self.plan.parts(made).items():
            writer.write(name, array)


@dataclasses.dataclass(frozen=True)
class ToNF4(FromWeight):
    """The step that quantizes a weight to NF4, and measures what is lost."""

    plan: Plan
    threads: int

    def run(self, writer: SafetensorsWriter, result: Result) -> None:
        started = time.perf_counter()
        dense = dequantize(self.weight.load(self.checkpoint), "fp32", threads=self.threads)
        if not np.isfinite(dense).all():
            reason = "it has NaN or Inf, which NF4 cannot hold; nf4 verify names the scales"
            raise FormatError(self.weight.path, reason, self.name)
        made = self.plan.quantize(dense, self.threads)
        result.count(self, dense.size, dense.nbytes + made.nbytes, started)
        result.losses.append(statistics_of(dequantize(made, "fp32", threads=self.threads), dense))
        for name, data in self.plan.parts(made).items():
            writer.write(name, data)


def convert_floats(
    checkpoint: Checkpoint,
    found: Survey,
    to: str,
    target: FileTarget | DirectoryTarget,
    threads: int,
    progress: Progress | None,
) -> Result:
    """Converts a checkpoint whose 4-bit weights are in MXFP4 and NVFP4, as convert_checkpoint
    does."""
    said = quantization(checkpoint)
    cache = () if said is None else ("kv_cache_scheme", "kv_cache_quant_algo")
    if said is not None and any(said.config.get(key) for key in cache):
        raise FormatError(
            said.path, f"cannot become {to}: it quantizes the cache of keys and values"
        )
    if to == NF4:
        steps, config = _to_nf4(checkpoint, found, threads)
    else:
        steps, config = _relabelled(checkpoint, found, to)
    made = untied(without_quantization(checkpoint.config), found)
    made = {**made, "quantization_config": config} if checkpoint.config else {}
    return write_checkpoint(checkpoint, steps, made, target, progress)


# ---- To another layout -----------------------------------------------------------------


def _relabelled(
    checkpoint: Checkpoint, found: Survey, to: str
) -> tuple[dict[str, list[Step]], dict[str, Any]]:
    layouts = WRITTEN[to]
    made: dict[str, Step] = {}
    plans = []
    for name, weight in found.weights.items():
        assert isinstance(weight, E2m1Weight)
        layout = layouts.get(weight.format)
        reason = _misfit(weight, layout)
        if reason is not None or layout is None:
            why = reason or f"no {weight.format} is written there"
            raise FormatError(weight.path, f"cannot become {to}: {why}", name)
        plan = E2m1Plan(name, layout, weight.shape, weight.state.blocksize)
        plans.append(plan)
        scale = _global_scale(checkpoint, weight, layout)
        made[weight.packed.name] = Relabel(checkpoint, weight, plan, scale)
    if all(weight.state.layout is plan.layout for weight, plan in zip(
        found.weights.values(), plans, strict=True
    )):  # fmt: skip
        raise OptionError(f"{checkpoint.path}: it is in {to} already")
    if len({plan.layout for plan in plans}) > 1:
        raise FormatError(checkpoint.path, f"cannot become {to}: it has both mxfp4 and nvfp4")
    names = architectures(checkpoint.config)
    return steps_in_place(checkpoint, found, made), e2m1_config(plans, found.dense.values(), names)


def _misfit(weight: E2m1Weight, layout: Layout | None) -> str | None:
    """Says why a layout cannot hold a weight; None if it can."""
    if is_stack(weight):
        return "its experts are one stack, and that layout has a matrix for each"
    if layout is not None and weight.format != MXFP4 and weight.state.blocksize != 16:
        return f"its blocks have {weight.state.blocksize} columns, and that layout's have 16"
    return None


def _global_scale(checkpoint: Checkpoint, weight: E2m1Weight, layout: Layout) -> np.ndarray | None:
    """Returns the global scale in another layout. Raises FormatError if it is not a positive
    number, or if no positive number gives the same weights in their dtype: one layout multiplies by
    it, the other divides."""
    read = weight.without_codes(checkpoint)
    given = read.nested_absmax
    if given is None:
        return None
    if not usable_global_scales(given).all():
        reason = f"its global scale is {given[0]}; expected a positive number"
        raise FormatError(weight.path, f"cannot become {layout.name}: {reason}", weight.name)
    if layout.scale_rule == read.scale_rule:
        return given
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / given
    expected = _values(read, given, weight.state.scale_rule, weight.dtype)
    near = (inverse, np.nextafter(inverse, np.float32(0)), np.nextafter(inverse, np.float32("inf")))
    for scale in near:
        same = np.array_equal(expected, _values(read, scale, layout.scale_rule, weight.dtype))
        if same and usable_global_scales(scale).all():
            return scale
    reason = (
        f"cannot become {layout.name} without loss: {given[0]} {_verb(read.scale_rule)} its "
        f"scales, and no number that {_verb(layout.scale_rule)} them gives the same weights in "
        f"{weight.dtype}"
    )
    raise FormatError(weight.path, reason, weight.name)


def _verb(scale_rule: str | None) -> str:
    return "divides" if scale_rule == "divisor" else "multiplies"


def _values(
    weight: QuantizedTensor, scale: np.ndarray, scale_rule: str | None, dtype: str
) -> np.ndarray:
    """Returns the bits of every value that the weight can have with a global scale."""
    stored = E4M3[np.unique(weight.absmax)]
    with np.errstate(all="ignore"):
        scales = stored / scale if scale_rule == "divisor" else stored * scale
        values = (scales[:, None] * _MAGNITUDES).astype(NUMPY[NF4_TO_FILE[dtype]])
    return values.view(f"u{values.itemsize}")


# ---- To NF4 ----------------------------------------------------------------------------


def _to_nf4(
    checkpoint: Checkpoint, found: Survey, threads: int
) -> tuple[dict[str, list[Step]], dict[str, Any]]:
    plans, made = [], {}
    for name, weight in found.weights.items():
        *experts, rows, cols = weight.shape
        reason = None
        if experts and rows * cols % _BLOCKSIZE:
            reason = f"an expert has {rows * cols} elements, not a multiple of {_BLOCKSIZE}"
        elif OF_AN_EXPERT.search(name):
            reason = (
                "each expert has a matrix of its own: nf4 dequantize, then nf4 quantize --experts"
            )
        if reason is not None:
            raise FormatError(weight.path, f"cannot become nf4: {reason}", name)
        state = State(NF4, _BLOCKSIZE, weight.dtype, weight.shape, NESTED_BLOCKSIZE)
        plans.append(Plan(name, state))
        made[weight.packed.name] = ToNF4(checkpoint, weight, plans[-1], threads)
    rules, _ = choose_rules(checkpoint.config, found)
    if rules.model is not None:
        for name, weight in found.weights.items():
            reason = None if is_stack(weight) else rules.not_loadable(name, weight.shape)
            if reason is not None:
                raise FormatError(weight.path, f"cannot become nf4: {reason}", name)
    options = QuantizeOptions(blocksize=_BLOCKSIZE)
    dense = list(found.dense.values())
    config = config_of(plans, dense, rules, options, checkpoint.config)
    return steps_in_place(checkpoint, found, made), config
