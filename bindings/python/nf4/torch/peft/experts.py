"""Serves PEFT's target_parameters for 4-bit experts: a LoRA adapter for each expert.

PEFT wraps the module that has the parameter in a ParamWrapper, which adds B A to the parameter
during a forward pass. An NF4Experts in the parameter's place gets A and B instead for that time,
and computes their products (_expert_adapters.py). Adapters have the same names, shapes and keys as
over dense experts.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nf4.errors import InvalidArgument
from nf4.torch._checks import torch_dtype
from nf4.torch._expert_adapters import ExpertAdapter
from nf4.torch.modules import Int4Experts, NF4Experts
from nf4.torch.modules.base import QuantizedModule
from nf4.torch.peft import merging


def _is_transposed(owner: nn.Module) -> bool:
    return getattr(owner, "is_transposed", False)


def _stack_of(wrapper: Any) -> NF4Experts | None:
    """Returns the NF4Experts of a ParamWrapper, if its parameter is in 4 bits."""
    found = wrapper.get_base_layer()._modules.get(wrapper.parameter_name)
    return found if isinstance(found, NF4Experts) else None


def _stand_in(stack: NF4Experts, owner: nn.Module) -> Tensor:
    """Returns a tensor of the dense parameter's shape, dtype and device, without its memory."""
    made = torch.empty((), dtype=torch_dtype(stack.dtype_before), device=stack.weight.device)
    made = made.expand(stack.spec.shape)
    return made.transpose(1, 2) if _is_transposed(owner) else made


def get_param(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_param(self: Any) -> Any:
        stack = _stack_of(self)
        return original(self) if stack is None else _stand_in(stack, self.get_base_layer())

    return get_param


def _adapter(wrapper: Any, name: str) -> ExpertAdapter:
    """Returns the adapter from PEFT's A [experts * rank, columns] and B [rows, rank * experts]."""
    a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    experts = wrapper.num_experts
    a = a.reshape(experts, -1, a.shape[1])
    b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    return ExpertAdapter(a, b, wrapper.scaling[name])


def forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        stack, mixed = _stack_of(self), kwargs.get("adapter_names")
        if stack is None or self.disable_adapters or self.merged or mixed is not None:
            return original(self, x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        stack.adapters = tuple(_adapter(self, n) for n in self.active_adapters if n in self.lora_A)
        try:
            return self.base_layer(x, *args, **kwargs)
        finally:
            stack.adapters = ()

    return forward


# ---- Where PEFT looks for parameters ----------------------------------------------------


def inject_parameters(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _inject_parameters(
        self: Any, peft_config: Any, model: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        _require_no_part(model, peft_config.target_parameters or ())
        with _listed(model):
            return original(self, peft_config, model, *args, **kwargs)

    return _inject_parameters


def _is_target(name: str, targets: Iterable[str]) -> bool:
    return any(f".{name}".endswith(f".{target}") for target in targets)


def warn_of(original: Callable[..., Any], unknown: str, known: str) -> Callable[..., Any]:
    """Wraps _inject_parameters to warn, for a PEFT with an unknown function. known: the version
    whose functions are known. All functions are then left alone, and PEFT skips 4-bit experts,
    because they are not parameters. The wrapper passes any arguments on."""

    @functools.wraps(original)
    def _inject_parameters(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        targets = [t for each in given for t in getattr(each, "target_parameters", None) or ()]
        for model in (each for each in given if isinstance(each, nn.Module)):
            for name, module in model.named_modules():
                if isinstance(module, NF4Experts) and _is_target(name, targets):
                    warnings.warn(
                        f"{name} gets no adapter: libnf4 does not know {unknown} of this version "
                        f"of PEFT; expected PEFT {known}",
                        stacklevel=2,
                    )
                    return original(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return _inject_parameters


def _require_no_part(model: nn.Module, targets: Iterable[str]) -> None:
    """Refuses the parts of 4-bit weights as targets, because PEFT would add to their bytes as if
    they were numbers."""
    for name, module in model.named_modules():
        if not isinstance(module, QuantizedModule):
            continue
        plain = name.replace(".base_layer", "")
        if isinstance(module, Int4Experts) and _is_target(plain, targets):
            raise InvalidArgument(
                f"target_parameters has {plain}, experts of integers; expected those of NF4 or FP4"
            )
        for target in targets:
            if _is_target(f"{plain}.weight", [target]):
                kind = "parameters" if isinstance(module, NF4Experts) else "modules"
                raise InvalidArgument(
                    f"target_parameters has {target!r}, the packed bytes of {plain}; expected "
                    f"{target.removesuffix('.weight')!r} in target_{kind}"
                )


@contextlib.contextmanager
def _listed(model: nn.Module) -> Iterator[None]:
    """A context in which stacks are among the parameters of the modules that have them."""
    places = [
        (module._parameters, name, _stand_in(child, module))
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, NF4Experts)
    ]
    for parameters, name, each in places:
        parameters[name] = nn.Parameter(each, requires_grad=False)
    try:
        yield
    finally:
        for parameters, name, _ in places:
            parameters.pop(name, None)


# ---- Merging ----------------------------------------------------------------------------


def _add(wrapper: Any, stack: NF4Experts, adapter: str, sign: int) -> None:
    delta = wrapper.get_delta_weight(adapter)
    if _is_transposed(wrapper.get_base_layer()):
        delta = delta.transpose(1, 2)
    merged = stack.dequantize().add_(delta, alpha=sign)
    merging.require_finite(merged, adapter)
    stack.requantize(merged)


def merge(
    original: Callable[..., None], to_merge: Callable[..., Sequence[str] | None]
) -> Callable[..., None]:
    """Wraps `merge`: dequantizes one stack at a time. to_merge: PEFT's check_adapters_to_merge."""
    return merging.merge(original, to_merge, _stack_of, functools.partial(_add, sign=1))


def unmerge(original: Callable[..., None]) -> Callable[..., None]:
    return merging.unmerge(original, _stack_of, functools.partial(_add, sign=-1))
