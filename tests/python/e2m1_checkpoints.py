"""Small checkpoints of MXFP4 and NVFP4 weights in the layouts of their writers, and their values,
computed without the library."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import checkpoint_helpers as helpers
import int4_checkpoints
import ml_dtypes
import numpy as np

LAYER = "model.layers.0.self_attn.q_proj"
STACK = "model.layers.0.mlp.experts.gate_up_proj"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.array([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], np.float32)
DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def e8m0(byte: int) -> float:
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


_E8M0 = np.array([e8m0(byte) for byte in range(256)], np.float32)
_E4M3 = np.array([e4m3(byte) for byte in range(256)], np.float32)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """A weight: the bytes of its codes [..., cols / 2] and scales [..., cols / blocksize], and the
    global scale of NVFP4."""

    packed: np.ndarray
    scales: np.ndarray
    of_all: np.float32 | None = None

    def floats(self, divides: bool) -> np.ndarray:
        """The scales, float32."""
        if self.of_all is None:
            return _E8M0[self.scales]
        with np.errstate(all="ignore"):
            scales = _E4M3[self.scales]
            return scales / self.of_all if divides else scales * self.of_all

    def dense(self, dtype: str, divides: bool = False) -> np.ndarray:
        codes = np.stack((self.packed & 15, self.packed >> 4), -1).reshape(*self.scales.shape, -1)
        with np.errstate(all="ignore"):
            values = E2M1[codes] * self.floats(divides)[..., None]
            return values.reshape(*self.scales.shape[:-1], -1).astype(DTYPES[dtype])


def random_arrays(
    rng: np.random.Generator, shape: tuple[int, ...], blocksize: int, nvfp4: bool
) -> Arrays:
    *rows, cols = shape
    packed = rng.integers(0, 256, (*rows, cols // 2), np.uint8)
    if not nvfp4:
        return Arrays(packed, rng.integers(110, 128, (*rows, cols // blocksize), np.uint8))
    scales = rng.integers(1, 127, (*rows, cols // blocksize), np.uint8)
    return Arrays(packed, scales, np.float32(rng.uniform(0.5, 2)))


_WEIGHTS = {"dynamic": False, "num_bits": 4, "symmetric": True, "type": "float"}


def compressed_config(kind: str) -> dict[str, Any]:
    """What compressed-tensors writes. kind: "mxfp4" or "nvfp4"."""
    is_mx = kind == "mxfp4"
    strategy = {"strategy": "group" if is_mx else "tensor_group", "group_size": 32 if is_mx else 16}
    group = {"input_activations": None, "targets": ["Linear"], "weights": {**_WEIGHTS, **strategy}}
    return {
        "config_groups": {"group_0": group},
        "format": f"{kind}-pack-quantized",
        "ignore": ["lm_head"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def modelopt_config(algo: str, **more: Any) -> dict[str, Any]:
    ignore = ["lm_head"]
    return {"quant_method": "modelopt", "quant_algo": algo, "ignore": ignore, **more}


@dataclasses.dataclass(frozen=True)
class Case:
    """A checkpoint of a writer."""

    name: str
    format: str
    blocksize: int
    config: dict[str, Any]
    shape: tuple[int, ...] = (24, 64)
    beside: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}-{self.format}-{self.blocksize}"

    @property
    def divides(self) -> bool:
        return self.format == "nvfp4" and self.name == "compressed-tensors"

    @property
    def module(self) -> str:
        return STACK if self.name == "gpt-oss" else LAYER

    def arrays(self) -> Arrays:
        rng = np.random.default_rng(len(str(self)))
        return random_arrays(rng, self.shape, self.blocksize, self.format == "nvfp4")

    def tensors(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """The tensors of a module, as the writer stores them."""
        packed, scales, module = arrays.packed, arrays.scales, self.module
        e4m3 = scales.view(ml_dtypes.float8_e4m3fn)
        if self.name == "gpt-oss":
            blocks = packed.reshape(*scales.shape, 16)
            return {f"{module}_blocks": blocks, f"{module}_scales": scales}
        if self.name == "deepseek":
            e8m0 = scales.view(ml_dtypes.float8_e8m0fnu)
            return {f"{module}.weight": packed.view(np.int8), f"{module}.scale": e8m0}
        name = "weight" if self.name == "modelopt" else "weight_packed"
        if self.format == "mxfp4":
            return {f"{module}.{name}": packed, f"{module}.weight_scale": scales}
        found = {f"{module}.{name}": packed, f"{module}.weight_scale": e4m3}
        if self.name == "modelopt":
            return {**found, f"{module}.weight_scale_2": np.asarray(arrays.of_all)}
        return {**found, f"{module}.weight_global_scale": np.array([arrays.of_all], np.float32)}

    def folder(self, path: Path, arrays: Arrays | None = None, **config: Any) -> Path:
        stored = {"model.embed_tokens.weight": helpers.random_weight((10, 64), "bfloat16", 1)}
        stored |= self.tensors(self.arrays() if arrays is None else arrays)
        stored["lm_head.weight"] = helpers.random_weight((10, 64), "bfloat16", 2)
        made = int4_checkpoints.write(path, stored, {**self.config, **config} or None)
        for name, block in self.beside.items():
            (made / name).write_text(json.dumps(block))
        return made


CASES = [
    Case("gpt-oss", "mxfp4", 32, {"quant_method": "mxfp4"}, (3, 8, 64)),
    Case("compressed-tensors", "mxfp4", 32, compressed_config("mxfp4")),
    Case("compressed-tensors", "nvfp4", 16, compressed_config("nvfp4")),
    Case("modelopt", "mxfp4", 32, modelopt_config("MXFP4")),
    Case("modelopt", "nvfp4", 16, modelopt_config("NVFP4")),
    Case("modelopt", "nvfp4", 32, modelopt_config("W4A16_NVFP4", group_size=32)),
    Case("deepseek", "mxfp4", 32, {"quant_method": "fp8", "expert_dtype": "fp4"}),
]
