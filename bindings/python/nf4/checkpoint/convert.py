"""Quantizes and dequantizes whole checkpoints, with one tensor in memory at a time."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from nf4.checkpoint.bnb import NESTED_BLOCKSIZE, Plan, State
from nf4.checkpoint.dtypes import DTYPE_KEYS, FILE_TO_NF4, NF4_TO_TORCH
from nf4.checkpoint.errors import FormatError, OptionError
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.int4_layouts import LAYOUTS
from nf4.checkpoint.int4_plan import Int4Plan, integer_config
from nf4.checkpoint.kinds import survey
from nf4.checkpoint.model_files import (
    compute_dtype,
    existing_quantization,
    quantization_config,
)
from nf4.checkpoint.output import Progress, output_target, write_checkpoint
from nf4.checkpoint.reader import SafetensorsFile
from nf4.checkpoint.rules import (
    Rules,
    architectures,
    choose_rules,
    is_matrix,
    is_transposed,
    model_types,
    module_of,
    transposed_if_conv1d,
)
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.steps import Copy, Dequantize, Quantize, Result, Step
from nf4.checkpoint.weights import Survey


@dataclasses.dataclass(frozen=True)
class QuantizeOptions:
    """How to quantize a checkpoint.

    format           "nf4", "fp4" or "int4"
    blocksize        weights for each scale: a power of two, 32..4096
    nested           double quantization: 8-bit scales
    storage          torch's name of the dtype that packed bytes are viewed as
    skip             patterns of modules to leave dense besides the default ones
    only             patterns of the modules to quantize; empty: the default rules
    compute          torch's name of the dtype to compute in; None: the model's own
    allow_nonfinite  accept NaN (stored as 0) and Inf (as the largest of its block)
    threads          CPU threads; 0: all

    Of nf4 and fp4 alone: blocksize, nested, storage, compute. Of int4 alone:

    layout           "gptq", "gptq_v2", "awq" or "compressed-tensors"
    group_size       columns for each scale: a multiple of 8; -1: the whole row
    symmetric        all zero points are 8; else each group has one
    """

    format: str = "nf4"
    blocksize: int = 64
    nested: bool = True
    storage: str = "uint8"
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    compute: str | None = None
    allow_nonfinite: bool = False
    threads: int = 0
    layout: str = "compressed-tensors"
    group_size: int = 128
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.format == "int4":
            self._check_integers()
        for name in ("skip", "only"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise OptionError(f"{name} is {value!r}; expected a tuple of patterns")

    def _check_integers(self) -> None:
        if self.layout not in LAYOUTS:
            raise OptionError(f"layout is {self.layout!r}; expected {', '.join(LAYOUTS)}")
        if self.group_size != -1 and (self.group_size <= 0 or self.group_size % 8):
            raise OptionError(f"group_size is {self.group_size}; expected a multiple of 8, or -1")


def _quantize_step(
    file: SafetensorsFile, info: TensorInfo, rules: Rules, options: QuantizeOptions
) -> Quantize:
    """The step for a dense tensor that becomes 4-bit."""
    if options.format == "int4":
        plan: Plan | Int4Plan = _integer_plan(info, options)
    else:
        plan = _bnb_plan(info, rules, options)
    transposed = is_transposed(info.name, rules.types)
    return Quantize(file, info, plan, transposed, options.allow_nonfinite, options.threads)


def _integer_plan(info: TensorInfo, options: QuantizeOptions) -> Int4Plan:
    # The layouts have no scales of float32.
    scales = "F16" if info.dtype == "F32" else info.dtype
    rows, cols = info.shape
    layout, size = LAYOUTS[options.layout], options.group_size
    return Int4Plan(info.name, layout, (rows, cols), size, scales, options.symmetric)


def _integer_reason(info: TensorInfo, rules: Rules, options: QuantizeOptions) -> str | None:
    """Why this layout cannot hold a matrix that may become 4-bit."""
    rows, cols = info.shape
    if is_transposed(info.name, rules.types):
        return "Conv1D"
    if options.group_size != -1 and cols % options.group_size:
        return f"columns not a multiple of the group size {options.group_size}"
    return LAYOUTS[options.layout].misfit((rows, cols))


def _bnb_plan(info: TensorInfo, rules: Rules, options: QuantizeOptions) -> Plan:
    state = State(
        format=options.format,
        blocksize=options.blocksize,
        dtype=FILE_TO_NF4[info.dtype],
        shape=transposed_if_conv1d(info.name, info.shape, rules.types),
        nested_blocksize=NESTED_BLOCKSIZE if options.nested else 0,
    )
    plan = Plan(info.name, state, options.storage)
    problem = plan.storage_problem()
    if problem:
        raise OptionError(f"{info.name}: {problem}")
    return plan


def _quantized_config(
    checkpoint: Checkpoint,
    found: Survey,
    steps: list[Quantize],
    rules: Rules,
    options: QuantizeOptions,
) -> dict[str, Any]:
    if not steps and existing_quantization(checkpoint):
        return checkpoint.config
    if options.format == "int4":
        plans = [step.plan for step in steps if isinstance(step.plan, Int4Plan)]
        config = integer_config(checkpoint, found, plans)
        return {**checkpoint.config, "quantization_config": config}
    quantized = {step.name for step in steps}
    dense = [info for name, info in found.dense.items() if name not in quantized]
    skip = rules.skip_modules(dense, [*quantized, *found.weights], architectures(checkpoint.config))
    dtypes = [step.plan.state.dtype for step in steps if isinstance(step.plan, Plan)]
    return {
        **checkpoint.config,
        "quantization_config": quantization_config(
            format=options.format,
            nested=options.nested,
            compute=options.compute or compute_dtype(checkpoint.config, dtypes),
            storage=options.storage,
            skip_modules=skip,
        ),
    }


def _require_dense(checkpoint: Checkpoint, found: Survey) -> None:
    """FormatError if there are 4-bit weights: config.json has room for one kind."""
    for name, weight in found.weights.items():
        path = checkpoint.owner[weight.packed.name].path
        raise FormatError(path, f"it is 4-bit already ({weight.format})", name)


def quantize_checkpoint(
    source: str,
    destination: str,
    options: QuantizeOptions,
    *,
    replace: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Quantize a dense checkpoint to 4 bits.

    source and destination are both .safetensors files or both directories. Weights that are 4-bit
    already and tensors that stay dense are copied bit for bit. replace: the destination may exist.
    progress: called with each tensor's name and bytes. Where config.json names a model and
    transformers is installed, a child process builds it without weights.

    Raises FormatError, OptionError, OutputRefused, OSError and nf4.Error; the destination is then
    unchanged.
    """
    with Checkpoint(source) as checkpoint:
        target = output_target(checkpoint, destination, replace)
        existing_quantization(checkpoint)
        found = survey(checkpoint)
        found.require_sound()
        rules, chosen_by = choose_rules(checkpoint.config, found, options.skip, options.only)
        unknown = rules.unmatched(module_of(name) for name in found.dense)
        if unknown:
            raise OptionError(f"--skip or --only names no tensor: {', '.join(map(repr, unknown))}")
        reasons = {name: rules.dense_reason(info) for name, info in found.dense.items()}
        if options.format == "int4":
            _require_dense(checkpoint, found)
            reasons = {
                name: reason or _integer_reason(found.dense[name], rules, options)
                for name, reason in reasons.items()
            }
        if None not in reasons.values() and not found.weights:
            raise FormatError(
                source, f"nothing to quantize: no matrix may become 4-bit ({chosen_by})"
            )
        steps: dict[str, list[Step]] = {
            file_name: [
                _quantize_step(file, info, rules, options)
                if reasons.get(info.name, "") is None
                else Copy(file, info, info.name in found.dense)
                for info in file.tensors.values()
            ]
            for file_name, file in checkpoint.files.items()
        }
        quantized = [step for all in steps.values() for step in all if isinstance(step, Quantize)]
        config = _quantized_config(checkpoint, found, quantized, rules, options)
        result = write_checkpoint(checkpoint, steps, config, target, progress)
        result.chosen_by = chosen_by
        matrices = (name for name, info in found.dense.items() if is_matrix(info))
        result.left_dense = dict(Counter(reason for name in matrices if (reason := reasons[name])))
        return result


