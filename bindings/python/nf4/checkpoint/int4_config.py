"""Reads and writes the quantization_config of GPTQ, AWQ, AutoRound and compressed-tensors. Refuses
everything except 4-bit integers in a layout of int4_layouts.py. quantization.py defines the
keys."""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nf4.checkpoint.config_values import names_of, object_of
from nf4.checkpoint.int4_layouts import AWQ, COMPRESSED_TENSORS, GPTQ, GPTQ_V2, Layout
from nf4.checkpoint.skips import skip_entries

_GPTQ_FORMATS = {"gptq": GPTQ, "gptq_v2": GPTQ_V2}
# AutoRound's names of packings, without its packing for GPTQModel, which stores other zero points.
_AUTO_ROUND_PACKINGS = {
    "auto_round:gptq": GPTQ,
    "auto_round:auto_gptq": GPTQ,
    "auto_round:awq": AWQ,
    "auto_round:auto_awq": AWQ,
}
_DENSE_BITS = 16


@dataclasses.dataclass(frozen=True)
class Settings:
    """The weights' settings in a quantization_config.

    layout       the layout of all weights
    group_sizes  the possible group sizes, the usual one first; -1: the whole row. Empty: not said
    symmetric    whether all zero points are 8; None: not said, or not the same for all
    act_order    whether they have a g_idx that matters; None: not said
    dense        the modules that stay dense, as the config names them
    method       the quant_method; empty: that of the layout
    file         the file that has these settings
    """

    layout: Layout
    group_sizes: tuple[int, ...] = ()
    symmetric: bool | None = None
    act_order: bool | None = None
    dense: tuple[str, ...] = ()
    method: str = ""
    file: str = "config.json"


def _bits(value: object, key: str) -> None:
    if type(value) is not int or value != 4:
        raise ValueError(f"{key} is {value!r}; weights of 4 bits are read")


def _size(value: object, key: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if type(value) is not int or not (value == -1 or 0 < value < 2**31):
        raise ValueError(f"{key} is {value!r}; expected a number of columns or -1")
    return (value,)


def _flag(value: object, key: str) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}; expected true or false")
    return value


def _same(values: Sequence[bool | None]) -> bool | None:
    """Returns the common value of all, or None."""
    return values[0] if values and len(set(values)) == 1 else None


def _parse_gptq(config: Mapping[str, Any]) -> Settings:
    _bits(config.get("bits"), "bits")
    kind = config.get("checkpoint_format")
    layout = GPTQ if kind is None else _GPTQ_FORMATS.get(str(kind).lower())
    if layout is None or config.get("is_marlin_format"):
        said = "marlin" if layout is not None else kind
        raise ValueError(f"checkpoint_format {said!r} is not read; gptq and gptq_v2 are")
    if config.get("pack_dtype", "int32") not in (None, "int32"):
        raise ValueError(f"pack_dtype {config['pack_dtype']!r} is not read; int32 is")
    sizes = _size(config.get("group_size"), "group_size")
    symmetric = [_flag(config.get("sym"), "sym")]
    act_order = [_flag(config.get("desc_act"), "desc_act")]
    # GPTQModel's exceptions: a pattern of modules -> the settings that differ. "-:" leaves them
    # dense.
    dynamic = config.get("dynamic")
    for pattern, value in object_of({} if dynamic is None else dynamic, "dynamic").items():
        override, key = object_of(value, f"dynamic {pattern!r}"), f"dynamic {pattern!r}:"
        if pattern.startswith("-:"):
            continue
        _bits(override.get("bits", 4), f"{key} bits")
        sizes += _size(override.get("group_size"), f"{key} group_size")
        if "sym" in override:
            symmetric.append(_flag(override["sym"], f"{key} sym"))
        if "desc_act" in override:
            act_order.append(_flag(override["desc_act"], f"{key} desc_act"))
    return Settings(layout, sizes, _same(symmetric), _same(act_order))


