"""Writes a converted checkpoint: its files, index, config.json and the files beside the weights."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from nf4.checkpoint.files import creation_mode
from nf4.checkpoint.model_files import write_json
from nf4.checkpoint.reader import SafetensorsFile
from nf4.checkpoint.side_files import copy_side_files, files_read, side_files
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.steps import Result, Step
from nf4.checkpoint.transaction import (
    DirectoryTarget,
    FileTarget,
    refuse_overlap,
    refuse_reading_from,
)
from nf4.checkpoint.writer import SafetensorsWriter

# A callback, called with a tensor's name and the number of its bytes that were read.
Progress = Callable[[str, int], None]


def output_target(
    checkpoint: Checkpoint, destination: str, replace: bool
) -> FileTarget | DirectoryTarget:
    """Returns the destination, checked before any work."""
    refuse_overlap(checkpoint.directory or checkpoint.path, destination)
    kind = FileTarget if checkpoint.directory is None else DirectoryTarget
    return kind.check(destination, replace=replace)


def write_checkpoint(
    checkpoint: Checkpoint,
    steps: Mapping[str, list[Step]],
    config: dict[str, Any],
    target: FileTarget | DirectoryTarget,
    progress: Progress | None,
) -> Result:
    """Writes the steps of each file, and the rest of a directory with `config` as its config.json.
    Raises FormatError if the source changed meanwhile."""
    result = Result()
    if isinstance(target, FileTarget):
        (only,) = steps
        source = checkpoint.files[only]
        refuse_reading_from(target.path, files_read(checkpoint, ()))
        mode = creation_mode(0o666, source.path, target.path)
        with target.staged(result.warnings) as path:
            _write_file(path, mode, source, steps[only], result, progress)
            checkpoint.check_unchanged()
    else:
        assert checkpoint.directory is not None
        copied, result.left_out = side_files(checkpoint)
        refuse_reading_from(target.path, files_read(checkpoint, copied))
        with target.staged(result.warnings, like=checkpoint.directory) as path:
            _write_directory(path, checkpoint, steps, config, result, progress)
            copy_side_files(checkpoint.directory, path, copied)
            checkpoint.check_unchanged()
    result.seconds = time.perf_counter() - checkpoint.opened
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
    # transformers refuses a file whose metadata does not name a framework.
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
