"""Checks and writes what config.json says of 4-bit weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nf4.checkpoint.bnb import BnbWeight
from nf4.checkpoint.dtypes import NF4_TO_TORCH, model_dtype
from nf4.checkpoint.files import write_synced
from nf4.checkpoint.quantization import BITSANDBYTES, OF_EXPERTS, quantization
from nf4.checkpoint.rules import module_of
from nf4.checkpoint.skips import SkipMatcher, is_simple
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.weights import Survey


def write_json(path: str, value: Mapping[str, Any], like: str) -> None:
    """Writes JSON to a new file with no more permissions than the file `like`."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # Half of a surrogate pair has no UTF-8; Python's escape for it is JSON's.
    write_synced(path, text.encode("utf-8", "backslashreplace"), like)


def compute_dtype(config: Mapping[str, Any], survey_dtypes: Iterable[str]) -> str:
    """Returns the dtype to compute in, by torch's name: the model's own, else that of most
    weights."""
    own = model_dtype(config)
    if own is not None:
        return NF4_TO_TORCH[own]
    dtypes = list(survey_dtypes)
    return NF4_TO_TORCH[max(sorted(set(dtypes)), key=dtypes.count)] if dtypes else "float32"


def quantization_config(
    *,
    format: str,
    nested: bool,
    compute: str,
    storage: str,
    skip_modules: list[str],
    experts: bool,
) -> dict[str, Any]:
    """Returns the quantization_config by which transformers loads the model, with the fields that
    BitsAndBytesConfig writes. With 4-bit experts it does not name bitsandbytes, whose integration
    would report the experts as missing."""
    method: dict[str, Any] = {"quant_method": OF_EXPERTS}
    if not experts:
        method = {
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_threshold": 6.0,
            "load_in_4bit": True,
            "load_in_8bit": False,
            "quant_method": BITSANDBYTES,
        }
    fields = {
        "bnb_4bit_compute_dtype": compute,
        "bnb_4bit_quant_storage": storage,
        "bnb_4bit_quant_type": format,
        "bnb_4bit_use_double_quant": nested,
        "llm_int8_skip_modules": skip_modules,
    }
    return dict(sorted((method | fields).items()))


def config_problems(checkpoint: Checkpoint, survey: Survey) -> list[tuple[str, str]]:
    """Returns (severity, problem) for each way in which config.json contradicts the weights. With a
    fault, transformers would not load them."""
    if checkpoint.directory is None or not checkpoint.config:
        return []
    modules = [module_of(name) for name in survey.weights]
    said = quantization(checkpoint)
    if said is None:
        return [("fault", "it has 4-bit weights, but no quantization_config")] if modules else []
    if not modules:
        return [("fault", "it has a quantization_config, but no 4-bit weights")]
    return [*_skip_problems(said.config, modules), *_layout_problems(said.config, survey)]


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
            yield "warning", f"llm_int8_skip_modules has {entry!r}, a pattern that is not checked"


def _layout_problems(found: Mapping[str, Any], survey: Survey) -> Iterator[tuple[str, str]]:
    """Compares the layouts. These are warnings, because each weight's own quant_state counts."""
    weights = [weight for weight in survey.weights.values() if isinstance(weight, BnbWeight)]
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