def _parse_awq(config: Mapping[str, Any]) -> Settings:
    _bits(config.get("bits"), "bits")
    version = config.get("version") or "gemm"
    if str(version).lower() != "gemm":
        raise ValueError(f"version {version!r} of AWQ is not read; gemm is")
    sizes = _size(config.get("group_size"), "group_size")
    zero_point = _flag(config.get("zero_point"), "zero_point")
    dense = names_of(config.get("modules_to_not_convert"), "modules_to_not_convert")
    return Settings(AWQ, sizes, True if zero_point is False else None, False, dense)


def _parse_auto_round(config: Mapping[str, Any]) -> Settings:
    _bits(config.get("bits"), "bits")
    layout = _auto_round_layout(config)
    _require_integers(config, "")
    sizes = _size(config.get("group_size"), "group_size")
    symmetric = [_flag(config.get("sym"), "sym")]
    dense = []
    # AutoRound's exceptions: a module, or a pattern of modules -> the settings that differ.
    extra = config.get("extra_config")
    for name, value in object_of({} if extra is None else extra, "extra_config").items():
        override, key = object_of(value, f"extra_config {name!r}"), f"extra_config {name!r}: "
        if type(bits := override.get("bits", 4)) is int and bits >= _DENSE_BITS:
            dense.append(name)
            continue
        _bits(bits, f"{key}bits")
        _require_integers(override, key)
        sizes += _size(override.get("group_size"), f"{key}group_size")
        if "sym" in override:
            symmetric.append(_flag(override["sym"], f"{key}sym"))
    return Settings(layout, sizes, _same(symmetric), False, tuple(dense))


def _auto_round_layout(config: Mapping[str, Any]) -> Layout:
    """The packing decides. If it is missing, the backend decides, as in older versions."""
    key = "packing_format" if config.get("packing_format") else "backend"
    said = str(config.get(key) or "auto").lower()
    if said == "auto":
        return GPTQ  # transformers and vLLM do the same
    packing = said if key == "packing_format" else ":".join(said.split(":")[:2])
    if packing not in _AUTO_ROUND_PACKINGS:
        known = ", ".join(_AUTO_ROUND_PACKINGS)
        raise ValueError(f"{key} {config[key]!r} is not read; {known} are")
    return _AUTO_ROUND_PACKINGS[packing]


def _require_integers(config: Mapping[str, Any], key: str) -> None:
    """Raises ValueError for numbers that are not integers, and for quantized activations. key: the
    prefix of names of keys in errors."""
    if config.get("data_type") not in (None, "int"):
        raise ValueError(f"{key}data_type {config['data_type']!r} is not read; int is")
    bits = config.get("act_bits")
    if bits is not None and (type(bits) is not int or bits < _DENSE_BITS):
        raise ValueError(f"{key}act_bits is {bits!r}; quantized activations are not read")


def _parse_compressed(config: Mapping[str, Any]) -> Settings:
    groups = object_of(config.get("config_groups"), "config_groups")
    if not groups:
        raise ValueError("config_groups is empty")
    sparsity = config.get("sparsity_config")
    if sparsity and object_of(sparsity, "sparsity_config").get("format") != "dense":
        said = sparsity.get("format")
        raise ValueError(f"sparsity_config: format {said!r} is not read; dense is")
    if config.get("transform_config"):
        raise ValueError("it has a transform_config, which is not read")
    sizes: tuple[int, ...] = ()
    symmetric: list[bool | None] = []
    act_order: list[bool | None] = []
    for name, value in groups.items():
        key = f"config_groups {name!r}"
        group = object_of(value, key)
        kind = group.get("format") or config.get("format")
        if kind != "pack-quantized":
            raise ValueError(f"{key}: format {kind!r} is not read; pack-quantized is")
        weights = object_of(group.get("weights"), f"{key}: weights")
        if group.get("input_activations") or group.get("output_activations"):
            raise ValueError(f"{key}: quantized activations are not read")
        if weights.get("type", "int") != "int":
            raise ValueError(f"{key}: type {weights['type']!r} is not read; int is")
        _bits(weights.get("num_bits"), f"{key}: num_bits")
        sizes += _strategy_size(weights, key)
        symmetric.append(_flag(weights.get("symmetric", True), f"{key}: symmetric"))
        act_order.append(weights.get("actorder") in ("group", "dynamic", True))
    dense = names_of(config.get("ignore"), "ignore")
    return Settings(COMPRESSED_TENSORS, sizes, _same(symmetric), _same(act_order), dense)


