"""Decides which parts of a config.json may reach transformers, for all code that builds a model.

config.json is not trusted, and some of its values make transformers fetch or load something:
kernels, remote code, backbones, other files, timm's weights. Numbers, flags and plain words pass. A
string that can name a repository, a file or an address passes only under a key that is known to be
plain text.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import transformers

# The implementations in torch and transformers. Any other word is left out, because transformers
# might fetch a kernel for it; transformers then chooses.
_IMPLEMENTATIONS = {
    "attn_implementation": {"eager", "sdpa", "flex_attention"},
    "experts_implementation": {"eager", "batched_mm", "grouped_mm"},
}
_DTYPES = {"float16", "bfloat16", "float32", "float64"}
# Keys left out at any depth: they say where code or weights are, or how to run the model, or they
# replace a part of the configuration's class. The caller sets the quantization.
_LEFT_OUT = {
    "attribute_map",
    "auto_map",
    "backbone_kwargs",
    "custom_pipelines",
    "distributed_config",
    "fusion_config",
    "kernel_config",
    "quantization_config",
    "trust_remote_code",
}
_REFUSED = {
    "configuration_files": "names other configurations, which are not read",
    "transformers_weights": "names the file of the weights; expected them under a usual name",
}
_PLAIN = re.compile(r"[^/\\@:]*")
# transformers only shows or compares these values; it opens nothing with them.
_TEXT = {"_name_or_path", "name_or_path", "id2label", "label2id", "task_specific_params", "prefix",
         "title_sep", "doc_sep", "vocab_list", "vocabulary_map"}  # fmt: skip
_FLOAT = "__float__"  # transformers writes what JSON lacks as {"__float__": "Infinity"}


class _Filter:
    def __init__(self) -> None:
        self.unnamed: list[tuple[str, ...]] = []  # the keys of strings that were left out

    def object(self, value: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
        kept = {}
        for key, item in value.items():
            here = (*path, key)
            if key in _LEFT_OUT:
                continue
            if key in _REFUSED and item is not None:
                raise ValueError(f"{'.'.join(here)} {_REFUSED[key]}")
            option = key.strip("_").removesuffix("_internal")
            if option in _IMPLEMENTATIONS:
                if (chosen := _implementation(item, option, here)) is not None:
                    kept[key] = chosen
            elif key in ("dtype", "torch_dtype"):
                _require_dtype(item, here)
                kept[key] = item
            elif key == "use_pretrained_backbone":
                kept[key] = False
            elif key == "model_args":
                kept[key] = _numbers(item, here)
            elif key in _TEXT:
                kept[key] = item
            elif self._is_plain(item):
                kept[key] = self._value(item, here)
            else:
                self.unnamed.append(here)
        _require_no_backbone(value, path)
        return kept

    def _is_plain(self, value: object) -> bool:
        if isinstance(value, list):
            return all(map(self._is_plain, value))
        return not isinstance(value, str) or _PLAIN.fullmatch(value) is not None

    def _value(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, list):
            return [self._value(each, path) for each in value]
        if not isinstance(value, dict):
            return value
        if value.keys() == {_FLOAT} and value[_FLOAT] in ("NaN", "Infinity", "-Infinity"):
            return float(value[_FLOAT])
        return self.object(value, path)


def _implementation(value: object, option: str, path: tuple[str, ...]) -> Any:
    """Returns the implementation if it may pass, else None. A dict has one for each part of a
    model."""
    if isinstance(value, dict):
        chosen = {key: _implementation(each, option, (*path, key)) for key, each in value.items()}
        return {key: each for key, each in chosen.items() if each is not None}
    if not isinstance(value, str):
        return None
    if not _PLAIN.fullmatch(value):
        raise ValueError(
            f"{'.'.join(path)} is {value!r}, which names code to fetch; expected one of "
            f"{', '.join(sorted(_IMPLEMENTATIONS[option]))}, or no {option}"
        )
    return value if value in _IMPLEMENTATIONS[option] else None


def _require_dtype(value: object, path: tuple[str, ...]) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            _require_dtype(each, (*path, key))
    elif value is not None and not (isinstance(value, str) and value in _DTYPES):
        raise ValueError(f"{'.'.join(path)} is {value!r}; expected {', '.join(sorted(_DTYPES))}")


def _numbers(value: object, path: tuple[str, ...]) -> dict[str, Any] | None:
    """Returns arguments for timm.create_model, without the one that fetches weights. The others may
    name files and addresses, so only numbers and flags pass."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"{'.'.join(path)} is {value!r}; expected an object")
    for key, item in value.items():
        each = item if isinstance(item, list) else [item]
        if not all(part is None or isinstance(part, (int, float)) for part in each):
            raise ValueError(f"{'.'.join((*path, key))} is {item!r}; expected numbers and flags")
    return {key: item for key, item in value.items() if key != "pretrained"}


def _require_no_backbone(config: Mapping[str, Any], path: tuple[str, ...]) -> None:
    """Refuses a backbone of another repository, because transformers fetches its config.json."""
    name = config.get("backbone")
    described = isinstance(config.get("backbone_config"), dict)
    if name is None or described or config.get("model_type") == "timm_backbone":
        return
    where = ".".join((*path, "backbone"))
    raise ValueError(f"{where} is {name!r}, a model of its own; expected a backbone_config")


def model_config(
    kind: type[transformers.PreTrainedModel], config: Mapping[str, Any]
) -> transformers.PretrainedConfig:
    """Returns the configuration for a transformers class from the parts of a config.json that may
    pass.

    Raises ValueError, which names the key, for a value that would fetch or load something, for a
    dtype that torch does not have, and for a string that names a place where the class expects a
    word.
    """
    wanted = _Filter()
    made = kind.config_class.from_dict(wanted.object(config))
    for path in wanted.unnamed:
        owner: Any = made
        for part in path[:-1]:
            owner = getattr(owner, part, None)
        if dataclasses.is_dataclass(owner) and path[-1] in {
            f.name for f in dataclasses.fields(owner)
        }:
            raise ValueError(f"{'.'.join(path)} names a place; expected a plain name")
    return made
