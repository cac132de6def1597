"""Every private name of torch that nf4.torch uses, each with a fallback for a torch without it:
something public, or the general way, which is slower. test_torch_private.py tests each fallback,
and finds private names elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

STAND_INS: dict[str, Any] = {}


def _found(name: str, path: str, stand_in: Any) -> Any:
    """Returns torch's object at this path, or its fallback."""
    STAND_INS[name] = stand_in
    found = torch
    for each in path.split("."):
        found = getattr(found, each, None)
    return stand_in if found is None else found


# ---- Does a call need the dispatcher? --------------------------------------------


def _is_never_idle() -> bool:
    """The fallback where torch cannot answer one of the questions."""
    return False


def _any_grad(*values: Any) -> bool:
    return any(isinstance(each, Tensor) and each.requires_grad for each in values)


any_requires_grad = _found("any_requires_grad", "_C._any_requires_grad", _any_grad)
any_autocast = _found("any_autocast", "_C._is_any_autocast_enabled", lambda: True)
has_transforms = _found("has_transforms", "_C._are_functorch_transforms_active", lambda: False)
_QUESTIONS = ("_len_torch_dispatch_stack", "_are_functorch_transforms_active", "_is_tracing")


def _is_idle_of() -> Callable[[], bool]:
    modes, transforms, tracing = (getattr(torch._C, name, None) for name in _QUESTIONS)
    if not (modes and transforms and tracing and hasattr(forward_ad, "_current_level")):
        return _is_never_idle

    def is_idle() -> bool:
        """Tells if no mode, transform, trace or forward-mode derivative is active around this call.
        An operator's kernels can then be called without the dispatcher."""
        return not (modes() or transforms() or tracing() or forward_ad._current_level >= 0)

    return is_idle


is_idle = _is_idle_of()
STAND_INS["is_idle"] = _is_never_idle


def _may_be_forward_ad() -> bool:
    """Where nobody knows."""
    return True


def _in_forward_ad() -> bool:
    """Tells if forward-mode derivatives may be active."""
    return forward_ad._current_level >= 0


in_forward_ad = _in_forward_ad if hasattr(forward_ad, "_current_level") else _may_be_forward_ad
STAND_INS["in_forward_ad"] = _may_be_forward_ad
# A context in which a subclass's __torch_function__ is not called.
no_torch_function = _found(
    "no_torch_function", "_C.DisableTorchFunctionSubclass", contextlib.nullcontext
)
is_zero_tensor = _found("is_zero_tensor", "Tensor._is_zerotensor", lambda tensor: False)


_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def _has_global_hooks_of() -> Callable[[], bool]:
    module = torch.nn.modules.module
    hooks = [getattr(module, name, None) for name in _GLOBAL_HOOKS]
    if None in hooks:
        return _may_have_global_hooks

    def has_global_hooks() -> bool:
        """Tells if there are hooks that every module calls."""
        return any(hooks)

    return has_global_hooks


def _may_have_global_hooks() -> bool:
    """Where nobody knows."""
    return True


has_global_hooks = _has_global_hooks_of()
STAND_INS["has_global_hooks"] = _may_have_global_hooks


# ---- Below autograd, inside of transforms ----------------------------------------------


def no_way_below() -> contextlib.AbstractContextManager[Any]:
    raise NotImplementedError("this torch calls no operator below autograd, as torch.func needs")


below_autograd = getattr(torch._C, "_AutoDispatchBelowAutograd", no_way_below)

keys_below_autograd = getattr(torch._C, "_after_autograd_keyset", None)
# Where it is false, quantize and dequantize have no autograd kernel, which only refuses gradients.
can_redispatch = below_autograd is not no_way_below and keys_below_autograd is not None
forward_ad_enabled = _found(
    "forward_ad_enabled",
    "autograd.forward_ad._set_fwd_grad_enabled",
    lambda _enabled: contextlib.nullcontext(),
)


def function_in_transform() -> contextlib.AbstractContextManager[Any]:
    """Allows a torch.autograd.Function in a kernel of the dispatcher, which is where torch.func's
    transforms arrive one by one."""
    if not has_transforms():
        return contextlib.nullcontext()
    # The import is only needed where a transform is used.
    from torch._functorch.utils import enable_single_level_autograd_function

    return enable_single_level_autograd_function()


STAND_INS["function_in_transform"] = contextlib.nullcontext


# torch.autograd.Function without its preparations for torch.func, which take 1 us and which a
# kernel of the dispatcher must not make again.
Function = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function)

_Made = TypeVar("_Made", bound=type)


def call_backward_directly(function: _Made) -> _Made:
    """Makes autograd call a Function's backward without `apply` of torch's node, which looks for a
    `vjp` in each call."""
    node = getattr(function, "_backward_cls", None)
    if hasattr(node, "apply"):
        node.apply = function.backward
    return function


# ---- Traces of torch.compile ---------------------------------------------------------------


def constant_in_traces(function: Callable[..., bool]) -> Callable[..., bool]:
    """Makes Dynamo call this function while it traces, and take the result as a constant. The mark
    is that of torch.compiler.assume_constant_result, which itself would import Dynamo and take a
    second. A torch that does not know the mark traces the function."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_traces
def is_exporting() -> bool:
    """Tells if torch.export traces. Inside a trace torch's own answer is always yes."""
    return torch.compiler.is_exporting()


@constant_in_traces
def is_transformed() -> bool:
    """Tells if a transform of torch.func or forward-mode derivatives may be active."""
    return has_transforms() or in_forward_ad()


# ---- Arguments of a call -----------------------------------------------------------------


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Maps each leaf of nested tuples, lists and dicts."""
    if isinstance(value, (tuple, list)):
        return type(value)(_map(function, each) for each in value)
    if isinstance(value, dict):
        return {key: _map(function, each) for key, each in value.items()}
    return function(value)


tree_map = _found("tree_map", "utils._pytree.tree_map", _map)


# ---- Operators' registrations ----------------------------------------------------------


def arguments_of(op: Any) -> list[Any] | None:
    """The arguments that an operator's overload declares; None if they cannot be asked for."""
    schema = getattr(op, "_schema", None)
    return None if schema is None else list(schema.arguments)


def argument_names(op: Any) -> list[str] | None:
    """Returns the names of arguments_of."""
    arguments = arguments_of(op)
    return None if arguments is None else [each.name for each in arguments]


def destroy(library: torch.library.Library) -> None:
    """Takes a library's registrations back at once, and not when it is collected."""
    getattr(library, "_destroy", lambda: None)()


def keyset(key: str) -> Any:
    """Returns the keyset argument for a kernel of torch.library.get_kernel."""
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
