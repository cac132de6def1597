"""Reads how a checkpoint is quantized. transformers, vLLM and the tools of GPTQ, AWQ, AutoRound,
MLX and ModelOpt write this in different places. All of them are read here, and two that disagree
are refused."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.source import CONFIG_NAME, Checkpoint

BITSANDBYTES = "bitsandbytes"
# The quant_method of a checkpoint that has experts in 4 bits.
OF_EXPERTS = "nf4"
MLX = "mlx"
# Keys of config.json, at its top and in the configs of a model's parts, such as text_config.
# transformers and vLLM read the first, vLLM and compressed-tensors the second.
_KEYS = ("quantization_config", "compression_config")
# MLX writes this one at the top alone.
_KEY_OF_MLX = "quantization"
# Other names of the same keys, by method; None: for all methods. GPTQModel reads them all.
_ALIASES: dict[str | None, dict[str, str]] = {
    None: {"w_bit": "bits", "wbits": "bits", "q_group_size": "group_size"},
    "gptq": {"format": "checkpoint_format"},
    "awq": {"format": "version", "checkpoint_format": "version"},
}
# The keys that say what a weight's bytes mean. Two places must agree on them.
_DECISIVE = (
    "bits", "group_size", "checkpoint_format", "version", "format", "packing_format", "pack_dtype",
    "is_marlin_format", "sym", "zero_point", "desc_act", "data_type", "dynamic", "extra_config",
    "config_groups", "quant_algo", "expert_dtype", "quantized_layers", "sparsity_config",
    "transform_config", "load_in_4bit", "load_in_8bit",
)  # fmt: skip
# If no place names a method, a config belongs to the first method with one of its keys here.
_KEYS_OF_METHODS = {
    "compressed-tensors": ("config_groups",),
    "auto-round": ("packing_format", "autoround_version"),
    BITSANDBYTES: ("load_in_4bit", "load_in_8bit", "_load_in_4bit", "bnb_4bit_quant_type"),
    "modelopt": ("producer",),
    "awq": ("zero_point", "version"),
    "gptq": ("desc_act", "damp_percent", "true_sequential", "checkpoint_format", "sym"),
}
# A file without such a key belongs to the tool that uses its name: AutoGPTQ and GPTQModel, AutoAWQ.
_METHOD_OF_FILE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
# Only one tool writes each of these, a key and a file, so they name the method.
_FILE_OF_MODELOPT = "hf_quant_config.json"
_METHOD_OF_PLACE = {_KEY_OF_MLX: MLX, _FILE_OF_MODELOPT: "modelopt"}


@dataclasses.dataclass(frozen=True)
class Quantization:
    """The settings of a checkpoint's quantization.

    method  the tool's, in its usual spelling; None if it is not said
    config  its settings, also under their usual keys
    path    the path of the file that says so
    place   the file's name, and where in it
    """

    method: str | None
    config: dict[str, Any]
    path: str
    place: str


def config_path(checkpoint: Checkpoint) -> str:
    """Returns the path of config.json, or the path of a single file, which has none."""
    directory = checkpoint.directory
    return checkpoint.path if directory is None else os.path.join(directory, CONFIG_NAME)


def quantization(checkpoint: Checkpoint) -> Quantization | None:
    """Returns what all places say of the checkpoint's quantization, or None if there are none.
    Raises FormatError if two disagree, or if one is not an object."""
    places = list(_places(checkpoint))
    if not places:
        return None
    stated = next((method for place in places if (method := place.stated())), None)
    found = [place.read(stated) for place in places]
    merged = found[0]
    for other in found[1:]:
        difference = _difference(merged, other)
        if difference is not None:
            raise FormatError(other.path, f"{difference}; expected the same")
        more = {key: each for key, each in other.config.items() if merged.config.get(key) is None}
        method, config = merged.method or other.method, {**merged.config, **more}
        merged = dataclasses.replace(merged, method=method, config=config)
    return merged


def says_quantization(config: Mapping[str, Any]) -> bool:
    """Tells whether a config.json says anywhere how the checkpoint is quantized."""
    return any(block for _, block in _blocks(config))


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json without what it says of a quantization, at any depth."""
    kept = {key: value for key, value in config.items() if key != "expert_dtype"}
    for path, _ in _blocks(config):
        at: Any = kept
        for key in path[:-1]:
            at[key] = at = copy.copy(at[key])
        del at[path[-1]]
    return kept


