"""Cuts PEFT's LoRA layers around a quantized layer: A or B of an adapter is cut with the layer.

    column-wise    y = x W^T + s (x A^T) B^T with rows of W and B; A is whole
    row-wise       the same with columns of W and A; B is whole. y with the adapter is summed

The gradient of the whole half is summed over the ranks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nf4.errors import InvalidArgument, kind_of
from nf4.torch.distributed._cuts import Ranges
from nf4.torch.modules import QuantizedLinear


def _is_adapted(module: nn.Module) -> bool:
    layers = sys.modules.get("peft.tuners.lora.layer")
    return layers is not None and isinstance(module, layers.LoraLayer)


def base_of(module: nn.Module) -> QuantizedLinear | None:
    """Returns the quantized layer that a style is to cut; None if there is none."""
    if _is_adapted(module):
        module = module.get_base_layer()
    return module if isinstance(module, QuantizedLinear) else None


def require_served(module: nn.Module) -> None:
    """Raises InvalidArgument for adapters that cannot be cut with their layer."""
    for name, a in module.lora_A.items():
        b = module.lora_B[name]
        plain = type(a) is nn.Linear and type(b) is nn.Linear and b.bias is None
        if not plain or name in module.lora_variant or module.merged:
            raise InvalidArgument(
                f"adapter {name!r} of {kind_of(module)} is no plain LoRA; expected one without "
                f"DoRA or another variant, without a bias, and not merged"
            )
        if a.weight.is_meta or b.weight.is_meta:
            raise InvalidArgument(
                f"adapter {name!r} of {kind_of(module)} is on meta; expected it to have values "
                f"before its layer is cut: to_empty of lora_A and lora_B, then "
                f"reset_lora_parameters({name!r}, True)"
            )


def about(module: nn.Module) -> str:
    """Returns what the adapters of a LoRA layer must have in common on all ranks."""
    return "".join(
        f" with adapter {name!r} of r {module.r[name]}, {a.weight.dtype}, scaling "
        f"{module.scaling[name]}, A {_trained(a)}, B {_trained(module.lora_B[name])}"
        for name, a in module.lora_A.items()
    )


def _trained(half: nn.Module) -> str:
    return "trained" if half.weight.requires_grad else "frozen"


def cut_adapters(
    module: nn.Module, mesh: DeviceMesh, dim: int, ranges: Ranges, src_data_rank: int | None
) -> None:
    """Cuts B with the rows of the layer (dim 0), or A with its columns, for every adapter. The
    values are those of the rank that src_data_rank names, as in torch's styles."""
    base, group = module.get_base_layer(), mesh.get_group()
    for name in module.lora_A:
        halves = (module.lora_B[name], module.lora_A[name])
        if src_data_rank is not None:
            for half in halves:
                torch.distributed.broadcast(half.weight.data, group=group, group_src=src_data_rank)
        cut, whole = halves if dim == 0 else reversed(halves)
        pieces = [cut.weight.detach().narrow(dim, at, end - at) for at, end in ranges]
        cut.weight = nn.Parameter(torch.cat(pieces, dim), cut.weight.requires_grad)
        cut.out_features, cut.in_features = cut.weight.shape
        if whole.weight.requires_grad:
            whole.weight.register_hook(functools.partial(_summed, group))
            whole.weight.nf4_summed = True
    module.out_features, module.in_features = base.out_features, base.in_features
    module.register_forward_pre_hook(functools.partial(_require_summed, dim))


def hook_base(
    module: nn.Module, base: QuantizedLinear, before: Callable[..., Any], after: Callable[..., Any]
) -> None:
    """Runs the LoRA layer's hooks around its base layer when that is called by itself, as after
    merge_and_unload()."""
    base.in_cut_adapter = False
    around = (
        base.register_forward_pre_hook(functools.partial(_unless_within, before)),
        base.register_forward_hook(functools.partial(_unless_within, after)),
    )
    base.cut_hooks = [each.id for each in around]
    module.register_forward_pre_hook(functools.partial(_within, True))
    module.register_forward_hook(functools.partial(_within, False), always_call=True)


def _within(now: bool, module: nn.Module, *_: Any) -> None:
    module.get_base_layer().in_cut_adapter = now


def _unless_within(hook: Callable[..., Any], base: nn.Module, *given: Any) -> Any:
    return None if base.in_cut_adapter else hook(base, *given)


def _summed(group: Any, grad: Tensor) -> Tensor:
    grad = grad.clone()
    torch.distributed.all_reduce(grad, group=group)
    return grad


def _require_summed(dim: int, module: nn.Module, _args: Any) -> None:
    """A forward_pre_hook that requires the gradient of each trained whole half to be summed."""
    if not torch.is_grad_enabled():
        return
    for name, half in (module.lora_A if dim == 0 else module.lora_B).items():
        if half.weight.requires_grad and not hasattr(half.weight, "nf4_summed"):
            raise InvalidArgument(
                f"adapter {name!r} has a weight that was added after its layer was cut, or was "
                f"frozen then, so that its gradient would not be summed over the ranks; expected "
                f"adapters to be added before, and no fully_shard of their layers"
            )