def _dense_steps(
    checkpoint: Checkpoint, found: Survey, dtype: str | None, threads: int
) -> dict[str, list[Step]]:
    """The steps for each file. A weight goes where its packed tensor was."""
    packed, types = found.by_packed(), model_types(checkpoint.config)

    def step(file: SafetensorsFile, info: TensorInfo) -> Step | None:
        weight = packed.get(info.name)
        if weight is not None:
            transposed = is_transposed(weight.name, types)
            return Dequantize(checkpoint, weight, dtype or weight.dtype, transposed, threads)
        return Copy(file, info, True) if info.name in found.dense else None

    return {
        name: [made for info in file.tensors.values() if (made := step(file, info))]
        for name, file in checkpoint.files.items()
    }


def dequantize_checkpoint(
    source: str,
    destination: str,
    *,
    dtype: str | None = None,
    threads: int = 0,
    replace: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Dequantize the 4-bit weights of a checkpoint.

    dtype: "fp32", "fp16" or "bf16"; None: the dtype that each weight had. Dense tensors are copied
    bit for bit. threads: CPU threads; 0: all. source, destination, replace and progress: as of
    quantize_checkpoint.

    Raises FormatError, OutputRefused, OSError and nf4.Error; the destination is then unchanged.
    """
    with Checkpoint(source) as checkpoint:
        target = output_target(checkpoint, destination, replace)
        found = survey(checkpoint)
        found.require_sound()
        if not found.weights:
            raise FormatError(source, "nothing to dequantize: it has no 4-bit weights")
        steps = _dense_steps(checkpoint, found, dtype, threads)
        config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
        if dtype is not None:
            config |= {key: NF4_TO_TORCH[dtype] for key in DTYPE_KEYS if key in config}
        return write_checkpoint(checkpoint, steps, config, target, progress)
