"""Integer weights: dequantize of each layout beside the roofline, and matmul of GPTQ's beside the
other layouts, NF4 and the peers, by the programs that measure NF4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import nf4
import torch

from nf4bench import matmul, matmul_peers, peers, rows
from nf4bench.cases import ACT_ORDER, PUBLIC_CALL, REORDERED, Case
from nf4bench.int4_cases import LAYOUTS, TRITON_M, Cases, case
from nf4bench.matmul_cases import ERROR_CLASSES
from nf4bench.matmul_peers import Multiply, Peer
from nf4bench.rows import Bench, Report, begin
from nf4bench.weights import Weight, weight_of

# libnf4 itself with other weights of the same shape, by name: what sets them apart.
OTHERS: dict[str, dict[str, Any]] = {
    "awq": {"format": "awq"},
    "compressed-tensors": {"format": "compressed-tensors"},
    PUBLIC_CALL: {},
    ACT_ORDER: {"placement": ACT_ORDER},
    REORDERED: {"placement": REORDERED},
    "nf4": {"format": "nf4", "blocksize": 64},
    "nf4 nested": {"format": "nf4", "blocksize": 64, "nested": True},
}


class Ours(Peer):
    """The public call with another weight, which launches as the library does."""

    def __init__(self, place: str, name: str) -> None:
        self._name, self._changes = name, OTHERS[name]
        self.version = nf4.version()

    def _weight(self, weight: Weight) -> Weight:
        if self._name not in weight.others:
            made = weight_of(replace(weight.case, **self._changes), weight.place)
            weight.others[self._name] = made
        return weight.others[self._name]

    def prepare(self, weight: Weight, variant: int) -> Multiply:
        q = self._weight(weight).quantized
        return lambda x: nf4.matmul(x, q)

    def numbers(self, weight: Weight) -> torch.Tensor:
        return peers.dequantized(self._weight(weight), torch.float64)


class Triton(Peer):
    """A kernel of triton_int4.py, for few rows of x."""

    def __init__(self, place: str, study: bool) -> None:
        from nf4bench import triton_int4

        self._prepare, self.version = triton_int4.prepare, triton_int4.triton.__version__
        self._kind = triton_int4.STUDY if study else triton_int4.AUTOGPTQ
        self.variants = range(len(self._kind))

    def supports(self, case: Case, m: int, variant: int) -> bool:
        return m <= TRITON_M

    def prepare(self, weight: Weight, variant: int) -> Multiply:
        return self._prepare(weight, self._kind[variant])


FACTORIES: dict[str, Callable[[str], Peer]] = {
    "dense": matmul_peers.Dense,
    "humming": matmul_peers.Humming,
    "split-K": lambda place: Triton(place, True),
    "AutoGPTQ": lambda place: Triton(place, False),
    **{name: lambda place, name=name: Ours(place, name) for name in OTHERS},
}
TRIED = case((256, 1024))  # every peer can do it


def load(place: str) -> dict[str, Peer | peers.Missing]:
    """Each peer that can multiply here, or why it is missing."""
    return matmul_peers.load_tried(FACTORIES, TRIED, place)


def run(bench: Bench, found: Mapping[str, Any], wanted: Cases, report: Report) -> dict:
    """All figures, as figures.json holds them. Raises WrongResult before what is wrong is timed."""
    dequantized, groups = wanted
    figures = begin(bench, found, report)
    figures["dequantize"] = rows.measured(bench, dequantized, {}, report)
    figures["rows"] = matmul.rows(bench, found, groups, report)
    shapes = dict.fromkeys(group.case.shape for group in groups)
    dtypes = dict.fromkeys(dtype for dtype, _ in ERROR_CLASSES)
    errors = [case(s, layout, d) for s in shapes for layout in LAYOUTS for d in dtypes]
    figures["errors"] = matmul.errors(bench, found, errors, report)
    return figures
