"""Tiny models, their 4-bit checkpoints, and what transformers says of them."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from nf4.checkpoint import QuantizeOptions, dequantize_checkpoint, quantize_checkpoint
from safetensors.torch import save_file

PROMPTS = ([1, 17, 42, 99, 250, 7, 8], [5, 6, 7], [300, 12, 44, 3, 3, 90, 211, 17, 65, 401, 2])
NEW_TOKENS = 24

_SIZES = dict(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
    tie_word_embeddings=False,
)
_FALCON = dict(
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=8,
    max_position_embeddings=256,
    bias=False,
    alibi=False,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True),
    "llama_plain": lambda: transformers.LlamaConfig(**_SIZES),
    "llama_narrow": lambda: transformers.LlamaConfig(**_SIZES | {"intermediate_size": 320}),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, head_dim=32),
    "falcon": lambda: transformers.FalconConfig(
        **_FALCON, num_kv_heads=4, new_decoder_architecture=True, multi_query=False
    ),
    "phi3": lambda: transformers.Phi3Config(**_SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**_SIZES, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_SIZES, head_dim=32, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=128
    ),
}


# Other weights: the length of a name is their seed.
CONFIGS |= {f"{name}_again": CONFIGS[name] for name in ("llama", "qwen3_moe")}


def dense(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """Saves a model with random weights, whose logits differ clearly between tokens."""
    torch.manual_seed(len(name))
    config = CONFIGS[name]()
    config.dtype = dtype
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for each, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2 if "embed" in each else 1.5 / weight.shape[-1] ** 0.5)
            elif "bias" in each:
                weight.normal_(std=0.1)
    model.to(dtype).save_pretrained(folder)
    return folder


def quantized(source: Path, folder: Path, **options: Any) -> Path:
    """Runs `nf4 quantize` on a checkpoint."""
    quantize_checkpoint(source, folder, QuantizeOptions(**options))
    return folder


def reference(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Returns the greedy tokens and their log-probabilities of the dequantized checkpoint in fp32,
    by transformers."""
    dequantize_checkpoint(checkpoint, folder, dtype="fp32")
    return greedy(folder)


@torch.no_grad()
def greedy(folder: Path) -> dict[str, Any]:
    """Does the same for a dense checkpoint."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens, logprobs = [], []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = made.sequences[0, len(prompt) :]
        scores = torch.stack(made.logits).squeeze(1).log_softmax(-1)
        tokens.append(new.tolist())
        logprobs.append(scores.gather(1, new[:, None]).squeeze(1).tolist())
    return {"tokens": tokens, "logprobs": logprobs}


def adapter(folder: Path, dense: Path, merged: Path, rank: int = 8) -> None:
    """Saves a LoRA adapter of every layer of a LLaMA, and the dense model with it merged."""
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    generator, tensors, targets = torch.Generator().manual_seed(5), {}, set()
    for name, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear) or name == "lm_head":
            continue
        rows, cols = layer.weight.shape
        a = torch.randn(rank, cols, generator=generator) / cols**0.5
        b = torch.randn(rows, rank, generator=generator) / rank**0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        layer.weight.data += 0.5 * (b @ a)
        targets.add(name.rsplit(".", 1)[-1])
    model.save_pretrained(merged)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank / 2,
        "target_modules": sorted(targets),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


class Made:
    """Checkpoints in a folder, each made once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.dense = functools.cache(self._dense)
        self.checkpoint = functools.cache(self._checkpoint)
        self.reference = functools.cache(self._reference)

    def _dense(self, name: str) -> Path:
        return dense(self._folder / name, name)

    def _checkpoint(self, name: str, **options: Any) -> Path:
        label = re.sub(r"\W+", "-", f"{name} {options} nf4")
        return quantized(self.dense(name), self._folder / label, **options)

    def _reference(self, checkpoint: Path) -> dict[str, Any]:
        return reference(checkpoint, checkpoint.with_name(checkpoint.name + "-dense"))


TOLERANCE = 1e-5


def require_same(said: dict[str, Any], expected: dict[str, Any]) -> None:
    """An engine on libnf4 says the same tokens, with the same log-probabilities."""
    assert said.get("error") is None
    assert said["method"] == "nf4"
    assert said["tokens"] == expected["tokens"]
    pairs = zip(said["logprobs"], expected["logprobs"], strict=True)
    worst = max(abs(a - b) for left, right in pairs for a, b in zip(left, right, strict=True))
    assert worst < TOLERANCE
