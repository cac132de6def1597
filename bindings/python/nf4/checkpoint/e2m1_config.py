"""Reads and writes the quantization settings of MXFP4 and NVFP4 checkpoints: gpt-oss,
compressed-tensors, ModelOpt and DeepSeek-V4. Refuses what is not understood. quantization.py
defines the keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nf4.checkpoint.config_values import names_of, object_of
from nf4.checkpoint.e2m1_layouts import (
    BLOCKSIZES,
    CT_MXFP4,
    CT_NVFP4,
    DEEPSEEK,
    GPT_OSS,
    MODELOPT_MXFP4,
    MODELOPT_NVFP4,
    MXFP4,
    Layout,
)

_OF_COMPRESSED = {"mxfp4-pack-quantized": CT_MXFP4, "nvfp4-pack-quantized": CT_NVFP4}
# The strategies of compressed-tensors, by layout.
_STRATEGIES = {CT_MXFP4.format: "group", CT_NVFP4.format: "tensor_group"}
_OF_MODELOPT = {
    "NVFP4": MODELOPT_NVFP4,
    "W4A16_NVFP4": MODELOPT_NVFP4,
    "MXFP4": MODELOPT_MXFP4,
    "W4A8_MXFP4_FP8": MODELOPT_MXFP4,
}
# Formats that may stand beside these in one checkpoint: dense or 8-bit floats.
_EIGHT_BITS = ("float-quantized", "naive-quantized", "mxfp8-quantized", "dense")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a checkpoint says of its MXFP4 and NVFP4 weights.

    layouts     the layouts of its weights
    blocksizes  the blocksizes of its weights; empty: not said
    dense       the modules that stay dense, as the settings name them
    mixed       some layers may be quantized in another way, such as to FP8
    method      the quant_method
    file        the file that says so
    """

    layouts: tuple[Layout, ...]
    blocksizes: tuple[int, ...] = ()
    dense: tuple[str, ...] = ()
    mixed: bool = False
    method: str = ""
    file: str = "config.json"


def parser(
    method: str | None, config: Mapping[str, Any]
) -> Callable[[Mapping[str, Any]], Settings] | None:
    """Returns the function that reads these settings, which raises ValueError naming what is wrong;
    None if they are of another kind of weights."""
    parse = _PARSERS.get(str(method))
    if method == "compressed-tensors" and _OF_COMPRESSED.keys().isdisjoint(_formats(config)):
        return None
    return None if method == "fp8" and config.get("expert_dtype") != "fp4" else parse


def _formats(config: Mapping[str, Any]) -> list[str]:
    """Returns the formats of compressed-tensors' config_groups."""
    groups = config.get("config_groups")
    found = groups.values() if isinstance(groups, dict) else ()
    return [_format(each, config) for each in found if isinstance(each, dict)]


