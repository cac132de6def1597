"""A small DeepSeek-V4 with random weights as its checkpoints are: experts in MXFP4, the other
layers in FP8."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import e2m1_models as models
import numpy as np
import torch
import transformers
from e2m1_checkpoints import CASES, random_arrays
from fp8_cases import FORMS
from safetensors.torch import load_file

_EXPERT = re.compile(r"\.ffn\.experts\.\d+\.w[123]$")
_IN_FP8 = re.compile(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|shared_experts\.w[123])$")
_DEEPSEEK = next(case for case in CASES if case.name == "deepseek")
_FP8 = next(form for form in FORMS if form.name == "DeepSeek-V4")


def config() -> transformers.DeepseekV4Config:
    return transformers.DeepseekV4Config(
        vocab_size=128, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=4, head_dim=32, q_lora_rank=32, num_experts_per_tok=2,
        n_routed_experts=4, max_position_embeddings=512, sliding_window=8, o_groups=2,
        o_lora_rank=16, index_n_heads=4, index_head_dim=16, index_topk=4,
    )  # fmt: skip


def write(folder: Path) -> Path:
    """Writes the checkpoint under the names that DeepSeek gives its tensors."""
    torch.manual_seed(0)
    transformers.DeepseekV4ForCausalLM(config()).save_pretrained(folder)
    rng, stored = np.random.default_rng(0), {}
    for seed, (name, dense) in enumerate(load_file(folder / "model.safetensors").items()):
        name = name.removeprefix("model.")
        module = name.removesuffix(".weight")
        made: dict[str, Any] = {}
        if _EXPERT.search(module):
            arrays = models.small(random_arrays(rng, tuple(dense.shape), 32, False), _DEEPSEEK)
            found = _DEEPSEEK.tensors(arrays)
            made = {key.replace(_DEEPSEEK.module, module): each for key, each in found.items()}
        elif _IN_FP8.search(module) and ".compressor." not in module:
            made = _FP8.tensors(module, tuple(dense.shape), seed)
        stored |= {key: models.tensor(each) for key, each in made.items()} or {name: dense}
    # A layer that predicts more tokens, which transformers ignores.
    stored["mtp.0.attn.wq_a.weight"] = stored["layers.0.attn.wq_a.weight"].clone()
    stored["mtp.0.attn.wq_a.scale"] = stored["layers.0.attn.wq_a.scale"].clone()
    models.save_file(stored, folder / "model.safetensors", {"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    said["expert_dtype"] = "fp4"
    said["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(said))
    return folder
