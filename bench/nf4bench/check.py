"""Bits compared before anything is timed."""

from __future__ import annotations

from collections.abc import Callable

import nf4
import torch
from nf4.tuning.bits import differing

from nf4bench.errors import WrongResult
from nf4bench.weights import Weight


def require_equal(what: str, expected: torch.Tensor, got: torch.Tensor) -> None:
    """Raises WrongResult."""
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        raise WrongResult(
            f"{what}: {tuple(got.shape)} of {got.dtype}, "
            f"expected {tuple(expected.shape)} of {expected.dtype}"
        )
    count = differing(expected, got)
    if count:
        raise WrongResult(f"{what}: {count} of {expected.numel()} elements differ")


def require_dequantized(
    what: str, weight: Weight, expected: torch.Tensor, launch: Callable[[], torch.Tensor]
) -> None:
    """What a launch writes to weight.out, element for element, into memory of a known pattern.
    Raises WrongResult."""
    weight.out_room.view(torch.uint8).fill_(0xA5)
    result = launch()
    require_equal(f"{weight.case}: {what}", expected, result.view(weight.case.shape))


def require_quantized(weight: Weight) -> None:
    """What quantize wrote is what the library writes on the CPU. Raises WrongResult."""
    case, q = weight.case, weight.quantized
    codebook = None if q.codebook is None else q.codebook.cpu().numpy()
    on_cpu = nf4.quantize(
        weight.dense.cpu(), format=q.format, blocksize=case.blocksize,
        nested_blocksize=case.nested_blocksize, codebook=codebook,
    )  # fmt: skip
    names = ("packed", "absmax", "nested_absmax", "nested_offset")
    for name in names if case.nested else names[:2]:
        got = getattr(q, name)
        expected = torch.as_tensor(getattr(on_cpu, name)).to(got.device)
        require_equal(f"{case}: {name}", expected.view(-1), got.view(-1))