def _format(group: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    return str(group.get("format") or config.get("format"))


def _blocksize(value: object, layout: Layout, key: str) -> int:
    known = BLOCKSIZES[layout.format]
    if type(value) is not int or value not in known:
        raise ValueError(f"{key} is {value!r}; expected {' or '.join(map(str, known))}")
    return value


def _parse_gpt_oss(config: Mapping[str, Any]) -> Settings:
    dense = names_of(config.get("modules_to_not_convert"), "modules_to_not_convert")
    return Settings((GPT_OSS,), BLOCKSIZES[MXFP4], dense)


def _parse_deepseek(config: Mapping[str, Any]) -> Settings:
    return Settings((DEEPSEEK,), BLOCKSIZES[MXFP4], mixed=True)


def _parse_compressed(config: Mapping[str, Any]) -> Settings:
    sparsity = config.get("sparsity_config")
    if sparsity and object_of(sparsity, "sparsity_config").get("format") != "dense":
        raise ValueError(f"sparsity_config: format {sparsity.get('format')!r} is not read")
    if config.get("transform_config"):
        raise ValueError("it has a transform_config, which is not read")
    layouts: list[Layout] = []
    sizes: list[int] = []
    mixed = False
    for name, value in config["config_groups"].items():
        key = f"config_groups {name!r}"
        group = object_of(value, key)
        kind = _format(group, config)
        if kind in _EIGHT_BITS:
            mixed = True
            continue
        if kind not in _OF_COMPRESSED:
            known = ", ".join(_OF_COMPRESSED)
            raise ValueError(f"{key}: format {kind!r} is not read beside {known}")
        layout = _OF_COMPRESSED[kind]
        layouts.append(layout)
        sizes.append(_of_group(object_of(group.get("weights"), f"{key}: weights"), layout, key))
    return Settings(tuple(layouts), tuple(sizes), names_of(config.get("ignore"), "ignore"), mixed)


def _of_group(weights: Mapping[str, Any], layout: Layout, key: str) -> int:
    """Returns the blocksize of compressed-tensors' settings of weights."""
    if weights.get("symmetric", True) is not True:
        raise ValueError(f"{key}: symmetric is false; zero points of floats are not read")
    strategy = _STRATEGIES[layout.format]
    for name, wanted in (("num_bits", 4), ("type", "float"), ("strategy", strategy)):
        if weights.get(name) != wanted:
            raise ValueError(f"{key}: {name} is {weights.get(name)!r}; expected {wanted!r}")
    return _blocksize(weights.get("group_size"), layout, f"{key}: group_size")


def _parse_modelopt(config: Mapping[str, Any]) -> Settings:
    dense = config.get("ignore")
    dense = names_of(config.get("exclude_modules") if dense is None else dense, "exclude_modules")
    algo = config.get("quant_algo")
    if algo != "MIXED_PRECISION":
        layout, size = _of_algorithm(config, algo, "")
        return Settings((layout,), (size,), dense)
    layers = object_of(config.get("quantized_layers"), "quantized_layers")
    found = [
        _of_algorithm(each, each.get("quant_algo"), f"quantized_layers {name!r}: ")
        for name, value in layers.items()
        if not _is_eight_bits(each := object_of(value, f"quantized_layers {name!r}"))
    ]
    if not found:
        raise ValueError("quantized_layers has no layer in 4 bits")
    layouts, sizes = zip(*found, strict=True)
    return Settings(tuple(dict.fromkeys(layouts)), tuple(dict.fromkeys(sizes)), dense, mixed=True)


def _is_eight_bits(layer: Mapping[str, Any]) -> bool:
    algo = layer.get("quant_algo")
    return isinstance(algo, str) and algo.upper().startswith(("FP8", "MXFP8"))


def _of_algorithm(config: Mapping[str, Any], algo: object, key: str) -> tuple[Layout, int]:
    layout = _OF_MODELOPT.get(str(algo).upper())
    if layout is None:
        known = ", ".join(_OF_MODELOPT)
        raise ValueError(f"{key}quant_algo {algo!r} is not read; {known} are")
    size = config.get("group_size") or _size_of_groups(config)
    size = BLOCKSIZES[layout.format][0] if size is None else size
    return layout, _blocksize(size, layout, f"{key}group_size")


def _size_of_groups(config: Mapping[str, Any]) -> Any:
    """The group size that ModelOpt writes into config_groups of config.json."""
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("group_size") is not None:
            return weights["group_size"]
    return None


_PARSERS: dict[str, Callable[[Mapping[str, Any]], Settings]] = {
    "mxfp4": _parse_gpt_oss,
    "compressed-tensors": _parse_compressed,
    "modelopt": _parse_modelopt,
    "fp8": _parse_deepseek,
}


def compressed_config(layout: Layout, dense: Sequence[str]) -> dict[str, Any]:
    """Returns the quantization_config that compressed-tensors writes for weights in its layout.
    dense: the modules that stay dense."""
    kind = next(name for name, each in _OF_COMPRESSED.items() if each is layout)
    scales = "torch.uint8" if layout is CT_MXFP4 else "torch.float8_e4m3fn"
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": BLOCKSIZES[layout.format][0],
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": scales,
        "strategy": _STRATEGIES[layout.format],
        "symmetric": True,
        "type": "float",
        "zp_dtype": scales,
    }
    group = {
        "format": kind,
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": kind,
        "global_compression_ratio": None,
        "ignore": list(dense),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def modelopt_config(layout: Layout, dense: Sequence[str]) -> dict[str, Any]:
    """Returns the quantization_config that ModelOpt writes for NVFP4 weights and activations of 16
    bits. dense: the modules that stay dense."""
    size = BLOCKSIZES[layout.format][0]
    weights = {"dynamic": False, "group_size": size, "num_bits": 4, "type": "float"}
    return {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": list(dense),
        "quant_algo": "W4A16_NVFP4",
        "quant_method": "modelopt",
    }


def gpt_oss_config() -> dict[str, Any]:
    """Returns the quantization_config of gpt-oss, whose experts are all in MXFP4."""
    dense = (
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    )
    return {"modules_to_not_convert": list(dense), "quant_method": "mxfp4"}