def _is_of_mlx(key: str, value: object) -> bool:
    return key == _KEY_OF_MLX and isinstance(value, dict) and "bits" in value


def _blocks(config: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields the blocks of config.json with their paths, those nearest to the top first."""
    queue: deque[tuple[tuple[Any, ...], Any]] = deque([((), config)])
    while queue:
        path, value = queue.popleft()
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if key in _KEYS or (not path and _is_of_mlx(key, each)):
                yield (*path, key), each
            elif isinstance(each, (dict, list)):
                queue.append(((*path, key), each))


class _Place(NamedTuple):
    """A block that says how a checkpoint is quantized. name: its own key, or that of its file."""

    block: dict[str, Any]
    path: str
    place: str
    name: str

    def stated(self) -> str | None:
        """Returns the method that the place names, if it does."""
        method = self.block.get("quant_method") or self.block.get("method")
        if method is None:
            return _METHOD_OF_PLACE.get(self.name)
        # intel/auto-round, auto_round and compressed_tensors are older spellings.
        return str(method).lower().removeprefix("intel/").replace("_", "-")

    def _guessed(self) -> str | None:
        of_keys = _KEYS_OF_METHODS.items()
        found = (method for method, keys in of_keys if any(key in self.block for key in keys))
        return next(found, _METHOD_OF_FILE.get(self.name))

    def read(self, stated: str | None) -> Quantization:
        """Reads the block. stated: the method that another place names."""
        method = self.stated() or stated or self._guessed()
        try:
            config = _with_usual_keys(method, self.block)
        except ValueError as error:
            raise FormatError(self.path, f"{self.place}: {error}") from None
        return Quantization(method, config, self.path, self.place)


def _places(checkpoint: Checkpoint) -> Iterator[_Place]:
    """Yields all places with such a block. A block that is null or empty is ignored."""
    config = config_path(checkpoint)
    for path, block in _blocks(checkpoint.config):
        if block:
            yield _place(block, config, f"{CONFIG_NAME}: {'.'.join(map(str, path))}", path[-1])
    for name, block in checkpoint.beside.items():
        if block:
            yield _place(block, os.path.join(os.path.dirname(config), name), name, name)


def _place(block: Any, path: str, place: str, name: str) -> _Place:
    if not isinstance(block, dict):
        raise FormatError(path, f"{place.rpartition(' ')[2]} is not an object")
    # ModelOpt writes it so beside its own version, older compressed-tensors beside sparsity_config.
    key = _KEY_OF_MLX if name == _FILE_OF_MODELOPT else _KEYS[0]
    inner = block.get(key)
    if isinstance(inner, dict):
        block = {**{other: each for other, each in block.items() if other != key}, **inner}
    return _Place(block, path, place, name)


def _with_usual_keys(method: str | None, block: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the usual keys. Raises ValueError if two keys for the same setting differ."""
    aliases = {**_ALIASES[None], **_ALIASES.get(method, {})}
    found: dict[str, Any] = {}
    said: dict[str, str] = {}
    for key, value in block.items():
        usual = aliases.get(key, key)
        if found.get(usual) is None:
            found[usual], said[usual] = value, key
        elif value is not None and _plain(value) != _plain(found[usual]):
            raise ValueError(f"{said[usual]} is {found[usual]!r}, but {key} is {value!r}")
    return {**block, **found} | ({} if method is None else {"quant_method": method})


def _difference(one: Quantization, other: Quantization) -> str | None:
    """Returns a sentence on the first key on which both differ; None if they agree."""
    pairs = [("quant_method", one.method, other.method)]
    pairs += [(key, one.config.get(key), other.config.get(key)) for key in _DECISIVE]
    for key, own, theirs in pairs:
        if None not in (own, theirs) and _plain(own) != _plain(theirs):
            return f"{other.place} says {key} {theirs!r}, but {one.place} says {own!r}"
    return None


def _plain(value: Any) -> Any:
    """Returns a value for comparison, without nulls and with strings in small letters."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    return value.lower() if isinstance(value, str) else value
