"""Checks that all ranks have the same layers and succeeded, when a model is sharded, cut or loaded.
Ranks with different layers would wait for messages of another size, or multiply by another layer's
weights. If one rank failed, the others would wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from nf4.errors import InvalidArgument
from nf4.torch.modules.base import QuantizedModule

_T = TypeVar("_T")


def spec_of(layer: QuantizedModule) -> str:
    """Returns what a layer must have in common with the same layer on other ranks."""
    parts = layer.sharded_parts().values()
    dtypes = [str(getattr(getattr(layer, name), "dtype", None)) for name in parts]
    return f"{type(layer).__name__} {tuple(layer.spec)} of {', '.join(dtypes)}"


def layers_of(
    modules: Iterable[nn.Module], params: Iterable[nn.Parameter]
) -> dict[str, QuantizedModule]:
    """Returns, by name, the layers within the modules that have parts among params."""
    wanted = set(map(id, params))
    return {
        name: layer
        for module in modules
        for name, layer in module.named_modules()
        if isinstance(layer, QuantizedModule)
        and any(id(getattr(layer, part)) in wanted for part in layer.sharded_parts().values())
    }


def require_agreement(specs: Mapping[str, str], mesh: Any) -> None:
    """Raises InvalidArgument on every rank of a DeviceMesh if one rank has other layers. The
    message names the first layer that differs and the ranks. Every rank must call this."""
    _require_alike(gathered(specs, mesh))


def agreed(
    work: Callable[[], tuple[_T, str]],
    error: Callable[[str], Exception] = InvalidArgument,
    name: str = "the layer",
    mesh: Any = None,
) -> _T:
    """Runs `work` on every rank of a DeviceMesh, or of the world, and returns its first result. Its
    second result describes what this rank has of `name`, and must be the same on all ranks. If a
    rank fails it raises its own exception; the others raise `error`, which says which rank failed
    and how, or what differs. Without it they would wait in the next collective."""
    result: Any = None
    own: Exception | None = None
    said = ""
    try:
        result, said = work()
    except Exception as raised:  # the type matters only to this rank
        own = raised
    failed = None if own is None else f"{type(own).__name__}: {own}"
    found = gathered((said, failed), mesh)
    if own is not None:
        raise own
    for rank, (_, reason) in found:
        if reason is not None:
            raise error(f"{name}: rank {rank} failed: {reason}")
    _require_alike([(rank, {name: each}) for rank, (each, _) in found], error)
    return result


def gathered(said: _T, mesh: Any = None) -> list[tuple[int, _T]]:
    """Returns what each rank of the mesh, or of the world, says, with its number; only this rank's
    if nothing is distributed."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [(0, said)]
    groups = [None] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]
    found: list[tuple[int, _T]] = [(dist.get_rank(), said)]
    for group in groups:
        lists: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(lists, found, group=group)
        found = [each for part in lists for each in part]
    return found


def _require_alike(
    found: list[tuple[int, Mapping[str, str]]],
    error: Callable[[str], Exception] = InvalidArgument,
) -> None:
    first, expected = found[0]
    for rank, said in found[1:]:
        for name in [*expected, *(name for name in said if name not in expected)]:
            if said.get(name) != expected.get(name):
                raise error(
                    f"ranks disagree about {name or 'the layer'}: rank {first} has "
                    f"{expected.get(name, 'none')}, rank {rank} has {said.get(name, 'none')}"
                )
