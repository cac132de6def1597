"""A small gpt-oss with random weights, in MXFP4 as its checkpoints are, and dense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

STACKS = ("gate_up_proj", "down_proj")


def config(**more: Any) -> transformers.GptOssConfig:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "sliding_window": 8,
        "max_position_embeddings": 4096,
        "swiglu_limit": 1.0,  # so that both clamps are reached
    }
    return transformers.GptOssConfig(**{**sizes, **more})


def _packed(shape: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and scales of [experts, outputs, inputs]."""
    experts, rows, cols = shape
    blocks = torch.randint(256, (experts, rows, cols // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(121, 124, (experts, rows, cols // 32), dtype=torch.uint8)


def write(folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, torch.Tensor]:
    """Writes the checkpoint and returns the state of the dense model that transformers makes of
    it."""
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config(**more)).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "sinks" in name:
            torch.nn.init.normal_(parameter.data, std=0.2)
    stored = dict(model.state_dict())
    dense = dict(stored)
    for name in [name for name in stored if name.endswith(STACKS)]:
        experts, cols, rows = stored.pop(name).shape
        blocks, scales = _packed((experts, rows, cols))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    folder.mkdir(parents=True)
    save_file({name: each.contiguous() for name, each in stored.items()},
              folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    model.config.dtype = dtype
    model.config.architectures = ["GptOssForCausalLM"]
    document = json.loads(model.config.to_json_string(use_diff=False))
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    document["quantization_config"] = {
        "quant_method": "mxfp4", "modules_to_not_convert": [*kept, "model.embed_tokens"]
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(document))
    return dense


def dense_model(state: dict[str, torch.Tensor], **more: Any) -> transformers.GptOssForCausalLM:
    model = transformers.GptOssForCausalLM(config(**more))
    model = model.to(next(iter(state.values())).dtype).eval()
    model.load_state_dict(state)
    return model
