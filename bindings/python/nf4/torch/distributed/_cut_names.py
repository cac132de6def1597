"""named_by_cut: makes a state_dict of a model with cut layers (tensor parallelism) that
torch.distributed.checkpoint saves and loads completely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nf4.errors import InvalidArgument, kind_of, shown
from nf4.torch.distributed._cuts import AXES
from nf4.torch.distributed._names import in_state_dict
from nf4.torch.distributed._parallel_adapter import base_of
from nf4.torch.modules.base import CutOf


def named_by_cut(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors of a state_dict of the model, or of an optimizer's as
    torch.distributed.checkpoint.state_dict makes it (not flattened). The names of tensors of cut
    layers say which rows or columns this rank has:

        "up_proj.weight" is "up_proj.weight[rows 0:14336 of 28672]"

    Otherwise all ranks' parts would have one name, and torch.distributed.checkpoint would take them
    for copies of one tensor. Pass the result to its save and load. load fills the tensors and the
    optimizer's numbers in place; then pass the original state_dict to load_state_dict. A saved
    state loads into layers that are cut in the same way; for other cuts the error names the first
    tensor that is missing.

    Raises InvalidArgument, also for a name that this model does not have.
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
                f"state has {shown(key)}, which is not a name in the model; expected its "
                f"state_dict, or what get_optimizer_state_dict makes"
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
    """Returns the prefixes of the names of cut layers, and which parts these layers have."""
    cuts = {}
    for name, module in _unwrapped(model).named_modules():
        base = base_of(module)
        if base is not None and base.cut_of is not None:
            layer = in_state_dict(name)
            cuts[f"{layer}." if layer else ""] = _shown(base.cut_of)
    return cuts


def _first_parts(model: nn.Module) -> set[str]:
    """Returns the first parts of the model's names."""
    inner = _unwrapped(model)
    names = [name for name, _ in inner.named_modules()]
    names += [name for name, _ in inner.named_parameters()]
    names += [name for name, _ in inner.named_buffers()]
    return {in_state_dict(name).partition(".")[0] for name in names}


def _shown(cut: CutOf) -> str:
    ranges = ", ".join(f"{begin}:{end}" for begin, end in cut.ranges)
    return f"[{AXES[cut.dim]} {ranges} of {cut.shape[cut.dim]}]"
