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
FEW = 64  # up to this many rows a compiled graph compares all pairs instead of sorting
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
    """Puts 4-bit experts in the place of a dense parameter."""
    delattr(experts, name)
    setattr(experts, name, made.train(experts.training))
    # PEFT nests its adapters in the order of the parameters, whatever the order of the checkpoint.
    for stack in names_of(experts):
        if stack in experts._modules:
            experts._modules[stack] = experts._modules.pop(stack)
    before = experts.config._experts_implementation
    if before != IMPLEMENTATION:  # layers share the config
        experts.before_4_bits = before
    experts.config._experts_implementation = IMPLEMENTATION


def make_dense(model: nn.Module, dense_of: Callable[[Any], Tensor]) -> list[str]:
    """Undoes quantize_stack for all stacks of a model, and returns their names. dense_of calls a
    stack's dequantize with the wanted dtype."""
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
    """Makes save_pretrained save 4-bit stacks, and dense ones beside them, as they are. It would
    otherwise split a stack into the matrices of a dense checkpoint."""
    from transformers import core_model_loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    names = [name for name, each in model.named_modules() if isinstance(each, NF4Experts)]
    conversions = getattr(model, "_weight_conversions", None)
    if "dense_conversions" not in vars(model):
        model.dense_conversions = conversions  # make_dense reads it
    if conversions is None:  # save_pretrained does the same
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
    """Sorts the pairs of token and expert by expert. Returns where the rows of each expert end, the
    token of each row, and a function that restores the order of the flat top_k_index."""
    chosen, top_k = top_k_index.reshape(-1), top_k_index.shape[-1]
    every = torch.arange(experts, device=chosen.device, dtype=chosen.dtype)
    if not (torch.compiler.is_compiling() and chosen.shape[0] <= FEW):
        chosen, order = chosen.sort(stable=True)
        ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
        tokens = (order // top_k).int()
        return ends, tokens, lambda y: torch.empty_like(y).index_copy_(0, order, y)
    # The compiler makes two small kernels of this; a sort and a search are several launches each.
    # Each pair has a unique key. The code counts the keys below each expert's end, and below each
    # key.
    rows = chosen.shape[0]  # len() would make it a constant in an exported graph
    pairs = torch.arange(rows, device=chosen.device)
    keys = chosen.long() * rows + pairs
    bounds = torch.cat(((every.long() + 1) * rows, keys))
    ends, place = (keys < bounds[:, None]).sum(1, dtype=torch.int32).split((experts, rows))
    tokens = torch.where(place == pairs[:, None], pairs // top_k, 0).sum(1, dtype=torch.int32)
    return ends, tokens, lambda y: y[place]


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The function for transformers' ALL_EXPERTS_FUNCTIONS: sums the outputs of the experts that
    each token is routed to, top_k_index [tokens, k], weighted by top_k_weights. The host reads no
    value. "grouped_mm" computes dense experts."""
    first, second = names_of(self)
    if not all(isinstance(getattr(self, name), _STACKS) for name in (first, second)):
        dense = sys.modules[MOE].grouped_mm_experts_forward
        return dense(self, hidden_states, top_k_index, top_k_weights)
    ends, tokens, in_order = _routing(top_k_index, self.num_experts)
    others = None
    # Expert parallelism gives rows of other ranks' experts indices past the rank's own.
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
    # Restores the order of tokens, so that the rows of a token are added in a fixed order.
    y = in_order(y).view(*top_k_index.shape, y.shape[-1])
    return (y * top_k_weights.unsqueeze(-1)).sum(dim=-2).to(hidden_states.dtype)
