"""Replaces PEFT's forward of a LoRA layer around a 4-bit base layer by one Function (adapted.py).

If x is bf16, fp32 adapters are rounded to it, which PEFT does only under autocast. If x is fp16,
whose range is narrow, they are rounded only under autocast here too.

PEFT's own forward handles everything else: dropout in training, several active adapters or none,
variants such as DoRA, a bias of the adapter, a scale that is a tensor, one of A and B frozen,
adapter_names, merged layers, hooks and parametrizations, subclasses, x in another dtype than the
layer computes in, torch.compile, modes and transforms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from nf4.errors import InvalidArgument
from nf4.torch import _private
from nf4.torch._schemas import Parts
from nf4.torch.modules import Int4Linear, NF4Linear
from nf4.torch.peft import adapted
from nf4.torch.peft.adapted import Adapter

# Returns (weight, bias, compute dtype) of a base layer for x, or None.
Operands = tuple[Parts, "Tensor | None", torch.dtype]
_OURS = (NF4Linear, Int4Linear)


def _is_called_plainly(own: dict[str, Any]) -> bool:
    """Tells from a module's attributes if calling it runs only its class's forward."""
    return not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
    )


def _is_within_cut_adapter(own: dict[str, Any]) -> bool:
    """Tells from a base layer's attributes if it has only the hooks that do nothing within a cut
    LoRA layer (distributed/_parallel_adapter.py)."""
    return (
        own.get("in_cut_adapter", False)
        and [*own["_forward_pre_hooks"], *own["_forward_hooks"]] == own["cut_hooks"]
        and not (own["_backward_hooks"] or own["_backward_pre_hooks"] or "forward" in own)
    )


def _require_cut_together(layer: Any) -> None:
    """Requires the layer and its adapter to be cut together. Else y would combine a part of the
    layer with a whole adapter."""
    base = layer.base_layer
    is_cut = getattr(base, "tensor_parallel", None) is not None
    if is_cut and not getattr(base, "in_cut_adapter", False):
        raise InvalidArgument(
            "a LoRA layer is around a layer that was cut for tensor parallelism, and is not cut "
            "itself; expected PEFT first, then a style for the LoRA layer"
        )


def _matrix(modules: nn.Module, name: str) -> Tensor | None:
    """Returns the weight of an adapter's half, if that is a plain torch.nn.Linear."""
    module = modules._modules.get(name)
    if type(module) is not nn.Linear:
        return None
    own = module.__dict__
    parameters = own["_parameters"]
    weight = parameters.get("weight")
    if type(weight) is not nn.Parameter or parameters.get("bias") is not None:
        return None
    return weight if _is_called_plainly(own) else None


def _drops(modules: nn.Module, name: str) -> bool:
    module = modules._modules.get(name)
    if type(module) is nn.Dropout:
        if module.training and module.p > 0:
            return True
    elif type(module) is not nn.Identity:
        return True
    return not _is_called_plainly(module.__dict__)


def _adapter(own: dict[str, Any]) -> Adapter | None:
    """Returns the adapter from a LoRA layer's attributes, if exactly one is active and nothing is
    special."""
    active = own["_active_adapter"]
    if type(active) is not str:
        if len(active) != 1:
            return None
        (active,) = active
    if own["_disable_adapters"] or own["merged_adapters"] or active in own["lora_variant"]:
        return None
    modules = own["_modules"]
    if _drops(modules["lora_dropout"], active) or not own["cast_input_dtype_enabled"]:
        return None
    a, b = _matrix(modules["lora_A"], active), _matrix(modules["lora_B"], active)
    scale = own["scaling"][active]
    if a is None or b is None or type(scale) not in (float, int):  # a tensor may require grad
        return None
    return Adapter(a, b, scale)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    if not _private.any_autocast():
        return None
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _is_served(base: nn.Module) -> bool:
    return type(base) in _OURS or hasattr(type(base).forward, "nf4_operands")


def _operands(base: nn.Module, x: Tensor, autocast: torch.dtype | None) -> Operands | None:
    if type(base) in _OURS:
        dtype = autocast or base.compute_dtype or x.dtype
        return base.parts(), base.bias_in(dtype), dtype
    # bitsandbytes' layers count if their forward is replaced (bitsandbytes/eager.py).
    return type(base).forward.nf4_operands(base, x)


def _fits(adapter: Adapter, x: Tensor, dtype: torch.dtype, autocast: bool) -> bool:
    """Tells if A and B may be rounded to this dtype."""
    a, b, _ = adapter
    if a.dtype != dtype or b.dtype != dtype:
        # PEFT casts x to fp32 except under autocast. bf16 has the range of fp32; in fp16 x A^T
        # could overflow.
        rounds = dtype == torch.bfloat16 or (autocast and dtype == torch.float16)
        allowed = (dtype, torch.float32)
        if not rounds or a.dtype not in allowed or b.dtype not in allowed:
            return False
    return a.device == b.device == x.device


def fused_forward(layer: nn.Module, x: Tensor) -> Tensor | None:
    """Returns y of a LoRA layer; None if PEFT's own forward has to compute it."""
    own = layer.__dict__
    base = own["_modules"]["base_layer"]
    if not _is_served(base) or type(x) is not Tensor:
        return None
    of_base = base.__dict__
    plainly = _is_called_plainly(of_base) or _is_within_cut_adapter(of_base)
    if not _private.is_idle() or _private.has_global_hooks():
        return None
    adapter, autocast = _adapter(own), _autocast_dtype(x)
    if adapter is None or not plainly:
        return None
    found = _operands(base, x, autocast)
    if found is None:
        return None
    weight, bias, dtype = found
    casts = x.dtype != dtype
    # PEFT multiplies fp32 adapters in fp32 without rounding, except under autocast.
    if autocast not in (None, dtype) or (casts and not (autocast and x.dtype == torch.float32)):
        return None
    if not _fits(adapter, x, dtype, autocast is not None):
        return None
    multiply = getattr(type(base).forward, "nf4_linear", None)
    y = adapted.linear(x.to(dtype) if casts else x, bias, weight, adapter, multiply)
    if y is None or not casts or type(base) in _OURS:
        return y
    return y.to(x.dtype)  # a Linear4bit does the same


def forward(original: Callable[..., Tensor], served: type) -> Callable[..., Tensor]:
    """Makes the replacement for the forward of a PEFT class, but not of its subclasses."""

    @functools.wraps(original)
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not args and not kwargs and type(self) is served and not is_dynamo_compiling():
            y = fused_forward(self, x)
            if y is not None:
                return y
        _require_cut_together(self)
        return original(self, x, *args, **kwargs)

    return forward
