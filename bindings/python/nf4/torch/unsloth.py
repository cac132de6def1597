"""Serves Unsloth's fast_dequantize and matmul_lora by libnf4."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nf4.errors import InvalidArgument
from nf4.torch import _kernels, _operators, _private, _state
from nf4.torch._checks import require_tensor
from nf4.torch.peft import adapted
from nf4.torch.peft.adapted import Adapter

_UTILS = "unsloth.kernels.utils"


def fast_dequantize(
    W: Tensor,
    quant_state: _state.QuantState | None = None,
    out: Tensor | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Replaces unsloth.kernels.utils.fast_dequantize, with its arguments and results.

    W                  packed bytes, as bitsandbytes holds them, or a dense weight
    quant_state        bitsandbytes' QuantState; None if W is dense, which is then returned
    out                the tensor to write to: contiguous, with the weight's shape and dtype
    use_global_buffer  ignored: the result has memory of its own, which no later call overwrites

    Returns the weight in quant_state.dtype, transposed if W has shape [1, n]. Raises what
    nf4.dequantize raises.
    """
    if quant_state is None:
        return W
    require_tensor("W", W)
    _state.require_quant_state("quant_state", quant_state)
    _state.require_layout(quant_state)
    weight = _state.parts_of(W, quant_state)
    if out is None:
        result = _operators.dequantize(weight, quant_state.dtype)
    else:
        require_tensor("out", out)
        result = _kernels.dequantize(weight, quant_state.dtype, out)
    return result.t() if W.shape[0] == 1 else result


def matmul_lora(
    X: Tensor,
    W: Tensor,
    W_quant: _state.QuantState,
    A: Tensor | None,
    B: Tensor | None,
    s: float | None,
) -> Tensor:
    """Replaces unsloth.kernels.utils.matmul_lora, with its arguments and results: X W^T + s (X A^T)
    B^T for a 4-bit weight, which is transposed if W has shape [1, n]. No gradients are recorded."""
    x = X.reshape(-1, X.shape[-1])
    weight = _state.parts_of(W, W_quant)
    made = None
    with torch.no_grad():
        if W.shape[0] == 1:
            y = _operators.linear_grad(x, weight)
        else:
            made = None if A is None else adapted.product(x, None, weight, Adapter(A, B, s))
            y = _operators.linear(x, None, weight) if made is None else made[0]
        if A is not None and made is None:
            y.addmm_(x @ A.t().to(x.dtype), B.t().to(x.dtype), alpha=s)
    return y.view(*X.shape[:-1], -1)


def _is_ours(quant_state: Any) -> bool:
    return getattr(quant_state, "quant_type", None) in ("nf4", "fp4")


def _dequantize_or(original: Callable[..., Any]) -> Callable[..., Any]:
    """Unsloth's own function still serves weights that are not in 4 bits."""

    def patched(W: Tensor, quant_state: Any = None, *rest: Any, **options: Any) -> Any:
        if _is_ours(quant_state):
            return fast_dequantize(W, quant_state, *rest, **options)
        return original(W, quant_state, *rest, **options)

    return patched


def _matmul_or(original: Callable[..., Any]) -> Callable[..., Any]:
    """Unsloth's own function still handles extra arguments, x of another dtype, and calls that
    autograd records."""

    def patched(
        X: Tensor, W: Tensor, W_quant: Any, A: Any, B: Any, s: Any, *rest: Any, **options: Any
    ) -> Any:
        plain = not rest and not options and type(X) is Tensor
        ours = plain and _is_ours(W_quant) and X.dtype == W_quant.dtype
        if ours and not (torch.is_grad_enabled() and _private.any_requires_grad(X, A, B)):
            return matmul_lora(X, W, W_quant, A, B, s)
        return original(X, W, W_quant, A, B, s, *rest, **options)

    return patched


_PATCHES = {"fast_dequantize": _dequantize_or, "matmul_lora": _matmul_or}


def _patch(name: str) -> set[str]:
    """Replaces a function of this name in Unsloth's modules, and returns their names."""
    original = getattr(sys.modules[_UTILS], name, None)
    if original is None or hasattr(original, "nf4_original"):
        return set()
    patched = _PATCHES[name](original)
    patched.nf4_original = original
    found = {
        each: module
        for each, module in list(sys.modules.items())
        if each.split(".")[0] == "unsloth" and getattr(module, name, None) is original
    }
    for module in found.values():
        setattr(module, name, patched)
    return set(found)


def patch_unsloth() -> list[str]:
    """Makes Unsloth dequantize and multiply 4-bit weights by libnf4, in all of its loaded modules.
    Call it after `import unsloth`. Returns the names of the modules; a second call changes nothing.

    Replaces fast_dequantize and matmul_lora. LoRA_MLP, LoRA_QKV and LoRA_W compute y by
    matmul_lora, and LoRA_MLP also the gradient of its last product. Their other gradients
    dequantize, and add to a dX in the memory of x.

    Raises InvalidArgument if unsloth.kernels.utils is not loaded or has no fast_dequantize.
    """
    if getattr(sys.modules.get(_UTILS), "fast_dequantize", None) is None:
        raise InvalidArgument(
            f"{_UTILS} has no fast_dequantize; expected `import unsloth` before this call"
        )
    return sorted(set().union(*map(_patch, _PATCHES)))
