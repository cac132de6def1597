"""The files beside the weights: config.json, the tokenizer and the like."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from typing import Any

from nf4.checkpoint.bnb import Survey
from nf4.checkpoint.dtypes import NF4_TO_TORCH, TORCH_TO_NF4
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.rules import module_of, skips
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.transaction import copy_synced, write_synced

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
    try:
        with open(os.path.join(directory, "modules.json"), encoding="utf-8") as file:
            modules = json.load(file)
        return {os.path.normpath(module["path"]) for module in modules if module["path"]}
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return set()


def side_files(directory: str) -> tuple[list[str], list[str]]:
    """The files of a model directory to copy, and those left out (weights in any format, and
    whatever is no regular file), as relative paths. Hidden files and directories are neither."""
    submodules = _submodules(directory)
    copied, left = [], []
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        relative = os.path.relpath(folder, directory)
        for name in sorted(names):
            if name.startswith(".") or (relative, name) == (".", "config.json"):
                continue
            path = os.path.normpath(os.path.join(relative, name))
            regular = stat.S_ISREG(os.stat(os.path.join(folder, name)).st_mode)
            weights = name.endswith(_WEIGHT_SUFFIXES) and relative not in submodules
            (copied if regular and not weights else left).append(path)
    return copied, left


def copy_side_files(source: str, destination: str) -> list[str]:
    """Copy what `side_files` says into a new directory. Returns what was left out, the
    safetensors files and indices at the top excepted: those are what was converted."""
    copied, left = side_files(source)
    for path in copied:
        target = os.path.join(destination, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        copy_synced(os.path.join(source, path), target)
    return [p for p in left if os.path.dirname(p) or ".safetensors" not in p]


def write_json(path: str, value: Mapping[str, Any]) -> None:
    write_synced(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))


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
    for key in ("dtype", "torch_dtype"):
        if config.get(key) in TORCH_TO_NF4:
            return str(config[key])
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


def config_problems(checkpoint: Checkpoint, survey: Survey) -> list[str]:
    """How config.json contradicts the weights, such that transformers would not load them."""
    if checkpoint.directory is None or not checkpoint.config:
        return []
    modules = [module_of(name) for name in survey.weights]
    found = existing_quantization(checkpoint)
    if not found:
        return ["it has 4-bit weights, but no quantization_config"] if modules else []
    if not modules:
        return ["it has a quantization_config, but no 4-bit weights"]
    problems = []
    for entry in found.get("llm_int8_skip_modules") or []:
        for module in skips(entry, modules)[:1] if isinstance(entry, str) else []:
            problems.append(f"llm_int8_skip_modules has {entry!r}, which skips the 4-bit {module}")
    return problems
