"""Whether the ranks of a mesh have the same quantized layers: asked once, when a model is sharded.
Ranks that differ would wait for bytes of another size, or multiply by another's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from nf4.errors import InvalidArgument
from nf4.torch.modules.base import QuantizedModule

_T = TypeVar("_T")


def spec_of(layer: QuantizedModule) -> str:
    """What layers of other ranks must have in common with this one."""
    parts = layer.sharded_parts().values()
    dtypes = [str(getattr(getattr(layer, name), "dtype", None)) for name in parts]
    return f"{type(layer).__name__} {tuple(layer.spec)} of {', '.join(dtypes)}"


def layers_of(
    modules: Iterable[nn.Module], params: Iterable[nn.Parameter]
) -> dict[str, QuantizedModule]:
    """By their names, the layers within the modules whose parts are among params."""
    wanted = set(map(id, params))
    return {
        name: layer
        for module in modules
        for name, layer in module.named_modules()
        if isinstance(layer, QuantizedModule)
        and any(id(getattr(layer, part)) in wanted for part in layer.sharded_parts().values())
    }


def require_agreement(specs: Mapping[str, str], mesh: Any) -> None:
    """Raises InvalidArgument on every rank of a DeviceMesh where one has other layers, with the
    first that differs and the ranks. Every rank must call this."""
    _require_alike(_gathered(specs, mesh))


def agreed(name: str, work: Callable[[], tuple[_T, str]], mesh: Any) -> _T:
    """The first result of `work`, once it has worked on every rank of a DeviceMesh and the second,
    which says what this rank has, is the same there. Else its own exception where it failed, and on
    other ranks InvalidArgument that names a rank that did, or one that has something else."""
    result: Any = None
    error: Exception | None = None
    said = ""
    try:
        result, said = work()
    except Exception as raised:  # the others would wait for this rank
        error = raised
    failed = None if error is None else f"{type(error).__name__}: {error}"
    found = _gathered((said, failed), mesh)
    if error is not None:
        raise error
    for rank, (_, reason) in found:
        if reason is not None:
            raise InvalidArgument(f"{name or 'the layer'}: rank {rank} failed: {reason}")
    _require_alike([(rank, {name: each}) for rank, (each, _) in found])
    return result


def _gathered(said: _T, mesh: Any) -> list[tuple[int, _T]]:
    """What each rank of the mesh says, with its number."""
    import torch.distributed as dist

    gathered: list[tuple[int, _T]] = [(dist.get_rank(), said)]
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        lists: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(lists, gathered, group=group)
        gathered = [each for found in lists for each in found]
    return gathered


def _require_alike(gathered: list[tuple[int, Mapping[str, str]]]) -> None:
    first, expected = gathered[0]
    for rank, found in gathered[1:]:
        for name in [*expected, *(name for name in found if name not in expected)]:
            if found.get(name) != expected.get(name):
                raise InvalidArgument(
                    f"ranks disagree about {name or 'the layer'}: rank {first} has "
                    f"{expected.get(name, 'none')}, rank {rank} has {found.get(name, 'none')}"
                )
