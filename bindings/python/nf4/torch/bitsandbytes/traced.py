"""bitsandbytes' way from Linear4bit to gemm_4bit where torch.compile traces it. The compiled model
calls an operator of libnf4's, which is C++; bitsandbytes' are served in Python, and its backward
pass makes a dense weight."""

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
    """Does gemm_4bit take the weight, in this layout and orientation?"""
    if x.device.type == "cpu" and getattr(state, "packing_format_for_cpu", False):
        return False
    nested_blocksize = state.state2.blocksize if state.nested else 0
    return operators.takes(state.shape, state.quant_type, nested_blocksize) and (
        x.shape[-1] == state.shape[1]
    )


def _is_differentiated_otherwise(x: Tensor, packed: Tensor, state: Any) -> bool:
    """Has bitsandbytes another gradient than the operator? y requires grad with its weight, and a
    weight that was in 16 bits is rounded to these, whatever x is in."""
    if not torch.is_grad_enabled():
        return False
    rounds = state.dtype not in (torch.float32, x.dtype)
    return packed.requires_grad or (x.requires_grad and rounds)


def _is_plain(x: Tensor, bias: Tensor | None) -> bool:
    """The operator copies an x of other strides, and refuses a bias of another dtype."""
    if x.dtype not in DTYPES or (x.dtype == torch.float32 and x.device.type == "cuda"):
        return False
    return x.is_contiguous() and (bias is None or bias.dtype == x.dtype)


def product(x: Tensor, packed: Tensor, state: Any, bias: Tensor | None) -> Tensor | None:
    """x W^T + bias, of a QuantState. None where bitsandbytes' own functions are to be traced: in a
    program that is exported, which is not to need libnf4, within transforms, and for what is
    rare."""
    if _private.is_exporting() or _private.is_transformed() or not operators.is_ours(x):
        return None
    if not operators.is_for_graphs(x):
        return None
    if not _is_plain(x, bias) or not _is_served(x, state):
        return None
    # A view is no Params4bit. To call an operator with one takes 4 us, for its __torch_function__,
    # and under a mode for functions Dynamo cannot even trace its attributes.
    packed = packed.view(-1)
    if _is_differentiated_otherwise(x, packed, state):
        return None
    arguments, device = parts_of(packed, state).arguments(), x.device.type
    if not torch.is_autocast_enabled(device):
        return linear(x, bias, *arguments)
    # It changes nothing in bitsandbytes' product.
    with torch.autocast(device, enabled=False):
        return linear(x, bias, *arguments)
