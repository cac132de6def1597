"""Unsloth's fast_dequantize, served by libnf4."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from nf4.errors import InvalidArgument
from nf4.torch import _kernels, _operators, _schemas, _state  # noqa: F401  kernels are registered
from nf4.torch._checks import require_tensor

_NAME = "fast_dequantize"


def fast_dequantize(
    W: Tensor,
    quant_state: _state.QuantState | None = None,
    out: Tensor | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """With the arguments and results of unsloth.kernels.utils.fast_dequantize.

    W                  packed bytes, as bitsandbytes holds them, or a dense weight
    quant_state        bitsandbytes' QuantState; None: W is dense, and is returned
    out                where to write: contiguous, of the weight's shape and dtype
    use_global_buffer  ignored: the result has memory of its own, which no later call overwrites

    Returns the weight in quant_state.dtype; transposed, if W is of shape [1, n]. Raises what
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


def _or_original(original: Callable[..., Any]) -> Callable[..., Any]:
    """Unsloth's own function still serves weights that are not in 4 bits."""

    def patched(W: Tensor, quant_state: Any = None, *rest: Any, **options: Any) -> Any:
        if getattr(quant_state, "quant_type", None) in ("nf4", "fp4"):
            return fast_dequantize(W, quant_state, *rest, **options)
        return original(W, quant_state, *rest, **options)

    patched.nf4_original = original
    return patched


def patch_unsloth() -> list[str]:
    """Makes Unsloth dequantize 4-bit weights by libnf4, in all of its modules that are loaded: call
    it after `import unsloth`. Returns their names; a second call changes nothing.

    Raises InvalidArgument where unsloth.kernels.utils is not loaded or has no fast_dequantize.
    """
    original = getattr(sys.modules.get("unsloth.kernels.utils"), _NAME, None)
    if original is None:
        raise InvalidArgument(
            f"unsloth.kernels.utils has no {_NAME}; expected that unsloth is imported first"
        )
    if hasattr(original, "nf4_original"):
        return []
    patched = _or_original(original)
    found = [
        (name, module)
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "unsloth" and getattr(module, _NAME, None) is original
    ]
    for _, module in found:
        setattr(module, _NAME, patched)
    return sorted(name for name, _ in found)
