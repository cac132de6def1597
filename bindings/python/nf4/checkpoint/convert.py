"""Quantizes and dequantizes whole checkpoints, with one tensor in memory at a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from nf4.checkpoint.bnb import BnbWeight
from nf4.checkpoint.dtypes import DTYPE_KEYS, NF4_TO_TORCH
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.kinds import doubts, require_readable, settings_of, survey
from nf4.checkpoint.leftovers import strangers
from nf4.checkpoint.output import Progress, output_target, write_checkpoint
from nf4.checkpoint.plans import Amax
from nf4.checkpoint.quantization import quantization, without_quantization
from nf4.checkpoint.quantize_plan import (
    QuantizeOptions,
    config_of,
    dense_reasons,
    group_size_problem,
    plan_of,
    plan_of_stack,
    stacks_of,
)
from nf4.checkpoint.reader import SafetensorsFile
from nf4.checkpoint.rules import (
    Rules,
    architectures,
    choose_rules,
    is_matrix,
    is_transposed,
    model_types,
    untied,
)
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.stacks import OF_AN_EXPERT, Stack, is_stack, parameter_of
from nf4.checkpoint.steps import (
    AnyQuantized,
    Copy,
    Dequantize,
    DequantizeFp8,
    Quantize,
    QuantizeStack,
    Result,
    Step,
    steps_in_place,
    steps_of,
)
from nf4.checkpoint.weights import Survey, Weight

# Quantizes the dense weights of these names in the checkpoint, or some of them.
Calibrate = Callable[[list[str]], dict[str, AnyQuantized]]


def _quantize_step(
    file: SafetensorsFile,
    info: TensorInfo,
    rules: Rules,
    options: QuantizeOptions,
    amax: Mapping[str, Amax],
    made: dict[str, AnyQuantized],
) -> Quantize:
    """The step for a dense tensor that becomes 4-bit. amax: from Writer.amax. made: weights that
    are quantized already, by name."""
    plan = plan_of(info, rules, options, amax.get(info.name))
    transposed = is_transposed(info.name, rules.types)
    return Quantize(file, info, plan, transposed, options.allow_nonfinite, options.threads, made)


def _stack_step(checkpoint: Checkpoint, stack: Stack, options: QuantizeOptions) -> QuantizeStack:
    plan = plan_of_stack(stack, checkpoint.info(stack.tensors[0]).dtype, options)
    return QuantizeStack(checkpoint, stack, plan, options.allow_nonfinite, options.threads)


def _quantized_config(
    checkpoint: Checkpoint,
    found: Survey,
    steps: list[Quantize | QuantizeStack],
    rules: Rules,
    options: QuantizeOptions,
) -> dict[str, Any]:
    said = quantization(checkpoint)
    if not steps and said is not None:
        return {**without_quantization(checkpoint.config), "quantization_config": said.config}
    quantized = {step.name for step in steps if isinstance(step, Quantize)}
    for step in steps:
        if isinstance(step, QuantizeStack):
            quantized.update(step.stack.tensors)
    dense = [info for name, info in found.dense.items() if name not in quantized]
    plans, config = [step.plan for step in steps], checkpoint.config
    made = config_of(plans, dense, rules, options, config, found.weights)
    return {**without_quantization(config), "quantization_config": made}


def _require_dense(checkpoint: Checkpoint, weights: Mapping[str, Weight]) -> None:
    """Raises FormatError if there are 4-bit weights, because config.json has room for one kind."""
    for name, weight in weights.items():
        path = checkpoint.owner[weight.packed.name].path
        raise FormatError(path, f"it is 4-bit already ({weight.format})", name)


def _require_no_other_kind(checkpoint: Checkpoint, found: Survey) -> None:
    """Raises FormatError if the checkpoint has 4-bit weights other than bitsandbytes', or says that
    it has."""
    others = {n: each for n, each in found.weights.items() if not isinstance(each, BnbWeight)}
    said = quantization(checkpoint)
    if said is not None and settings_of(checkpoint) is not None:
        but = "" if others else f", says {said.place}, but has no such weights"
        raise FormatError(said.path, f"the model is quantized by {said.method!r}{but}")
    _require_dense(checkpoint, others)


def quantize_checkpoint(
    source: str,
    destination: str,
    options: QuantizeOptions,
    *,
    replace: bool = False,
    progress: Progress | None = None,
    calibrate: Calibrate | None = None,
) -> Result:
    """Quantizes a dense checkpoint to 4 bits.

    source and destination are both .safetensors files or both directories. Weights that are already
    4-bit and tensors that stay dense are copied bit for bit. replace: the destination may exist.
    progress: called with each tensor's name and bytes. If config.json names a model and
    transformers is installed, a child process builds the model without weights. calibrate: returns
    quantized weights of some of these names; nf4.torch.calibration.checkpoints has one. The others
    are quantized without calibration.

    Raises FormatError, OptionError, OutputRefused, OSError and nf4.Error; the destination is then
    unchanged.
    """
    with Checkpoint(source) as checkpoint:
        target = output_target(checkpoint, destination, replace)
        found = survey(checkpoint)
        require_readable(checkpoint, found)
        _require_no_other_kind(checkpoint, found)
        began = time.perf_counter()
        rules, chosen_by = choose_rules(checkpoint.config, found, options.skip, options.only)
        choice_seconds = time.perf_counter() - began
        stacks, warnings = stacks_of(found.dense, rules, options, chosen_by)
        reasons = dense_reasons(found.dense, rules, options)
        if options.writer is not None:
            _require_dense(checkpoint, found.weights)
        problem = group_size_problem(found.dense, reasons, options)
        if None not in reasons.values() and not found.weights and not stacks:
            why = problem or "no matrix may become 4-bit"
            raise FormatError(source, f"nothing to quantize: {why} ({chosen_by})")
        of_stacks = {stack.tensors[0]: _stack_step(checkpoint, stack, options) for stack in stacks}
        taken = {name for stack in stacks for name in stack.tensors}

        chosen = {name for name, reason in reasons.items() if reason is None}
        amax = {} if options.writer is None else options.writer.amax(checkpoint, chosen)
        made = {} if calibrate is None else calibrate(sorted(chosen))

        def step(file: SafetensorsFile, info: TensorInfo) -> Step | None:
            if info.name in taken:
                return of_stacks.get(info.name)
            if reasons.get(info.name, "") is None:
                return _quantize_step(file, info, rules, options, amax, made)
            return Copy(file, info, info.name in found.dense)

        steps = steps_of(checkpoint, step)
        kinds = (Quantize, QuantizeStack)
        quantized = [step for all in steps.values() for step in all if isinstance(step, kinds)]
        config = _quantized_config(checkpoint, found, quantized, rules, options)
        result = write_checkpoint(checkpoint, steps, config, target, progress)
        result.chosen_by, result.choice_seconds = chosen_by, choice_seconds
        result.already = len(found.weights)
        result.warnings += warnings if problem is None else [*warnings, problem]
        matrices = (n for n, info in found.dense.items() if is_matrix(info) and n not in taken)
        result.left_dense = dict(Counter(reason for name in matrices if (reason := reasons[name])))
        return result


def _parameters(checkpoint: Checkpoint, found: Survey) -> tuple[dict[str, bool], list[str]]:
    """Returns the names of the 4-bit stacks that are a model's parameters, with whether the
    parameter is [experts, inputs, outputs], and warnings."""
    stacks = [name for name, weight in found.weights.items() if is_stack(weight)]
    # A checkpoint without a model has the stacks given to nf4.save, with any names.
    if not stacks or not architectures(checkpoint.config):
        return {}, []
    rules, why = choose_rules(checkpoint.config, found)
    model = rules.model
    if model is None:
        problem = f"experts are written as [experts, outputs, inputs], whatever the model's; {why}"
        return dict.fromkeys(stacks, False), [problem]
    turned = {parameter for parameter, stack in model.stacks.items() if stack.transposed}
    # A stack in the parameter's own place has its order.
    return {
        name: model.stack_of[name] in turned and parameter_of(name) != name
        for name in stacks
        if name in model.stack_of
    }, []


def _experts_warnings(checkpoint: Checkpoint, found: Survey) -> list[str]:
    """Warns, if each expert has a matrix of its own, that transformers does not load these, or that
    this is unknown."""
    if not any(map(OF_AN_EXPERT.search, found.weights)) or not architectures(checkpoint.config):
        return []
    rules, why = choose_rules(checkpoint.config, found)
    if rules.model is None:
        return [f"each expert has a matrix of its own, which some models do not load; {why}"]
    missing = rules.model.missing
    if not missing:
        return []
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return [
        f"{rules.model.name} does not load this: it finds no {missing[0]}{more}, since each expert "
        "has a matrix of its own"
    ]


def _dense_steps(
    checkpoint: Checkpoint,
    found: Survey,
    dtype: str | None,
    threads: int,
    parameters: Mapping[str, bool],
) -> dict[str, list[Step]]:
    """Returns the steps for each file. parameters: the first result of _parameters."""
    types = model_types(checkpoint.config)
    made: dict[str, Step] = {}
    for name, weight in found.weights.items():
        into = dtype or weight.dtype
        transposed = is_transposed(name, types) or parameters.get(name, False)
        dense = parameter_of(name) if name in parameters else name
        made[weight.packed.name] = Dequantize(checkpoint, weight, dense, into, transposed, threads)
    for name, fp8 in found.fp8.items():
        made[name] = DequantizeFp8(checkpoint, fp8, dtype or fp8.dtype)
    return steps_in_place(checkpoint, found, made)


def dequantize_checkpoint(
    source: str,
    destination: str,
    *,
    dtype: str | None = None,
    threads: int = 0,
    replace: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Dequantizes the 4-bit weights of a checkpoint, and those in FP8 beside them.

    dtype: "fp32", "fp16" or "bf16"; None: the dtype that each weight had. Dense tensors are copied
    bit for bit. threads: CPU threads; 0: all. source, destination, replace and progress: as in
    quantize_checkpoint.

    Raises FormatError, OutputRefused, OSError and nf4.Error; the destination is then unchanged.
    """
    with Checkpoint(source) as checkpoint:
        target = output_target(checkpoint, destination, replace)
        found = survey(checkpoint)
        require_readable(checkpoint, found, fp8=True)
        if not found.weights:
            raise FormatError(source, "nothing to dequantize: it has no 4-bit weights")
        for stranger in strangers(checkpoint, found):
            raise stranger
        parameters, warnings = _parameters(checkpoint, found)
        steps = _dense_steps(checkpoint, found, dtype, threads, parameters)
        config = untied(without_quantization(checkpoint.config), found)
        if dtype is not None:
            config |= {key: NF4_TO_TORCH[dtype] for key in DTYPE_KEYS if key in config}
        result = write_checkpoint(checkpoint, steps, config, target, progress)
        warnings += _experts_warnings(checkpoint, found)
        result.warnings += [*warnings, *doubts(checkpoint, found)]
        return result
