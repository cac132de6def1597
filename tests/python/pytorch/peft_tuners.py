"""Every tuner of the installed PEFT over a small Llama whose projections are of one kind: dense,
bitsandbytes' Linear4bit, or libnf4's. All have the same weights."""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import nf4.torch
import peft
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

TUNERS = sorted(str(getattr(each, "value", each)) for each in peft.PEFT_TYPE_TO_CONFIG_MAPPING)
TARGETS = ["q_proj", "v_proj"]
IDS = torch.randint(0, 96, (2, 7), generator=torch.Generator().manual_seed(3))
# A tuner needs these options beside its target_modules.
_OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"target_modules": None, "adapter_len": 4, "adapter_layers": 1},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 16},
    "CPT": {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]},
    "FOURIERFT": {"n_frequency": 20},
    "IA3": {"feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MULTITASK_PROMPT_TUNING": {"num_tasks": 2},
    "OFT": {"oft_block_size": 4},
    "OSF": {"effective_rank": 8},
    "SHADOW": {"target_modules": None},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [1, 2, 3]},
    "VBLORA": {"num_vectors": 8, "vector_length": 16},
}
# It needs this argument in a forward pass.
_ASKS = {"MULTITASK_PROMPT_TUNING": "task_ids", "POLY": "task_ids"}


@functools.cache
def _dense() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=96, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def _projections(model: nn.Module) -> dict[str, nn.Linear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }


def _linear4bit(linear: nn.Linear) -> nn.Module:
    made = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32,
        quant_type="nf4",
    )  # fmt: skip
    made.support_avx512bf16_for_cpu = False
    made.weight.data = linear.weight.data.clone()
    return made.to("cpu")


@functools.cache
def _made(kind: str) -> transformers.PreTrainedModel:
    model = copy.deepcopy(_dense())
    for name, layer in _projections(model).items():
        if kind in ("Int4Linear", "dense integers"):
            made = nf4.torch.Int4Linear.from_linear(layer, group_size=32)
        else:
            made = _linear4bit(layer)
        if kind in ("NF4Linear", "dense"):
            made = nf4.torch.NF4Linear.from_bitsandbytes(made)
        model.set_submodule(name, made.to_linear("fp32") if kind.startswith("dense") else made)
    model.is_loaded_in_4bit = kind in ("Linear4bit", "NF4Linear")
    return model


def model_of(kind: str) -> transformers.PreTrainedModel:
    """kind: "Linear4bit", "NF4Linear" or "Int4Linear", or "dense" for the weights of the first two,
    "dense integers" for those of the last."""
    return copy.deepcopy(_made(kind))  # to quantize it takes ten times as long


def config_of(tuner: str, folder: Path, **options: Any) -> peft.PeftConfig:
    kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[tuner]
    known = {field.name for field in dataclasses.fields(kind)}
    given = {"target_modules": TARGETS, "num_virtual_tokens": 4} | _OPTIONS.get(tuner, {}) | options
    if tuner == "XLORA":
        first = peft.get_peft_model(model_of("dense"), config_of("LORA", folder))
        first.save_pretrained(folder / "lora")
        given = {"hidden_size": 64, "adapters": {"0": str(folder / "lora")}}
    given = {name: value for name, value in given.items() if name in known}
    return kind(task_type="CAUSAL_LM", **given)


def adapted(kind: str, config: peft.PeftConfig, seed: int = 1) -> peft.PeftModel:
    """Returns a model with adapters that change the outputs."""
    base = model_of(kind)
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, copy.deepcopy(config))
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape)
    return model


def logits(model: nn.Module, tuner: str) -> torch.Tensor:
    torch.manual_seed(11)
    asked = {_ASKS[tuner]: torch.tensor([0, 0])} if tuner in _ASKS else {}
    return model(input_ids=IDS, **asked).logits


def gradients(model: nn.Module, tuner: str) -> torch.Tensor:
    trained = [each for each in model.parameters() if each.requires_grad]
    found = torch.autograd.grad(logits(model, tuner).square().mean(), trained, allow_unused=True)
    return torch.cat([each.flatten() for each in found if each is not None])


def base_layers(model: nn.Module) -> list[nn.Linear]:
    layers = [each for each in model.modules() if isinstance(each, BaseTunerLayer)]
    return [each.get_base_layer() for each in layers]


def weights(model: nn.Module) -> torch.Tensor:
    """Returns those of the linear layers that have an adapter."""
    found = [each for each in base_layers(model) if isinstance(each, nn.Linear)]
    made = [
        each.weight.data if type(each) is nn.Linear else nf4_linear(each).dequantize()
        for each in found
    ]
    return torch.cat([each.flatten() for each in made]) if made else torch.zeros(1)


def nf4_linear(layer: nn.Module) -> nn.Module:
    made = isinstance(layer, bnb.nn.Linear4bit)
    return nf4.torch.NF4Linear.from_bitsandbytes(layer) if made else layer


def in_four_bits(dense: torch.Tensor) -> torch.Tensor:
    made = nf4.torch.quantize(dense, blocksize=64, nested_blocksize=256)
    return nf4.torch.dequantize(made, "fp32")
