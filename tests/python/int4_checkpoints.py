"""Small checkpoints of integer weights, packed by int4_oracle.py and not by the library."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import checkpoint_helpers as helpers
import int4_oracle as oracle
import ml_dtypes
import numpy as np
from int4_oracle import Int4Arrays
from nf4.checkpoint import audit

_GPTQ_NAMES = {"packed": "qweight", "zeros": "qzeros", "scales": "scales", "g_idx": "g_idx"}
_COMPRESSED_NAMES = {
    "packed": "weight_packed",
    "zeros": "weight_zero_point",
    "scales": "weight_scale",
    "g_idx": "weight_g_idx",
}
LAYER = "model.layers.0.self_attn.q_proj"


def names(layout: str) -> dict[str, str]:
    """Part of Int4Arrays -> the name of its tensor."""
    return _COMPRESSED_NAMES if layout == "compressed-tensors" else _GPTQ_NAMES


def tensors(a: Int4Arrays, module: str = LAYER) -> dict[str, np.ndarray]:
    """The tensors of a module, as its project stores them: GPTQ always has g_idx."""
    found = {part: getattr(a, part) for part in ("packed", "zeros", "scales", "g_idx")}
    if a.scale_dtype == "bf16":
        found["scales"] = a.scales.view(ml_dtypes.bfloat16)
    if a.layout.startswith("gptq") and a.g_idx is None:
        found["g_idx"] = oracle.plain_groups(a.cols, a.group_size).astype(np.int32)
    stored = {
        f"{module}.{names(a.layout)[part]}": array
        for part, array in found.items()
        if array is not None
    }
    if a.layout == "compressed-tensors":
        stored[f"{module}.weight_shape"] = np.array([a.rows, a.cols], np.int64)
    return stored


def quantization_config(
    layout: str, group_size: int, *, symmetric: bool, act_order: bool = False
) -> dict[str, Any]:
    """What the layout's project writes."""
    if layout == "awq":
        return {
            "bits": 4,
            "group_size": group_size,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        }
    if layout != "compressed-tensors":
        return {
            "bits": 4,
            "checkpoint_format": layout,
            "desc_act": act_order,
            "group_size": group_size,
            "quant_method": "gptq",
            "sym": symmetric,
        }
    row = group_size == -1
    weights = {
        "actorder": "group" if act_order else None,
        "group_size": None if row else group_size,
        "num_bits": 4,
        "strategy": "channel" if row else "group",
        "symmetric": symmetric,
        "type": "int",
    }
    group = {"input_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


@dataclasses.dataclass(frozen=True)
class Case:
    """A checkpoint with weights of these kinds; `folder` writes it."""

    layout: str
    group_size: int = 32
    symmetric: bool = True
    scale_dtype: str = "fp16"
    act_order: bool = False
    shapes: tuple[tuple[int, int], ...] = ((16, 64), (40, 128))

    def __str__(self) -> str:
        kind = "sym" if self.symmetric else "asym"
        order = "-act" if self.act_order else ""
        return f"{self.layout}-{kind}-{self.group_size}-{self.scale_dtype}{order}"

    def weights(self) -> dict[str, Int4Arrays]:
        """Module -> weight."""
        rng = np.random.default_rng(len(str(self)))
        return {
            f"model.layers.{number}.self_attn.q_proj": random_weight(self, rng, *shape)
            for number, shape in enumerate(self.shapes)
        }

    @property
    def config(self) -> dict[str, Any]:
        return quantization_config(
            self.layout, self.group_size, symmetric=self.symmetric, act_order=self.act_order
        )

    def folder(self, path: Path, shards: int = 1, **config: Any) -> Path:
        stored = {"model.embed_tokens.weight": helpers.random_weight((10, 64), "float16", 1)}
        for module, weight in self.weights().items():
            stored |= tensors(weight, module)
        stored["lm_head.weight"] = helpers.random_weight((10, 64), "float16", 2)
        return write(path, stored, self.config | config, shards)


def random_weight(case: Case, rng: np.random.Generator, rows: int, cols: int) -> Int4Arrays:
    return oracle.random_int4(
        rng,
        case.layout,
        rows,
        cols,
        case.group_size,
        symmetric=case.symmetric,
        scale_dtype=case.scale_dtype,
        act_order=case.act_order,
    )


def write(
    path: Path, stored: dict[str, np.ndarray], config: dict[str, Any] | None, shards: int = 1
) -> Path:
    """A model folder; with several shards, tensor i is in shard i modulo their number."""
    path.mkdir(parents=True)
    files = [dict(list(stored.items())[shard::shards]) for shard in range(shards)]
    weight_map = {}
    for number, part in enumerate(files):
        name = "model.safetensors" if shards == 1 else f"part-{number}.safetensors"
        (path / name).write_bytes(helpers.file_bytes(part))
        weight_map |= dict.fromkeys(part, name)
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = {} if config is None else {"quantization_config": config}
    document = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **settings}
    (path / "config.json").write_text(json.dumps(document))
    return path


def findings(severity: str, path: Path) -> list[str]:
    """What verify finds of this severity: the reasons."""
    return [found.reason for found in audit(str(path))[1] if found.severity == severity]


CASES = [
    Case("gptq"),
    Case("gptq", 64, symmetric=False, shapes=((8, 64), (12, 128))),
    Case("gptq", 32, act_order=True, scale_dtype="bf16"),
    Case("gptq", -1, shapes=((16, 64), (7, 40))),
    Case("gptq_v2"),
    Case("gptq_v2", 32, symmetric=False, act_order=True),
    Case("gptq_v2", -1, symmetric=False, scale_dtype="bf16"),
    Case("awq", symmetric=False),
    Case("awq", 64),
    Case("awq", -1, symmetric=False, shapes=((16, 13), (8, 100))),
    Case("compressed-tensors"),
    Case("compressed-tensors", symmetric=False, scale_dtype="bf16"),
    Case("compressed-tensors", -1, shapes=((5, 13), (7, 40))),
    Case("compressed-tensors", -1, symmetric=False, shapes=((5, 13), (9, 40))),
    Case("compressed-tensors", 32, symmetric=False, act_order=True),
]