def _strategy_size(weights: Mapping[str, Any], key: str) -> tuple[int, ...]:
    size = _size(weights.get("group_size"), f"{key}: group_size")
    strategy = weights.get("strategy")
    if strategy == "channel" or (strategy is None and size == (-1,)):
        return (-1,)
    if strategy not in ("group", None) or not size or size == (-1,):
        raise ValueError(f"{key}: strategy {strategy!r} is not read; group and channel are")
    return size


def _one_size(settings: Settings) -> int:
    (size,) = settings.group_sizes
    return size


def _build_gptq(settings: Settings, modules: Mapping[int, list[str]]) -> dict[str, Any]:
    dense = {f"-:^{re.escape(name)}$": {} for name in settings.dense}
    return {
        "bits": 4,
        "checkpoint_format": settings.layout.name,
        "desc_act": bool(settings.act_order),
        **({"dynamic": dense} if dense else {}),
        "group_size": _one_size(settings),
        "lm_head": any("lm_head" in names for names in modules.values()),
        "pack_dtype": "int32",
        "quant_method": "gptq",
        "sym": bool(settings.symmetric),
    }


def _build_awq(settings: Settings, modules: Mapping[int, list[str]]) -> dict[str, Any]:
    quantized = sorted(name for names in modules.values() for name in names)

    def exact(entry: str) -> str:
        """vLLM skips modules whose names contain an entry; transformers uses the entry as a
        pattern."""
        at = bisect_left(quantized, entry)
        begins = at < len(quantized) and quantized[at].startswith(entry)
        return f"{re.escape(entry)}$" if begins else entry

    dense = [exact(entry) for entry in skip_entries(settings.dense, quantized)]
    return {
        "bits": 4,
        "group_size": _one_size(settings),
        "modules_to_not_convert": dense or None,
        "quant_method": "awq",
        "version": "gemm",
        # AWQ's kernels need zero points, so they are written even for symmetric weights.
        "zero_point": True,
    }


def _build_compressed(settings: Settings, modules: Mapping[int, list[str]]) -> dict[str, Any]:
    groups = {}
    # The usual group size targets the class. Other group sizes target names, and go first.
    for number, size in enumerate(settings.group_sizes):
        weights = {
            "actorder": "group" if settings.act_order else None,
            "block_structure": None,
            "dynamic": False,
            "group_size": None if size == -1 else size,
            "num_bits": 4,
            "observer": "minmax",
            "observer_kwargs": {},
            "strategy": "channel" if size == -1 else "group",
            "symmetric": bool(settings.symmetric),
            "type": "int",
        }
        groups[f"group_{number}"] = {
            "format": "pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": modules[size] if number else ["Linear"],
            "weights": weights,
        }
    return {
        "config_groups": groups,
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": list(settings.dense),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


# quant_method -> a function that returns Settings from a quantization_config, and raises ValueError
# naming what is wrong.
PARSERS: dict[str, Callable[[Mapping[str, Any]], Settings]] = {
    "gptq": _parse_gptq,
    "awq": _parse_awq,
    "auto-round": _parse_auto_round,
    "compressed-tensors": _parse_compressed,
}


def parser(
    method: str | None, _config: Mapping[str, Any]
) -> Callable[[Mapping[str, Any]], Settings] | None:
    """Returns the function that reads the settings of a quant_method; None if it is of another
    kind of weights."""
    return PARSERS.get(str(method))


# quant_method -> a function that does the reverse, from weights' modules by group size.
BUILDERS: dict[str, Callable[[Settings, Mapping[int, list[str]]], dict[str, Any]]] = {
    "gptq": _build_gptq,
    "awq": _build_awq,
    "compressed-tensors": _build_compressed,
}
METHOD_OF = {
    GPTQ.name: "gptq",
    GPTQ_V2.name: "gptq",
    AWQ.name: "awq",
    COMPRESSED_TENSORS.name: "compressed-tensors",
}
