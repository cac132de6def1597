"""The files beside the weights: config.json, the tokenizer and the like."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nf4.checkpoint.bnb import Survey
from nf4.checkpoint.dtypes import NF4_TO_TORCH, TORCH_TO_NF4
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.jsonio import MAX_CONFIG_BYTES, parse_value, read_bytes
from nf4.checkpoint.rules import module_of
from nf4.checkpoint.skips import SkipMatcher, is_simple
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.transaction import copy_synced, creation_mode, write_synced

# Where config.json says the dtype of the weights: of now, and before transformers 4.56.
DTYPE_KEYS = ("dtype", "torch_dtype")
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".ggml",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".npz",
    ".ot",
    ".tflite",
)


def _submodules(directory: str) -> set[str]:
    """The directories that a sentence-transformers model keeps layers of its own in: their
    weights belong to the model and are copied."""
    path = os.path.join(directory, "modules.json")
    try:
        modules = parse_value(read_bytes(path, "modules.json", MAX_CONFIG_BYTES), path, "it")
        return {os.path.normpath(module["path"]) for module in modules if module["path"]}
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return set()


def _fail(error: OSError) -> None:
    raise error


def _walk(directory: str, left: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The directories of a model as relative paths, with the names of what they hold that is
    no directory. Links to directories are followed; what has been visited already goes to
    `left`."""
    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(directory, onerror=_fail, followlinks=True):
        status = os.stat(folder)
        relative = os.path.relpath(folder, directory)
        if (status.st_dev, status.st_ino) in seen:
            left.append(relative)
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if not name.startswith(".")]
        # What is really here goes first, so that it is not taken for the copy.
        folders.sort(key=lambda name: (os.path.islink(os.path.join(folder, name)), name))
        yield relative, sorted(name for name in names if not name.startswith("."))


def _is_file(path: str) -> bool:
    """A regular file, or a link to one; not one to nowhere or to itself."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return False


def side_files(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """The files of a model directory to copy, and those left out (weights in any format, and
    whatever is no regular file), as relative paths. Neither: hidden files and directories,
    config.json, and the weights and the index of the checkpoint itself."""
    directory = checkpoint.directory
    assert directory is not None
    submodules = _submodules(directory)
    own = {*checkpoint.files, checkpoint.index_name, "config.json"}
    copied: list[str] = []
    left: list[str] = []
    for relative, names in _walk(directory, left):
        for name in names:
            path = os.path.normpath(os.path.join(relative, name))
            if path in own:
                continue
            weights = name.endswith(_WEIGHT_SUFFIXES) and relative not in submodules
            regular = _is_file(os.path.join(directory, path))
            (copied if regular and not weights else left).append(path)
    return copied, left


def files_read(checkpoint: Checkpoint, copied: Iterable[str]) -> list[str]:
    """Every file that a conversion reads, those of `copied` beside the weights included."""
    found = [file.path for file in checkpoint.files.values()]
    if checkpoint.directory is not None:
        names = [*copied, "config.json"] + [n for n in [checkpoint.index_name] if n]
        found += [os.path.join(checkpoint.directory, name) for name in names]
    return found


def _make_folder(source: str, destination: str, folder: str) -> None:
    """Make a directory and those above it, no more open than those of the source."""
    target = os.path.join(destination, folder)
    if folder and not os.path.isdir(target):
        _make_folder(source, destination, os.path.dirname(folder))
        os.mkdir(target, creation_mode(0o777, os.path.join(source, folder)))


def copy_side_files(source: str, destination: str, copied: Iterable[str]) -> None:
    """Copy these files into a new directory."""
    for path in copied:
        _make_folder(source, destination, os.path.dirname(path))
        copy_synced(os.path.join(source, path), os.path.join(destination, path))


def write_json(path: str, value: Mapping[str, Any], like: str) -> None:
    """Write JSON to a new file that is no more open than the file `like`."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # Half of a surrogate pair has no UTF-8; Python's escape for it is JSON's.
    write_synced(path, text.encode("utf-8", "backslashreplace"), like)


def existing_quantization(checkpoint: Checkpoint) -> dict[str, Any]:
    """quantization_config of a source; FormatError if it is not bitsandbytes' 4-bit."""
    found = checkpoint.config.get("quantization_config")
    if found is None:
        return {}
    path = os.path.join(checkpoint.directory or "", "config.json")
    if not isinstance(found, dict):
        raise FormatError(path, "quantization_config is not an object")
    method = found.get("quant_method", "bitsandbytes")
    four_bit = found.get("load_in_4bit", found.get("_load_in_4bit"))
    if method != "bitsandbytes" or not four_bit:
        what = "bitsandbytes, but not in 4 bits" if method == "bitsandbytes" else repr(method)
        raise FormatError(path, f"the model is quantized by {what}")
    return found


def compute_dtype(config: Mapping[str, Any], survey_dtypes: Iterable[str]) -> str:
    """The dtype to compute in, by torch's name: the model's own, else that of most weights."""
    for key in DTYPE_KEYS:
        value = config.get(key)
        if isinstance(value, str) and value in TORCH_TO_NF4:
            return value
    dtypes = list(survey_dtypes)
    return NF4_TO_TORCH[max(sorted(set(dtypes)), key=dtypes.count)] if dtypes else "float32"


def quantization_config(
    *, format: str, nested: bool, compute: str, storage: str, skip_modules: list[str]
) -> dict[str, Any]:
    """What transformers reads to load the model: the fields that BitsAndBytesConfig writes."""
    return {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": compute,
        "bnb_4bit_quant_storage": storage,
        "bnb_4bit_quant_type": format,
        "bnb_4bit_use_double_quant": nested,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": skip_modules,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }


def config_problems(checkpoint: Checkpoint, survey: Survey) -> list[tuple[str, str]]:
    """(severity, problem) where config.json contradicts the weights: faults are such that
    transformers would not load them."""
    if checkpoint.directory is None or not checkpoint.config:
        return []
    modules = [module_of(name) for name in survey.weights]
    found = existing_quantization(checkpoint)
    if not found:
        return [("fault", "it has 4-bit weights, but no quantization_config")] if modules else []
    if not modules:
        return [("fault", "it has a quantization_config, but no 4-bit weights")]
    return [*_skip_problems(found, modules), *_layout_problems(found, survey)]


def _skip_problems(found: Mapping[str, Any], modules: list[str]) -> Iterator[tuple[str, str]]:
    entries = found.get("llm_int8_skip_modules")
    entries = [] if entries is None else entries
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        yield "fault", "llm_int8_skip_modules is not a list of names"
        return
    matcher = SkipMatcher(modules)
    for entry in entries:
        module = matcher.first(entry)
        if module is not None:
            yield (
                "fault",
                f"llm_int8_skip_modules has {entry!r}, which skips the 4-bit {module}",
            )
        if not is_simple(entry) or matcher.exhausted:
            yield "warning", f"llm_int8_skip_modules has {entry!r}, a pattern that is not judged"


def _layout_problems(found: Mapping[str, Any], survey: Survey) -> Iterator[tuple[str, str]]:
    """Each weight's own quant_state is what counts, so these are no faults."""
    weights = survey.weights.values()
    for key, default, kinds in (
        ("bnb_4bit_quant_type", "fp4", {weight.state.format for weight in weights}),
        ("bnb_4bit_quant_storage", "uint8", {weight.storage for weight in weights}),
    ):
        said = found.get(key, default)
        if isinstance(said, str):
            kinds.discard(said.removeprefix("torch."))
        if kinds:
            yield (
                "warning",
                f"{key} is {said!r}, but there are weights of {', '.join(sorted(kinds))}",
            )
