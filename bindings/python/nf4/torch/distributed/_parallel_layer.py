"""Cuts a quantized layer to one rank's part of its weight, and handles x and y around its forward
pass. A part is bit-equal to the same rows or columns of the whole (_cuts.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from nf4.errors import InvalidArgument, shown
from nf4.torch.distributed._cut_weight import cut
from nf4.torch.distributed._cuts import AXES, Ranges
from nf4.torch.modules import NF4Linear, QuantizedLinear
from nf4.torch.modules.base import CutOf

Layouts = tuple[Placement, ...]
_WHOLE: Layouts = (Replicate(),)
_PARTIAL: Layouts = (Partial(),)
LAST: Layouts = (Shard(-1),)


# ---- Cutting a layer -------------------------------------------------------------------


def share(extent: int, mesh: DeviceMesh, sections: tuple[int, ...] | None = None) -> Ranges | None:
    """Returns this rank's share of the rows or columns of each section; None if equal shares do not
    exist."""
    world, rank = mesh.size(), mesh.get_local_rank()
    sections = (extent,) if sections is None else sections
    if any(size % world or size < world for size in sections):
        return None
    found, begin = [], 0
    for size in sections:
        part = size // world
        found.append((begin + rank * part, begin + (rank + 1) * part))
        begin += size
    return found


def part_of(
    layer: QuantizedLinear, mesh: DeviceMesh, dim: int, sections: tuple[int, ...] | None = None
) -> tuple[Ranges, Any]:
    """Returns this rank's rows (dim 0) or columns (dim 1), and their weight. The layer stays as it
    is. Raises InvalidArgument."""
    parts = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    if any(isinstance(part, DTensor) for part in parts):
        raise InvalidArgument(
            "layer is sharded already; expected a whole one: parallelize_module first, then "
            "fully_shard over another dimension of the mesh"
        )
    spec, extent = layer.spec, (layer.out_features, layer.in_features)[dim]
    if sections is not None and sum(sections) != extent:
        raise InvalidArgument(
            f"sections is {shown(sections)}, {sum(sections)} in all; expected the layer's {extent} "
            f"rows"
        )
    ranges = share(extent, mesh, sections)
    no_cut = f"the {AXES[dim]} of {type(layer).__name__}({_named(spec)}) have no cut for a world "
    no_cut += f"size of {mesh.size()}"
    if ranges is None:
        of = extent if sections is None else f"each of {sections}"
        raise InvalidArgument(f"{no_cut}: it does not divide {of}")
    try:
        return ranges, cut(layer.quantized, dim, ranges)
    except InvalidArgument as error:
        raise InvalidArgument(f"{no_cut}: {error}") from None


def keep(layer: QuantizedLinear, dim: int, ranges: Ranges, part: Any) -> None:
    """Gives the layer its part, with the bias of its rows."""
    layer.cut_of = CutOf((layer.out_features, layer.in_features), dim, ranges)
    layer.tensor_parallel = dim
    if isinstance(layer, NF4Linear):
        layer._take_weight(part)
    else:
        layer.adopt(part)
    bias = layer.bias
    if dim == 0 and bias is not None:
        pieces = [bias.detach()[begin:end] for begin, end in ranges]
        layer.bias = nn.Parameter(torch.cat(pieces), bias.requires_grad)


def _named(spec: Any) -> str:
    names = ("shape", "format", "layout", "blocksize", "nested_blocksize", "group_size")
    return ", ".join(f"{name} {getattr(spec, name)}" for name in names if hasattr(spec, name))


def about(layer: QuantizedLinear, bytes_too: bool) -> str:
    """Returns what ranks must have in common, because each computes with a part of its own layer.
    Waits for the GPU if that includes the bytes."""
    said = f"{type(layer).__name__}({_named(layer.spec)}, bias {layer.bias is not None})"
    tensors = [part for part in layer.parts().tensors if part is not None]
    if bytes_too and not any(part.is_meta for part in tensors):
        said += f" with bytes that add up to {[_sums(part) for part in tensors]}"
    return said


def _sums(part: Tensor) -> int:
    """Sums all bytes, and again a subset, which detects another order."""
    stored = part.detach().reshape(-1).view(torch.uint8)
    return int(stored.sum(dtype=torch.int64) + (stored[::7].sum(dtype=torch.int64) << 40))


# ---- x and y ---------------------------------------------------------------------------


def _distributed(tensor: Tensor, mesh: DeviceMesh, layouts: Layouts) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, layouts, run_check=False)


def _in_layouts(tensor: Tensor, layouts: Layouts) -> Tensor:
    if tensor.placements == layouts:
        return tensor
    return tensor.redistribute(placements=layouts, async_op=True)


def _has_grad(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def input_of(
    layouts: Layouts, desired: Layouts, mesh: DeviceMesh, _layer: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    """A forward_pre_hook: makes x the plain tensor that this rank multiplies. The gradient of a
    whole x is summed over the ranks. An x that needs no change stays the same tensor object, by
    which siblings recognise it."""
    x, *rest = args
    plain = not isinstance(x, DTensor) and layouts == desired
    if plain and not (desired == _WHOLE and _has_grad(x)):
        return args
    x = _in_layouts(_distributed(x, mesh, layouts), desired)
    grads = _PARTIAL if desired == _WHOLE else None
    return x.to_local(grad_placements=grads), *rest


def output_of(
    layouts: Layouts, local: bool, mesh: DeviceMesh, _layer: nn.Module, _args: Any, y: Tensor
) -> Tensor:
    """A forward_hook: converts y, of which this rank has columns, to the requested layouts."""
    if local and layouts == LAST:
        return y
    y = _in_layouts(_distributed(y, mesh, LAST), layouts)
    return y.to_local() if local else y


def sum_of(
    layouts: Layouts, local: bool, mesh: DeviceMesh, layer: nn.Module, _args: Any, y: Tensor
) -> Tensor:
    """A forward_hook: sums y over the ranks in its dtype, converts it to the requested layouts, and
    adds the bias once."""
    base = getattr(layer, "base_layer", layer)
    bias = base.bias
    bias = None if bias is None else bias.to(y.dtype)
    if local and layouts == _WHOLE and not _has_grad(y):
        torch.distributed.all_reduce(y, group=mesh.get_group())
        return y if bias is None else y + bias
    y = _in_layouts(_distributed(y, mesh, _PARTIAL), layouts)
    if bias is not None:
        y = y + _distributed(bias, mesh, _WHOLE)
    return y.to_local() if local else y
