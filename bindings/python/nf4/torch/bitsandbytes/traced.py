"""Replaces bitsandbytes' path from Linear4bit to gemm_4bit where torch.compile traces it. The
compiled model calls libnf4's operator, which is C++. bitsandbytes' operators are served in Python,
and its backward pass makes a dense weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nf4.torch import _private
from nf4.torch._checks import DTYPES
from nf4.torch._schemas import linear
from nf4.torch._state import parts_of
from nf4.torch.bitsandbytes import operators


def _is_served(x: Tensor, state: Any) -> bool:
    """Tells if gemm_4bit accepts the weight in this layout and orientation."""
    if x.device.type == "cpu" and getattr(state, "packing_format_for_cpu", False):
        return False
    nested_blocksize = state.state2.blocksize if state.nested else 0
    return operators.takes(state.shape, state.quant_type, nested_blocksize) and (
        x.shape[-1] == state.shape[1]
    )


def _is_differentiated_otherwise(x: Tensor, packed: Tensor, state: Any) -> bool:
    """Tells if bitsandbytes' gradient differs from the operator's. In bitsandbytes y requires grad
    if the weight does, and a 16-bit weight is rounded to its own dtype, whatever x is in."""
    if not torch.is_grad_enabled():
        return False
    rounds = state.dtype not in (torch.float32, x.dtype)
    return packed.requires_grad or (x.requires_grad and rounds)


def _is_plain(x: Tensor, bias: Tensor | None) -> bool:
    """Tells if the operator accepts x and bias as they are: it copies an x of other strides, and
    refuses a bias of another dtype."""
    if x.dtype not in DTYPES or (x.dtype == torch.float32 and x.device.type == "cuda"):
        return False
    return x.is_contiguous() and (bias is None or bias.dtype == x.dtype)


def product(x: Tensor, packed: Tensor, state: Any, bias: Tensor | None) -> Tensor | None:
    """Returns x W^T + bias for a QuantState. None if bitsandbytes' own functions are to be traced:
    in an exported program, which must not need libnf4, within transforms, and in rare cases."""
    if _private.is_exporting() or _private.is_transformed() or not operators.is_ours(x):
        return None
    if not operators.is_for_graphs(x):
        return None
    if not _is_plain(x, bias) or not _is_served(x, state):
        return None
    # The view is not a Params4bit. Passing a Params4bit to an operator takes 4 us, for its
    # __torch_function__, and Dynamo cannot trace its attributes under a torch function mode.
    packed = packed.view(-1)
    if _is_differentiated_otherwise(x, packed, state):
        return None
    arguments, device = parts_of(packed, state).arguments(), x.device.type
    if not torch.is_autocast_enabled(device):
        return linear(x, bias, *arguments)
    # It changes nothing in bitsandbytes' product.
    with torch.autocast(device, enabled=False):
        return linear(x, bias, *arguments)
