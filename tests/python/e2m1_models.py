"""Small transformers models whose linear layers are in MXFP4 or NVFP4, as writers store them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import e2m1_checkpoints as models
import ml_dtypes
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
TORCH = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_MOE = {"moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}


def llama() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_SIZES))


def qwen3_moe() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **_MOE))


_VIEWED = {
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e8m0fnu): (np.uint8, torch.float8_e8m0fnu),
    np.dtype(ml_dtypes.bfloat16): (np.int16, torch.bfloat16),
}


def tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype in _VIEWED:
        integers, dtype = _VIEWED[array.dtype]
        return torch.from_numpy(array.view(integers)).view(dtype)
    return torch.from_numpy(np.array(array))


def small(arrays: models.Arrays, case: models.Case) -> models.Arrays:
    """Weights with which a model is well-conditioned."""
    if arrays.of_all is None:
        return dataclasses.replace(arrays, scales=np.minimum(arrays.scales, 122))
    of_all = arrays.of_all * 32 if case.divides else arrays.of_all / 32
    return models.Arrays(arrays.packed, np.minimum(arrays.scales, 0x30), np.float32(of_all))


def write(model: transformers.PreTrainedModel, case: models.Case, folder: Path) -> Path:
    """Saves a model with random codes and scales in the place of its projections."""
    model.save_pretrained(folder)
    rng, stored = np.random.default_rng(0), {}
    for name, dense in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = dense
            continue
        shape = tuple(dense.shape)
        arrays = small(
            models.random_arrays(rng, shape, case.blocksize, case.format == "nvfp4"), case
        )
        for key, array in case.tensors(arrays).items():
            module = name.removesuffix(".weight")
            stored[key.replace(models.LAYER, module)] = tensor(array)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": case.config}))
    return folder


def gradients(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of a model, and the gradient of its embeddings."""
    x = model.get_input_embeddings()(tokens).detach().requires_grad_()
    y = model(inputs_embeds=x).logits
    y.square().sum().backward()
    return y.detach(), x.grad


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative, in the 2-norm."""
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm())
