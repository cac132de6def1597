"""Experts of transformers' models in 4 bits.

transformers stacks the experts of a layer in parameters of three dimensions, and multiplies them as
config._experts_implementation says. Here such a parameter becomes an NF4Experts of the same name,
and "nf4" names what multiplies with it: registered as soon as transformers.integrations.moe is
loaded.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from nf4.checkpoint.stacks import names_of
from nf4.torch._import_watch import ImportWatch
from nf4.torch.modules.nf4_experts import NF4Experts

IMPLEMENTATION = "nf4"
_MOE = "transformers.integrations.moe"


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


def put(experts: Any, name: str, made: NF4Experts) -> None:
    """In the place of a dense parameter."""
    delattr(experts, name)
    setattr(experts, name, made.train(experts.training))
    experts.config._experts_implementation = IMPLEMENTATION


def save_as_stacks(model: Any) -> None:
    """For save_pretrained, which would take a stack apart into the matrices of a dense checkpoint:
    4-bit stacks, and dense ones beside them, are saved as they are."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, apply_converters

    names = [name for name, each in model.named_modules() if isinstance(each, NF4Experts)]
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # as save_pretrained does
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [each for each in conversions if not isinstance(each, PrefixChange)]

    def takes_apart(conversion: Any) -> bool:
        if not isinstance(conversion, WeightConverter):
            return False
        back = [conversion.reverse_transform()]
        return any(apply_converters(name, back)[1] is not None for name in names)

    model._weight_conversions = [each for each in conversions if not takes_apart(each)]


def _product(
    experts: nn.Module, name: str, x: Tensor, ends: Tensor, x_index: Tensor | None = None
) -> Tensor:
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    return getattr(experts, name)(x, ends, x_index, bias)


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """For transformers' ALL_EXPERTS_FUNCTIONS: the outputs of the experts that each token was
    routed to, top_k_index [tokens, k], times top_k_weights, added up. No number is read on the
    host. Experts that are dense are computed by "grouped_mm"."""
    first, second = names_of(self)
    if not all(isinstance(getattr(self, name), NF4Experts) for name in (first, second)):
        dense = sys.modules[_MOE].grouped_mm_experts_forward
        return dense(self, hidden_states, top_k_index, top_k_weights)
    top_k = top_k_index.shape[-1]
    chosen, order = top_k_index.reshape(-1).sort(stable=True)
    experts = torch.arange(self.num_experts, device=chosen.device, dtype=chosen.dtype)
    # Parallel ranks number the experts of others as those behind their own: rows without one.
    ends = torch.searchsorted(chosen, experts, right=True, out_int32=True)
    others = None
    if getattr(self, "_is_expert_parallel", False):
        others = (chosen >= self.num_experts).unsqueeze(-1)

    def specified(y: Tensor) -> Tensor:
        return y if others is None else y.masked_fill(others, 0)

    y = specified(_product(self, first, hidden_states, ends, (order // top_k).int()))
    y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
    y = specified(_product(self, second, y, ends))
    if getattr(self, "has_post_expert_norm", False):
        y = self.post_expert_norm(y)
    # Back in the order of tokens, where those of one token are added up in a fixed order.
    y = torch.empty_like(y).index_copy_(0, order, y).view(*top_k_index.shape, y.shape[-1])
    return (y * top_k_weights.unsqueeze(-1)).sum(dim=-2).to(hidden_states.dtype)


def _loaded(name: str) -> None:
    """Never raises: whoever imports transformers would get it."""
    try:
        sys.modules[name].ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    except Exception as error:
        warnings.warn(f"libnf4 does not serve transformers' experts: {error!r}", stacklevel=2)


_watch = ImportWatch((_MOE,), _loaded)


def register() -> None:
    """Now or as soon as transformers' experts are loaded; a second call changes nothing."""
    _watch.start()
