"""transformers' LLaMA with PEFT's adapters on all seven projections, around linear layers of any
form: what load_in_4bit, get_peft_model and a training loop make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from nf4bench import models_forms
from nf4bench.models_cases import Size
from nf4bench.models_llama import DTYPE, Linears, random_weight
from nf4bench.training_cases import ALPHA, RANK, Group

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("transformers", "peft")}


def _config(size: Size) -> Any:
    import transformers

    return transformers.LlamaConfig(
        hidden_size=size.hidden, num_attention_heads=size.heads,
        intermediate_size=size.intermediate, num_hidden_layers=size.layers,
        vocab_size=size.vocabulary, use_cache=False,
    )  # fmt: skip


def ends(size: Size, place: str) -> tuple[Tensor, Tensor]:
    """Embedding and head."""
    return tuple(random_weight(size.vocabulary, size.hidden, place) for _ in range(2))


def adapted(
    kind: Any, config: Any, linear_of: Callable[[int, str, nn.Linear], nn.Module], is_4bit: bool,
    place: str, shared: tuple[Tensor, Tensor] | None = None,
) -> nn.Module:  # fmt: skip
    """PEFT's model of a class of transformers'. linear_of makes a projection of the layer, the
    name and the linear on meta. shared: embedding and head. What else has a weight is ones."""
    import peft

    with torch.device("meta"):
        model = kind._from_config(config, dtype=DTYPE)
    decoder = getattr(model, "model", model)
    for at, layer in enumerate(decoder.layers):
        for parent in (layer.self_attn, layer.mlp):
            for name in PROJECTIONS:
                if hasattr(parent, name):
                    setattr(parent, name, linear_of(at, name, getattr(parent, name)))
    if shared is not None:
        decoder.embed_tokens.weight, model.lm_head.weight = (
            nn.Parameter(each, requires_grad=False) for each in shared
        )
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.is_meta:
            module.weight = nn.Parameter(torch.ones_like(weight, device=place), requires_grad=False)
    with torch.device(place):
        decoder.rotary_emb = type(decoder.rotary_emb)(config)
    model.is_loaded_in_4bit = is_4bit
    task = {} if shared is None else {"task_type": "CAUSAL_LM"}
    lora = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(PROJECTIONS), lora_dropout=0.0, **task
    )
    return peft.get_peft_model(model, lora).train()


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
    import transformers

    made = {}
    for form, each in layers.items():
        with models_forms.kernels_of(form):
            made[form] = adapted(
                transformers.LlamaForCausalLM, _config(size),
                lambda at, name, _, of=each: of[at][name],
                form in ("bitsandbytes", models_forms.DROP_IN), shared[0].device.type, shared,
            )  # fmt: skip
    return made
