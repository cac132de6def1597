"""Whether the ranks of a mesh have the same quantized layers: asked once, when a model is sharded.
Ranks that differ would wait for bytes of another size, or multiply by another's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from nf4.errors import InvalidArgument
from nf4.torch.modules import QuantizedLinear


def spec_of(layer: QuantizedLinear) -> str:
    """What layers of other ranks must have in common with this one."""
    parts = layer.sharded_parts().values()
    dtypes = [str(getattr(getattr(layer, name), "dtype", None)) for name in parts]
    return f"{type(layer).__name__} {tuple(layer.spec)} of {', '.join(dtypes)}"


def layers_of(
    modules: Iterable[nn.Module], params: Iterable[nn.Parameter]
) -> dict[str, QuantizedLinear]:
    """By their names, the layers within the modules whose parts are among params."""
    wanted = set(map(id, params))
    return {
        name: layer
        for module in modules
        for name, layer in module.named_modules()
        if isinstance(layer, QuantizedLinear)
        and any(id(getattr(layer, part)) in wanted for part in layer.sharded_parts().values())
    }


def require_agreement(specs: Mapping[str, str], mesh: Any) -> None:
    """Raises InvalidArgument on every rank of a DeviceMesh where one has other layers, with the
    first that differs and the ranks. Every rank must call this."""
    import torch.distributed as dist

    gathered: list[tuple[int, Mapping[str, str]]] = [(dist.get_rank(), specs)]
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        lists: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(lists, gathered, group=group)
        gathered = [each for found in lists for each in found]
    first, expected = gathered[0]
    for rank, found in gathered[1:]:
        for name in [*expected, *(name for name in found if name not in expected)]:
            if found.get(name) != expected.get(name):
                raise InvalidArgument(
                    f"ranks disagree about {name or 'the layer'}: rank {first} has "
                    f"{expected.get(name, 'none')}, rank {rank} has {found.get(name, 'none')}"
                )
