"""transformers' LLaMA with PEFT's adapters on all seven projections, around linear layers of any
form: what load_in_4bit, get_peft_model and a training loop make of it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from nf4bench import models_forms
from nf4bench.models_cases import Size
from nf4bench.models_llama import DTYPE, Linears, random_weight
from nf4bench.training_cases import ALPHA, RANK, Group

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("transformers", "peft")}


def _config(size: Size) -> Any:
    import transformers

    return transformers.LlamaConfig(
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        vocab_size=size.vocabulary,
        use_cache=False,
    )


def ends(size: Size, place: str) -> tuple[Tensor, Tensor]:
    """Embedding and head."""
    return tuple(random_weight(size.vocabulary, size.hidden, place) for _ in range(2))


def _filled(model: nn.Module, layers: list[Linears], shared: tuple[Tensor, Tensor]) -> None:
    """Gives a model on meta its layers, embedding, head, and norms of ones."""
    place = shared[0].device
    for layer, linears in zip(model.model.layers, layers, strict=True):
        for name, linear in linears.items():
            setattr(layer.mlp if hasattr(layer.mlp, name) else layer.self_attn, name, linear)
    model.model.embed_tokens.weight = nn.Parameter(shared[0], requires_grad=False)
    model.lm_head.weight = nn.Parameter(shared[1], requires_grad=False)
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.weight = nn.Parameter(torch.ones_like(module.weight, device=place))
    with place:
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def adapted(
    form: str, size: Size, layers: list[Linears], shared: tuple[Tensor, Tensor]
) -> nn.Module:
    """A model of PEFT's."""
    import peft
    import transformers

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM._from_config(_config(size), dtype=DTYPE)
    _filled(model, layers, shared)
    model.is_loaded_in_4bit = form in ("bitsandbytes", models_forms.DROP_IN)
    names = list(size.linears())
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=names, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config).train()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """The adapters."""
    for parameter in trained(model):
        parameter.grad = None
        parameter.data = parameter.data.to(dtype)


def begin(model: nn.Module, dtype: torch.dtype, seed: int = 0) -> None:
    """The same adapters for every form, whatever it has been trained to. None is zero, so that no
    gradient is."""
    cast(model, torch.float32)
    torch.manual_seed(seed)
    for parameter in trained(model):
        nn.init.normal_(parameter, std=0.5 * parameter.shape[1] ** -0.5)
    cast(model, dtype)


def set_up(model: nn.Module, group: Group) -> None:
    """Begins with new adapters, and switches checkpointing on or off."""
    begin(model, DTYPES[group.adapters])
    if group.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    else:
        model.gradient_checkpointing_disable()


def models(
    size: Size, layers: Mapping[str, list[Linears]], shared: tuple[Tensor, Tensor]
) -> dict[str, nn.Module]:
    """By form."""
    made = {}
    for form, each in layers.items():
        with models_forms.kernels_of(form):
            made[form] = adapted(form, size, each, shared)
    return made
