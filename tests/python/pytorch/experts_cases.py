"""Small models of transformers with experts, and the same with dense weights."""

from __future__ import annotations

import copy

import nf4.torch
import torch
import transformers
from nf4.torch import NF4Experts
from torch import nn

TOKENS = torch.arange(22).view(2, 11)
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip


def qwen3():
    config = transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=64, num_experts=6, num_experts_per_tok=2, head_dim=32
    )
    return transformers.Qwen3MoeForCausalLM(config).eval()


def mixtral():
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config).eval()


def gpt_oss(**sizes):
    """Transposed, with biases and a gate of its own over interleaved columns."""
    config = transformers.GptOssConfig(
        **(SIZES | sizes), num_local_experts=4, num_experts_per_tok=2, head_dim=32
    )
    model = transformers.GptOssForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "bias" in name or "sinks" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


MODELS = {"qwen3": qwen3, "mixtral": mixtral, "gpt-oss": gpt_oss}


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def dense_twin(model):
    """The same model with the dequantized weights, computed by transformers' own loop."""
    twin = copy.deepcopy(model)
    for module in list(twin.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, NF4Experts):
                dense = child.dequantize()
                delattr(module, name)
                weight = dense.transpose(1, 2).contiguous() if module.is_transposed else dense
                setattr(module, name, nn.Parameter(weight, requires_grad=False))
                module.config._experts_implementation = "eager"
    nf4.torch.to_dense(twin)
    return twin
