"""Replaces functional.dequantize_4bit: one kernel dequantizes nested scales and weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nf4.torch import _operators, _state
from nf4.torch._checks import DTYPES
from nf4.torch.bitsandbytes.operators import is_ours


def _is_nested(state: Any) -> bool:
    """Tells if this is a double-quantized QuantState as bitsandbytes makes it."""
    return (
        getattr(state, "nested", False)
        and state.quant_type in ("nf4", "fp4")
        and state.dtype in DTYPES
        and state.absmax.dtype == torch.uint8
        and state.state2.dtype == torch.float32  # else bitsandbytes rounds the scales
        and all(
            part.dtype in DTYPES for part in (state.offset, state.state2.absmax, state.state2.code)
        )
    )


def dequantize_4bit(original: Callable[..., Any]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def dequantize_4bit(
        A: Tensor, quant_state: Any = None, absmax: Any = None, out: Any = None, *rest: Any, **more
    ) -> Tensor:
        if out is not None or not _is_nested(quant_state) or not is_ours(A):
            return original(A, quant_state, absmax, out, *rest, **more)
        weight = _state.parts_of(A, quant_state)
        result = _operators.dequantize(weight, quant_state.dtype)
        return result.t() if A.shape[0] == 1 else result

    return dequantize_4bit
