"""Dequantize as an operator of torch, so that torch.compile sees one opaque call.

The low-level registration: torch.library.custom_op would add the autograd and mutation
wrappers that a frozen weight has no use for. A weight passes as its packed tensor, which the
graph depends on, and its number, by which the rest is found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import nf4
import torch

from nf4bench.weights import DTYPES, Weight

_NAME = "nf4_bench::dequantize"


class Operator:
    """Made once a process, by operator()."""

    def __init__(self) -> None:
        self._weights: list[tuple[Weight, Callable[[], torch.Tensor]]] = []
        namespace, name = _NAME.split("::")
        self._library = torch.library.Library(namespace, "DEF")
        self._library.define(f"{name}(Tensor packed, int weight) -> Tensor")
        for key in ("CPU", "CUDA"):
            self._library.impl(name, self._run, key)
        torch.library.register_fake(_NAME, self._fake, lib=self._library)

    def _run(self, packed: torch.Tensor, weight: int) -> torch.Tensor:
        return self._weights[weight][1]()

    def _fake(self, packed: torch.Tensor, weight: int) -> torch.Tensor:
        case = self._weights[weight][0].case
        return packed.new_empty(case.shape, dtype=DTYPES[case.dtype])

    def prepare(self, weight: Weight, call: Callable[[], torch.Tensor]) -> Callable:
        """The operator's call in place of `call`."""
        self._weights.append((weight, call))
        operation = torch.ops.nf4_bench.dequantize.default
        packed, number = weight.quantized.packed, len(self._weights) - 1
        return lambda: operation(packed, number)


@functools.cache
def operator() -> Operator:
    return Operator()


def public_call(weight: Weight) -> Callable[[], torch.Tensor]:
    """What a user writes who wants a new tensor on torch's current stream."""
    q = weight.quantized
    return lambda: nf4.dequantize(q)
