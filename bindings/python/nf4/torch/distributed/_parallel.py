"""Styles for torch.distributed.tensor.parallel.parallelize_module."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import style

from nf4 import _convert
from nf4.errors import InvalidArgument, kind_of
from nf4.torch.distributed import _parallel_adapter
from nf4.torch.distributed._agreement import agreed
from nf4.torch.distributed._cuts import Ranges
from nf4.torch.distributed._parallel_layer import (
    LAST,
    about,
    input_of,
    keep,
    output_of,
    part_of,
    sum_of,
)
from nf4.torch.modules import QuantizedLinear
from nf4.torch.modules.base import QuantizedModule


class _Parallel:
    """The common part of both styles for quantized layers. torch's own style handles other
    modules."""

    dim: int
    sections: tuple[int, ...] | None = None
    layer_name = ""  # for errors; plan_of sets it
    _desired: tuple[Placement, ...]
    _after: Any  # the forward hook

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        base = _parallel_adapter.base_of(module)
        if base is None:
            if isinstance(module, QuantizedModule):
                raise InvalidArgument(
                    f"{type(self).__name__} is given for {type(module).__name__}; expected no "
                    f"style for experts, which are whole on every rank"
                )
            if self.sections is not None:
                raise InvalidArgument("sections is given; expected None for layers of torch")
            return super()._apply(module, device_mesh)
        work = functools.partial(self._part_of, module, base, device_mesh)
        ranges, part = agreed(work, name=self.layer_name or "the layer", mesh=device_mesh)
        keep(base, self.dim, ranges, part)
        before = functools.partial(input_of, self.input_layouts, self._desired, device_mesh)
        after = functools.partial(
            self._after, self.output_layouts, self.use_local_output, device_mesh
        )
        if base is not module:
            _parallel_adapter.cut_adapters(
                module, device_mesh, self.dim, ranges, self.src_data_rank
            )
            _parallel_adapter.hook_base(module, base, before, after)
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module

    def _part_of(
        self, module: nn.Module, base: QuantizedLinear, mesh: DeviceMesh
    ) -> tuple[tuple[Ranges, Any], str]:
        """Returns this rank's part, and what ranks must have in common. Nothing is changed yet."""
        if base.tensor_parallel is not None:
            raise InvalidArgument("layer is cut already; expected a whole one")
        found = part_of(base, mesh, self.dim, self.sections)
        said = about(base, bytes_too=self.src_data_rank is not None)
        if base is not module:
            _parallel_adapter.require_served(module)
            said += _parallel_adapter.about(module)
        return found, said


class ColwiseParallel(_Parallel, style.ColwiseParallel):
    """Each rank has an equal share of a layer's rows, out_features / world size, and of its bias;
    its y has as many columns. For NF4Linear and Int4Linear, and PEFT's LoRA layers around them.
    torch's style cuts other modules.

    input_layouts, output_layouts, use_local_output
              as in torch.distributed.tensor.parallel.ColwiseParallel
    sections  the out_features of projections that are fused in one layer, such as q, k and v. Each
              of them is cut, and y holds the shares one after another. y must then be Shard(-1) and
              a plain tensor

    The layer keeps its class and gets the part's shape: its weight and scales are plain tensors,
    and the other ranks' parts are freed. Every rank must have the same weight; this is checked
    unless parallelize_module has src_data_rank=None. Applying the style raises InvalidArgument if
    ranks differ, or if no cut exists: each share must begin and end at a block of the weight
    (docs/several-gpus).
    """

    dim = 0
    _desired = (Replicate(),)
    _after = staticmethod(output_of)

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        sections: Iterable[int] | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        if sections is not None:
            self.sections = tuple(_convert.count("sections", each) for each in sections)
            if self.output_layouts != LAST or not use_local_output:
                raise InvalidArgument(
                    "sections is given; expected output_layouts Shard(-1) and use_local_output, as "
                    "the columns of y are not those of the whole layer in order"
                )


class RowwiseParallel(_Parallel, style.RowwiseParallel):
    """Each rank has an equal share of a layer's columns, in_features / world size, and gets the
    same share of x. The products are summed over the ranks in the dtype of y, and the bias is added
    once. Layers and errors are as in ColwiseParallel.

    input_layouts, output_layouts, use_local_output
              as in torch.distributed.tensor.parallel.RowwiseParallel
    """

    dim = 1
    _desired = (Shard(-1),)
    _after = staticmethod(sum_of)


_STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": functools.partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_rep": functools.partial(RowwiseParallel, input_layouts=Replicate()),
}


def plan_of(model: nn.Module) -> dict[str, Any]:
    """Returns a plan for parallelize_module: the styles of a transformers model's own tensor
    parallel plan, model.tp_plan, for its quantized layers and LoRA layers around them. Layers that
    are not quantized stay whole on every rank. For a PeftModel, pass base_model.model. Raises
    InvalidArgument for a model whose plan has no quantized layer, or has an unknown style for
    one."""
    wanted = getattr(model, "tp_plan", None) or {}
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        generic = ".".join("*" if each.isdigit() else each for each in name.split("."))
        named = wanted.get(generic)
        if named is None or _parallel_adapter.base_of(module) is None:
            continue
        if named not in _STYLES:
            raise InvalidArgument(f"tp_plan has {named!r} for {name}; expected {list(_STYLES)}")
        found[name] = _STYLES[named]()
        found[name].layer_name = name
    if not found:
        raise InvalidArgument(
            f"model is {kind_of(model)} and has no tp_plan for quantized layers; expected a model "
            f"of transformers that has, itself and not in another module"
        )
    return found
