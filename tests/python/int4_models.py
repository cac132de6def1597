"""Tiny llamas in every layout of integers, as checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import int4_checkpoints
import int4_oracle
import ml_dtypes
import numpy as np
import torch
import transformers
from int4_torch_cases import dense_of, tensor
from safetensors.torch import save_file

GROUP = 32
# layout, symmetric, act order, scales
CASES = {
    "gptq": ("gptq", False, False, "fp16"),
    "gptq symmetric, act order": ("gptq", True, True, "fp16"),
    "gptq_v2, act order": ("gptq_v2", False, True, "bf16"),
    "awq": ("awq", False, False, "fp16"),
    "compressed-tensors": ("compressed-tensors", True, False, "bf16"),
    "compressed-tensors, zeros": ("compressed-tensors", False, False, "fp16"),
    "compressed-tensors, act order": ("compressed-tensors", True, True, "fp16"),
}


def as_torch(array: np.ndarray) -> torch.Tensor:
    return tensor(array, bf16=array.dtype == ml_dtypes.bfloat16)


def small(a: int4_oracle.Int4Arrays) -> int4_oracle.Int4Arrays:
    """With scales such as a network has, of the same dtype."""
    if a.scale_dtype == "fp16":
        return a._replace(scales=(a.scales / 8).astype(np.float16))
    floats = a.scales.view(ml_dtypes.bfloat16) / ml_dtypes.bfloat16(8)
    return a._replace(scales=floats.astype(ml_dtypes.bfloat16).view(np.uint16))


def checkpoint(folder: Path, case: str, tied: bool = False, bias: bool = True):
    """Writes a checkpoint; the dense model in fp32 of the same weights."""
    layout, symmetric, act_order, scale_dtype = CASES[case]
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, attention_bias=bias, tie_word_embeddings=tied,
    )  # fmt: skip
    dense = transformers.LlamaForCausalLM(config).eval()
    rng, stored, state = np.random.default_rng(1), {}, dense.state_dict()
    for name, module in dense.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            shape = (module.out_features, module.in_features)
            weight = small(int4_oracle.random_int4(
                rng, layout, *shape, GROUP, symmetric=symmetric, scale_dtype=scale_dtype,
                act_order=act_order,
            ))  # fmt: skip
            parts = int4_checkpoints.tensors(weight, name)
            stored |= {key: as_torch(array) for key, array in parts.items()}
            module.weight.data = dense_of(weight)
            del state[f"{name}.weight"]
    if tied:
        del state["lm_head.weight"]
    folder.mkdir()
    save_file(state | stored, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = int4_checkpoints.quantization_config(
        layout, GROUP, symmetric=symmetric, act_order=act_order
    )
    fields = config.to_dict() | {
        "architectures": ["LlamaForCausalLM"], "dtype": "float32",
        "quantization_config": quantization,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))
    return dense
