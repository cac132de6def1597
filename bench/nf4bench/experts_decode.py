"""A token of a Qwen3-MoE shape in transformers, compiled, from a CUDA graph: experts and linear
layers in NF4 beside the same numbers dense, by both of transformers' ways to multiply them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import nf4.torch
import torch
from nf4.torch import NF4Experts, NF4Linear
from nf4.torch.experts import IMPLEMENTATION
from torch import Tensor, nn

from nf4bench.experts_cases import QWEN, REPLAYS, Model
from nf4bench.experts_weights import DTYPE
from nf4bench.measure import measure
from nf4bench.product import require
from nf4bench.rows import Bench

CONTEXT = 512  # positions of the key-value cache, of which the token is the last
TOKENS = 16  # of which each launch takes the next
# The error of the logits: a rounding to bf16 can change a choice of experts.
MOST_ERROR = 0.3
DENSE = ("grouped_mm", "batched_mm")


@dataclass(frozen=True)
class Size:
    """vocabulary: a share of the model's, as are the layers, so that the head has its share."""

    experts: Model
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int


QWEN3_MOE = Size(QWEN, 4, 32, 4, 128, 151936 * 4 // 48)


def _model(size: Size, place: str) -> nn.Module:
    import transformers

    experts = size.experts
    config = transformers.Qwen3MoeConfig(
        hidden_size=experts.hidden, moe_intermediate_size=experts.intermediate,
        num_experts=experts.experts, num_experts_per_tok=experts.top_k,
        num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads, head_dim=size.head_dim,
        vocab_size=size.vocabulary, norm_topk_prob=True,
    )  # fmt: skip
    with torch.device(place):
        return transformers.Qwen3MoeForCausalLM._from_config(config, dtype=DTYPE).eval()


def quantized(dense: nn.Module) -> nn.Module:
    """A copy in NF4, whose numbers the dense model gets."""
    made = copy.deepcopy(dense)
    nf4.torch.quantize_model(made, experts=True)
    for name, module in made.named_modules():
        if isinstance(module, NF4Experts):
            dense.get_parameter(name).data.copy_(module.dequantize())
        elif isinstance(module, NF4Linear):
            dense.get_submodule(name).weight.data.copy_(module.dequantize())
    return made


def _cache(model: nn.Module, place: str) -> Any:
    """Full but for the last position."""
    import transformers

    cache = transformers.StaticCache(config=model.config, max_cache_len=CONTEXT)
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=place), past_key_values=cache)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(CONTEXT - 1)
    return cache


def _step(
    compiled: Callable, config: Any, implementation: str, cache: Any, token: Tensor, stream: int
) -> Tensor:
    config._experts_implementation = implementation
    logits = compiled(input_ids=token, past_key_values=cache).logits
    torch._foreach_sub_([layer.cumulative_length for layer in cache.layers], 1)  # a launch
    return logits


@torch.no_grad()
def run(bench: Bench, size: Size) -> dict[str, Any]:
    """Raises WrongResult before anything is timed."""
    place = bench.gpu.place
    dense = _model(size, place)
    model, cache = quantized(dense), _cache(dense, place)
    torch.compiler.reset()
    forms = {"libnf4": (model, IMPLEMENTATION)}
    forms |= {f"dense, {name}": (dense, name) for name in DENSE}
    tokens = torch.randint(size.vocabulary, (TOKENS, 1, 1), device=place)
    launches = {}
    for name, (each, implementation) in forms.items():
        step = partial(_step, torch.compile(each, dynamic=False), each.config, implementation)
        launches[name] = [partial(step, cache, token) for token in tokens]
    logits = {name: bench.gpu.run(each[0]).double().clone() for name, each in launches.items()}
    expected = logits[f"dense, {DENSE[0]}"]
    errors = {n: require(f"decode: {n}", MOST_ERROR, expected, each) for n, each in logits.items()}
    times = measure(bench.gpu, launches, bench.replays or REPLAYS)
    return {
        "model": size.experts.name, "layers": size.layers, "vocabulary": size.vocabulary,
        "context": CONTEXT, "transformers": metadata.version("transformers"),
        "forms": [
            {
                "name": name, **each.figures(), "error": float(f"{errors[name]:.3e}"),
                "ratio": round(each.us / times["libnf4"].us, 3),
            }
            for name, each in times.items()
        ],
    }  # fmt: skip
