"""Multiplies global scales of NVFP4 by powers of two. Engines fuse layers such as q, k and v, and
use one global scale for them. Scales that differ by a power of two can be made equal without loss:
the scales of blocks are E4M3, whose exponent takes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import nf4
from nf4._global_scales import LARGEST, maxima

# A part of a weight keeps its global scale if its largest block has a scale of 448 times this or
# more. Smaller blocks have normal numbers for scales then, down to 2^-9 of the largest.
_LEAST_SHARE = 2.0**-6
# Rounding may make the largest block that much larger. Its scale rounds to 448.
_SLACK = 1 - 2.0**-10
# 2^126 and its inverse are normal numbers of float32.
_STEPS = 126


def rescaled(weight: nf4.QuantizedTensor[Tensor], dense: Tensor) -> Tensor | None:
    """Returns the global scales for a dense weight that replaces `weight` in NVFP4: its own, each
    times the smallest power of two with which the largest block has room, and 1 if that leaves the
    blocks enough precision. None if one is not a normal positive number before and after."""
    scales: Any = weight.nested_absmax
    own, divides = scales.reshape(-1), weight.scale_rule == "divisor"
    rows = dense.reshape(-1, dense.shape[-1])
    largest = torch.stack(list(maxima(rows, weight.nested_blocksize or len(rows)))).float()
    share = (largest * own if divides else largest / own) / LARGEST
    mantissa, exponent = torch.frexp(share * _SLACK)
    steps = exponent - (mantissa == 0.5).int()
    kept = ((steps <= 0) & (share >= _LEAST_SHARE)) | (largest == 0)
    steps = torch.where(kept, 0, steps)
    powers = _powers_of_two(steps)
    made = own / powers if divides else own * powers
    known = (torch.isfinite(share) & (share > 0)) | (largest == 0)
    usable = known & (steps.abs() < _STEPS) & _is_normal(own) & _is_normal(made)
    return made.view(scales.shape) if bool(torch.all(usable)) else None


def _is_normal(scales: Tensor) -> Tensor:
    return torch.isfinite(scales) & (scales >= torch.finfo(torch.float32).tiny)


def _powers_of_two(exponents: Tensor) -> Tensor:
    """Returns exact float32 powers, which torch.pow does not promise on a GPU."""
    return ((exponents.clamp(-_STEPS, _STEPS) + 127) << 23).int().view(torch.float32)


def with_global_scale(
    weight: nf4.QuantizedTensor[Tensor], scale: Tensor
) -> nf4.QuantizedTensor[Tensor] | None:
    """Returns the same numbers in NVFP4 with another global scale; None if the scales of the blocks
    cannot have them."""
    own: Any = weight.nested_absmax
    blocks: Any = weight.absmax
    # A copy, as transformers refuses to save tensors that share memory.
    scale = scale.to(own.device, copy=True).reshape(own.shape)
    ratio = own / scale if weight.scale_rule == "divisor" else scale / own
    mantissa, _ = torch.frexp(ratio)
    wanted = blocks.view(torch.float8_e4m3fn).float() / ratio
    made = wanted.to(torch.float8_e4m3fn)
    if not bool(torch.all(mantissa == 0.5)) or not torch.equal(made.float(), wanted):
        return None
    return dataclasses.replace(weight, absmax=made.view(torch.uint8), nested_absmax=scale)
