"""Quantizing and dequantizing a whole checkpoint, one tensor in memory at a time."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from nf4.checkpoint.bnb import NESTED_BLOCKSIZE, Plan, State, Survey, survey
from nf4.checkpoint.dtypes import FILE_TO_NF4, NF4_TO_TORCH
from nf4.checkpoint.errors import FormatError, OptionError
from nf4.checkpoint.files import creation_mode
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.model_files import (
    DTYPE_KEYS,
    compute_dtype,
    existing_quantization,
    quantization_config,
    write_json,
)
from nf4.checkpoint.reader import SafetensorsFile
from nf4.checkpoint.rules import Rules, is_conv1d, module_of, skip_list
from nf4.checkpoint.side_files import copy_side_files, files_read, side_files
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.steps import Copy, Dequantize, Quantize, Result, Step
from nf4.checkpoint.transaction import (
    refuse_overlap,
    refuse_reading_from,
    staged_directory,
    staged_file,
)
from nf4.checkpoint.writer import SafetensorsWriter

# Called with a tensor's name and the bytes of it that were read.
Progress = Callable[[str, int], None]


@dataclasses.dataclass(frozen=True)
class QuantizeOptions:
    """How to quantize; skip and only as in rules.Rules. nested: double quantization.
    compute: torch's name of the dtype to compute in; None: the model's own."""

    format: str = "nf4"
    blocksize: int = 64
    nested: bool = True
    storage: str = "uint8"
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    compute: str | None = None
    allow_nonfinite: bool = False
    threads: int = 0


def _architectures(checkpoint: Checkpoint) -> list[str]:
    value = checkpoint.config.get("architectures")
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _quantize_step(
    file: SafetensorsFile, info: TensorInfo, rules: Rules, options: QuantizeOptions
) -> Quantize | None:
    """The step for a dense tensor that becomes 4-bit; None for one that stays."""
    if rules.dense_reason(info) is not None:
        return None
    transposed = is_conv1d(module_of(info.name), rules.model_type)
    state = State(
        format=options.format,
        blocksize=options.blocksize,
        dtype=FILE_TO_NF4[info.dtype],
        shape=info.shape[::-1] if transposed else info.shape,
        nested_blocksize=NESTED_BLOCKSIZE if options.nested else 0,
    )
    plan = Plan(info.name, state, options.storage)
    problem = plan.storage_problem()
    if problem:
        raise OptionError(f"{info.name}: {problem}")
    return Quantize(file, info, plan, transposed, options.allow_nonfinite, options.threads)


def _quantized_config(
    checkpoint: Checkpoint, found: Survey, steps: list[Quantize], options: QuantizeOptions
) -> dict[str, Any]:
    if not steps and existing_quantization(checkpoint):
        return checkpoint.config
    quantized = {step.name for step in steps}
    dense = [info for name, info in found.dense.items() if name not in quantized]
    modules = [module_of(name) for name in [*quantized, *found.weights]]
    dtypes = [step.plan.state.dtype for step in steps]
    return {
        **checkpoint.config,
        "quantization_config": quantization_config(
            format=options.format,
            nested=options.nested,
            compute=options.compute or compute_dtype(checkpoint.config, dtypes),
            storage=options.storage,
            skip_modules=skip_list(dense, modules, _architectures(checkpoint)),
        ),
    }


def quantize_checkpoint(
    source: str,
    destination: str,
    options: QuantizeOptions,
    *,
    replace: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Write the 4-bit form of a dense checkpoint. Weights that are 4-bit already, and all that
    the rules leave dense, are copied bit for bit.

    Raises FormatError, OptionError, OutputRefused, OSError and nf4.Error; the destination is
    then as it was.
    """
    with Checkpoint(source) as checkpoint:
        refuse_overlap(checkpoint.directory or source, destination)
        existing_quantization(checkpoint)
        found = survey(checkpoint)
        found.require_sound()
        rules = Rules(checkpoint.model_type, options.skip, options.only)
        unknown = rules.unmatched(module_of(name) for name in found.dense)
        if unknown:
            raise OptionError(f"--skip or --only names no tensor: {', '.join(map(repr, unknown))}")
        steps: dict[str, list[Step]] = {name: [] for name in checkpoint.files}
        quantized: list[Quantize] = []
        for file_name, file in checkpoint.files.items():
            for info in file.tensors.values():
                step = None
                if info.name in found.dense:
                    step = _quantize_step(file, info, rules, options)
                steps[file_name].append(step or Copy(file, info, info.name in found.dense))
                quantized += [step] if step else []
        if not quantized and not found.weights:
            raise FormatError(
                source, "nothing to quantize: no matrix that the rules let become 4-bit"
            )
        config = _quantized_config(checkpoint, found, quantized, options)
        return _write(checkpoint, steps, config, destination, replace, progress)


