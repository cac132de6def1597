"""prepare: makes quantized layers ready for FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from nf4.errors import InvalidArgument, kind_of
from nf4.torch.modules.base import QuantizedModule
from nf4.torch.modules.frozen_part import FrozenPart


def prepare(model: nn.Module) -> list[str]:
    """Prepares all NF4Linear, NF4Experts, Int4Linear and Int4Experts in a model for fully_shard:
    codes and scales become tensors that look like frozen floats. fully_shard does this by itself
    where nf4.torch is imported. Results and state_dict do not change; the state_dict of a sharded
    layer has DTensors under the same keys.

    Returns the names of the layers that were prepared. Raises InvalidArgument.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is {kind_of(model)}; expected a torch.nn.Module")
    names = {layer: name for name, layer in model.named_modules()}
    return [names[layer] for layer in prepare_layers(names)]


def prepare_layers(
    modules: Iterable[nn.Module], ignored: Iterable[nn.Parameter] = ()
) -> list[QuantizedModule]:
    """Prepares those of the modules that are quantized layers and have no ignored parts, and
    returns them."""
    left_alone, made = {id(each) for each in ignored}, {}
    prepared = []
    for layer in modules:
        if not isinstance(layer, QuantizedModule) or layer.is_prepared():
            continue
        names = layer.sharded_parts().values()
        parts = {name: getattr(layer, name) for name in names}
        if not left_alone.isdisjoint(map(id, parts.values())):
            continue
        for name, part in parts.items():
            _replace(layer, name, part, made)
        layer.forget()
        prepared.append(layer)
    return prepared


def _replace(
    layer: QuantizedModule, name: str, part: Tensor, made: dict[int, nn.Parameter]
) -> None:
    """Replaces a layer's tensors by FrozenParts. `made`: the parts by their tensors, which layers
    may share."""
    if id(part) not in made:
        made[id(part)] = nn.Parameter(FrozenPart(part.detach()), requires_grad=False)
    owner = layer._buffers if name in layer._buffers else layer._parameters
    owner[name] = made[id(part)]


@contextlib.contextmanager
def buffers_as_parameters(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which the parts that are buffers of these modules are parameters too, because
    FSDP2 collects parameters. Outside of it no name changes, on which FSDP2 relies."""
    listed = [
        (layer._parameters, name, part)
        for layer in modules
        if isinstance(layer, QuantizedModule)
        for name, part in layer._buffers.items()
        if isinstance(part, FrozenPart)
    ]
    for parameters, name, part in listed:
        parameters[name] = part
    try:
        yield
    finally:
        for parameters, name, _ in listed:
            parameters.pop(name, None)
