"""Finds the siblings of a model (modules/siblings.py) by the names of layers in one parent. The
parent's forward must not write to x between their calls. Classes of transformers do not; others are
unknown.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

from nf4.torch.modules import QuantizedLinear
from nf4.torch.modules.siblings import Siblings

# The names in transformers' attentions and MLPs.
_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
# Arguments of an attention's forward that k and v may be computed from instead of q's input.
_OTHER_INPUTS = {
    "context",
    "cross_attention_states",
    "encoder_hidden_states",
    "key",
    "key_states",
    "key_value_states",
    "kv",
    "latents",
    "memory",
    "value",
}


def separate(model: nn.Module) -> None:
    """Separates all siblings of a model."""
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            layer._siblings = layer._place = layer._group = layer._member = None


def join(model: nn.Module, *, unknown: bool = False) -> None:
    """Groups the siblings of a model anew. unknown: also in parents whose class is not of
    transformers."""
    separate(model)
    for parent in model.modules():
        for layers in _siblings_in(parent, unknown):
            group = Siblings(len(layers))
            for place, layer in enumerate(layers):
                layer._siblings = (group, place)
                group.join(place, layer)


def _is_known(parent: nn.Module) -> bool:
    """Tells if its class and its forward are those of transformers, neither derived nor patched."""
    sources = (type(parent).__module__, getattr(parent.forward, "__module__", None) or "")
    return all(source.startswith("transformers.models.") for source in sources)


def _siblings_in(parent: nn.Module, unknown: bool) -> Iterator[list[QuantizedLinear]]:
    if not (unknown or _is_known(parent)):
        return
    for names in _NAMES:
        children = [getattr(parent, name, None) for name in names]
        # PEFT's adapters hold the layer that they adapt.
        found = (
            getattr(child, "base_layer", child)
            if unknown or type(child).__module__.startswith("peft.")
            else child
            for child in children
        )
        layers = [each for each in found if isinstance(each, QuantizedLinear)]
        alike = {(type(each), each.in_features) for each in layers}
        distinct = len(set(layers)) == len(layers) > 1
        if distinct and len(alike) == 1 and _has_one_input(parent):
            yield layers


def _has_one_input(parent: nn.Module) -> bool:
    names = inspect.signature(type(parent).forward).parameters
    return _OTHER_INPUTS.isdisjoint(names)
