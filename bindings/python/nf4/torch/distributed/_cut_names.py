"""named_by_cut: a state_dict that torch.distributed.checkpoint saves and loads whole, of a model
with layers that are cut for tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from nf4.errors import InvalidArgument, kind_of
from nf4.torch.distributed._cuts import AXES, CutOf
from nf4.torch.distributed._parallel_adapter import base_of


def named_by_cut(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors as in a state_dict of the model, or of an optimizer as
    torch.distributed.checkpoint.state_dict makes it, with the rows or columns that this rank has in
    the names of what belongs to layers that are cut:

        "up_proj.weight" is "up_proj.weight[rows 0:14336 of 28672]"

    Else every rank's part would have one name, and torch.distributed.checkpoint takes those for
    copies of one tensor. Give this to its save and load, which fills the tensors in place, and the
    state itself to load_state_dict. What was saved loads into layers that are cut in the same way;
    of others the error names the first that is missing. Raises InvalidArgument.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is {kind_of(model)}; expected a torch.nn.Module")
    if not isinstance(state, Mapping):
        raise InvalidArgument(f"state is {kind_of(state)}; expected a state_dict")
    cuts = {}
    for name, module in model.named_modules():
        base = base_of(module)
        if base is not None and base.cut_of is not None:
            cuts[f"{name}."] = _shown(base.cut_of)
    return _renamed(state, cuts)


def _shown(cut: CutOf) -> str:
    ranges = ", ".join(f"{begin}:{end}" for begin, end in cut.ranges)
    return f"[{AXES[cut.dim]} {ranges} of {cut.shape[cut.dim]}]"


def _renamed(state: Mapping[str, Any], cuts: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        cut = next((cut for name, cut in cuts.items() if str(key).startswith(name)), "")
        if not cut and isinstance(value, Mapping):  # "state" and "param_groups" of an optimizer
            value = _renamed(value, cuts)
        found[f"{key}{cut}" if cut else key] = value
    return found