def _dense_step(
    checkpoint: Checkpoint, found: Survey, info: TensorInfo, dtype: str | None, threads: int
) -> Step | None:
    """The step for a tensor on the way to a dense file; None for a part of a weight, which
    goes with it."""
    weight = found.weights.get(info.name)
    if weight is not None:
        transposed = is_conv1d(module_of(info.name), checkpoint.model_type)
        return Dequantize(checkpoint, weight, dtype or weight.state.dtype, transposed, threads)
    return Copy(checkpoint.owner[info.name], info, True) if info.name in found.dense else None


def dequantize_checkpoint(
    source: str,
    destination: str,
    *,
    dtype: str | None = None,
    threads: int = 0,
    replace: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Write the dense form of a 4-bit checkpoint. dtype: libnf4's name; None: what each weight
    was before. Dense tensors are copied bit for bit.

    Raises FormatError, OutputRefused, OSError and nf4.Error; the destination is then as it was.
    """
    with Checkpoint(source) as checkpoint:
        refuse_overlap(checkpoint.directory or source, destination)
        found = survey(checkpoint)
        found.require_sound()
        if not found.weights:
            raise FormatError(source, "nothing to dequantize: it has no 4-bit weights")
        steps = {
            name: [
                step
                for info in file.tensors.values()
                if (step := _dense_step(checkpoint, found, info, dtype, threads))
            ]
            for name, file in checkpoint.files.items()
        }
        config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
        if dtype is not None:
            config |= {key: NF4_TO_TORCH[dtype] for key in DTYPE_KEYS if key in config}
        return _write(checkpoint, steps, config, destination, replace, progress)


def _write(
    checkpoint: Checkpoint,
    steps: Mapping[str, list[Step]],
    config: dict[str, Any],
    destination: str,
    replace: bool,
    progress: Progress | None,
) -> Result:
    result = Result()
    warnings = result.warnings
    started = time.perf_counter()
    if checkpoint.directory is None:
        (only,) = steps
        source = checkpoint.files[only]
        refuse_reading_from(destination, files_read(checkpoint, ()))
        mode = creation_mode(0o666, source.path, destination)
        with staged_file(destination, replace=replace, warnings=warnings) as path:
            _write_file(path, mode, source, steps[only], result, progress)
            checkpoint.check_unchanged()
    else:
        copied, result.left_out = side_files(checkpoint)
        refuse_reading_from(destination, files_read(checkpoint, copied))
        with staged_directory(
            destination, like=checkpoint.directory, replace=replace, warnings=warnings
        ) as path:
            _write_directory(path, checkpoint, steps, config, result, progress)
            copy_side_files(checkpoint.directory, path, copied)
            checkpoint.check_unchanged()
    result.seconds = time.perf_counter() - started
    return result


def _write_file(
    path: str,
    mode: int,
    source: SafetensorsFile,
    steps: list[Step],
    result: Result,
    progress: Progress | None,
) -> None:
    specs = [spec for step in steps for spec in step.specs()]
    # transformers refuses a file that does not say which framework's it is.
    metadata = {"format": "pt", **source.metadata}
    with SafetensorsWriter(path, specs, metadata, mode) as writer:
        for step in steps:
            step.run(writer, result)
            if progress is not None:
                progress(step.name, step.bytes_in)
    result.bytes_in += source.size
    result.bytes_out += writer.nbytes


def _write_directory(
    path: str,
    checkpoint: Checkpoint,
    steps: Mapping[str, list[Step]],
    config: dict[str, Any],
    result: Result,
    progress: Progress | None,
) -> None:
    assert checkpoint.directory is not None
    weight_map: dict[str, str] = {}
    total_size = 0
    for name, file_steps in steps.items():
        if not file_steps and checkpoint.files[name].tensors:
            continue
        source = checkpoint.files[name]
        mode = creation_mode(0o666, source.path)
        _write_file(os.path.join(path, name), mode, source, file_steps, result, progress)
        result.files.append(name)
        for spec in (spec for step in file_steps for spec in step.specs()):
            weight_map[spec.name] = name
            total_size += spec.nbytes
    if checkpoint.index_name is not None:
        index = {
            "metadata": {"total_size": total_size},
            "weight_map": dict(sorted(weight_map.items())),
        }
        old = os.path.join(checkpoint.directory, checkpoint.index_name)
        write_json(os.path.join(path, checkpoint.index_name), index, old)
    if checkpoint.config:
        old = os.path.join(checkpoint.directory, "config.json")
        write_json(os.path.join(path, "config.json"), config, old)
