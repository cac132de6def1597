"""named_by_cut: a state_dict that torch.distributed.checkpoint saves and loads whole, of a model
with layers that are cut for tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nf4.errors import InvalidArgument, kind_of, shown
from nf4.torch.distributed._cuts import AXES, CutOf
from nf4.torch.distributed._names import in_state_dict
from nf4.torch.distributed._parallel_adapter import base_of


def named_by_cut(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors as in a state_dict of the model, or of an optimizer as
    torch.distributed.checkpoint.state_dict makes it (not flattened), with the rows or columns that
    this rank has in the names of what belongs to layers that are cut:

        "up_proj.weight" is "up_proj.weight[rows 0:14336 of 28672]"

    Else every rank's part would have one name, and torch.distributed.checkpoint takes those for
    copies of one tensor. Give this to its save and load, which fills the tensors and the
    optimizer's numbers in place, and the state itself to load_state_dict. What was saved loads into
    layers that are cut in the same way; of others the error names the first that is missing.

    Raises InvalidArgument, also for a name that is not of this model.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is {kind_of(model)}; expected a torch.nn.Module")
    if not isinstance(state, Mapping):
        raise InvalidArgument(f"state is {kind_of(state)}; expected a state_dict")
    cuts = _cuts(model)
    if not cuts:
        return dict(state)
    prefix = "module." if isinstance(model, DistributedDataParallel) else ""
    own = {"_extra_state", *_first_parts(model)}

    def named(key: object) -> Any:
        name = in_state_dict(str(key)).removeprefix(prefix)
        if name.partition(".")[0] not in own:
            raise InvalidArgument(
                f"state has {shown(key)}, which is no name of the model; expected its state_dict, "
                f"or what get_optimizer_state_dict makes"
            )
        cut = next((cut for layer, cut in cuts.items() if name.startswith(layer)), "")
        return f"{key}{cut}" if cut else key

    of_optimizer = state.get("state")
    if isinstance(of_optimizer, Mapping):
        return {**state, "state": {named(key): each for key, each in of_optimizer.items()}}
    return {named(key): each for key, each in state.items()}


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _cuts(model: nn.Module) -> dict[str, str]:
    """What the names of cut layers begin with, and which parts these are."""
    cuts = {}
    for name, module in _unwrapped(model).named_modules():
        base = base_of(module)
        if base is not None and base.cut_of is not None:
            layer = in_state_dict(name)
            cuts[f"{layer}." if layer else ""] = _shown(base.cut_of)
    return cuts


def _first_parts(model: nn.Module) -> set[str]:
    """Of the model's names."""
    inner = _unwrapped(model)
    names = [name for name, _ in inner.named_modules()]
    names += [name for name, _ in inner.named_parameters()]
    names += [name for name, _ in inner.named_buffers()]
    return {in_state_dict(name).partition(".")[0] for name in names}


def _shown(cut: CutOf) -> str:
    ranges = ", ".join(f"{begin}:{end}" for begin, end in cut.ranges)
    return f"[{AXES[cut.dim]} {ranges} of {cut.shape[cut.dim]}]"
