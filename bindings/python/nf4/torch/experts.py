"""Experts of transformers' models in 4 bits.

transformers stacks the experts of a layer in parameters of three dimensions and multiplies them by
the function that config._experts_implementation names. Here such a parameter becomes an NF4Experts
or Int4Experts of the same name, and the function is experts_forward, which _transformers.py
registers as "nf4".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nf4.checkpoint.stacks import names_of
from nf4.torch.modules import Int4Experts, NF4Experts

IMPLEMENTATION = "nf4"
FEW = 64  # rows up to which a compiled graph compares each with each, rather than to sort
_STACKS = (NF4Experts, Int4Experts)
MOE = "transformers.integrations.moe"


def quantize_stack(
    model: nn.Module, name: str, device: torch.device | None, **options: Any
) -> None:
    """Replaces a dense parameter. options: as for NF4Experts.from_dense."""
    module, _, attribute = name.rpartition(".")
    experts = model.get_submodule(module)
    weight = getattr(experts, attribute).detach()
    weight = weight if device is None else weight.to(device)
    put(
        experts,
        attribute,
        NF4Experts.from_dense(weight, transposed=experts.is_transposed, **options),
    )


def put(experts: Any, name: str, made: nn.Module) -> None:
    """In the place of a dense parameter."""
    delattr(experts, name)
    setattr(experts, name, made.train(experts.training))
    before = experts.config._experts_implementation
    if before != IMPLEMENTATION:  # layers share the config
        experts.before_4_bits = before
    experts.config._experts_implementation = IMPLEMENTATION


def make_dense(model: nn.Module, dense_of: Callable[[Any], Tensor]) -> list[str]:
    """Reverses quantize_stack for all stacks of a model, and returns their names. dense_of calls a
    stack's dequantize with a dtype."""
    made, configs = [], {}
    for path, experts in model.named_modules():
        for name in names_of(experts):
            stack = experts._modules.get(name)
            if not isinstance(stack, _STACKS):
                continue
            dense = dense_of(stack.dequantize)
            dense = dense.transpose(1, 2).contiguous() if experts.is_transposed else dense
            delattr(experts, name)
            experts.register_parameter(name, nn.Parameter(dense, requires_grad=False))
            before = vars(experts).pop("before_4_bits", None)
            known = configs.get(id(experts.config), (None, None))[1]
            configs[id(experts.config)] = experts.config, before or known
            made.append(f"{path}.{name}".lstrip("."))
    for config, before in configs.values():
        config._experts_implementation = before or "grouped_mm"
    for each in model.modules() if made else ():
        if "dense_conversions" in vars(each):
            each._weight_conversions = vars(each).pop("dense_conversions")
    return made


def save_as_stacks(model: Any) -> None:
    """For save_pretrained, which would take a stack apart into the matrices of a dense checkpoint:
    4-bit stacks, and dense ones beside them, are saved as they are."""
    from transformers import core_model_loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    names = [name for name, each in model.named_modules() if isinstance(each, NF4Experts)]
    conversions = getattr(model, "_weight_conversions", None)
    if "dense_conversions" not in vars(model):
        model.dense_conversions = conversions  # for make_dense
    if conversions is None:  # as save_pretrained does
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        prefixes = getattr(core_model_loading, "PrefixChange", ())  # an older one has none
        conversions = [each for each in conversions if not isinstance(each, prefixes)]

    def takes_apart(conversion: Any) -> bool:
        if not isinstance(conversion, core_model_loading.WeightConverter):
            return False
        back = [conversion.reverse_transform()]
        return any(core_model_loading.rename_source_key(name, [], back)[1] for name in names)

    model._weight_conversions = [each for each in conversions if not takes_apart(each)]


def _product(
    experts: nn.Module, name: str, x: Tensor, ends: Tensor, x_index: Tensor | None = None
) -> Tensor:
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    return getattr(experts, name)(x, ends, x_index, bias)


def _routing(
    top_k_index: Tensor, experts: int
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Of rows sorted by expert: the ends, the token of each, and what puts them back in the order
    of top_k_index, flat."""
    chosen, top_k = top_k_index.reshape(-1), top_k_index.shape[-1]
    every = torch.arange(experts, device=chosen.device, dtype=chosen.dtype)
    if not (torch.compiler.is_compiling() and chosen.shape[0] <= FEW):
        chosen, order = chosen.sort(stable=True)
        ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
        tokens = (order // top_k).int()
        return ends, tokens, lambda y: torch.empty_like(y).index_copy_(0, order, y)
    # Two small kernels of a compiler's, where a sort and a search are several launches each. A key
    # for each pair, all different: how many are below the first of each next expert, and of each.
    rows = chosen.shape[0]  # len() would fix it in an exported graph
    pairs = torch.arange(rows, device=chosen.device)
    keys = chosen.long() * rows + pairs
    bounds = torch.cat(((every.long() + 1) * rows, keys))
    ends, place = (keys < bounds[:, None]).sum(1, dtype=torch.int32).split((experts, rows))
    tokens = torch.where(place == pairs[:, None], pairs // top_k, 0).sum(1, dtype=torch.int32)
    return ends, tokens, lambda y: y[place]


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """For transformers' ALL_EXPERTS_FUNCTIONS: the outputs of the experts that each token was
    routed to, top_k_index [tokens, k], times top_k_weights, added up. No number is read on the
    host. Experts that are dense are computed by "grouped_mm"."""
    first, second = names_of(self)
    if not all(isinstance(getattr(self, name), _STACKS) for name in (first, second)):
        dense = sys.modules[MOE].grouped_mm_experts_forward
        return dense(self, hidden_states, top_k_index, top_k_weights)
    ends, tokens, in_order = _routing(top_k_index, self.num_experts)
    others = None
    # Parallel ranks number the experts of others as those behind their own: rows without one.
    if getattr(self, "_is_expert_parallel", False):
        rows = torch.arange(tokens.shape[0], device=ends.device)
        others = (rows >= ends[-1]).unsqueeze(-1)

    def specified(y: Tensor) -> Tensor:
        return y if others is None else y.masked_fill(others, 0)

    y = specified(_product(self, first, hidden_states, ends, tokens))
    y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
    y = specified(_product(self, second, y, ends))
    if getattr(self, "has_post_expert_norm", False):
        y = self.post_expert_norm(y)
    # Back in the order of tokens, where those of one token are added up in a fixed order.
    y = in_order(y).view(*top_k_index.shape, y.shape[-1])
    return (y * top_k_weights.unsqueeze(-1)).sum(dim=-2).to(hidden_states.dtype)
