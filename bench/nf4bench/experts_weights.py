"""Stacks of experts with random weights, routings of tokens, and x for them."""

from __future__ import annotations

import functools

import nf4
import torch
from torch import Tensor

from nf4bench.experts_cases import BLOCKSIZE, NESTED_BLOCKSIZE, Model

DTYPE = torch.bfloat16


class Stack:
    """Normal weights of all experts, quantized by us, NF4 with nested scales, and the same numbers
    dense."""

    def __init__(self, shape: tuple[int, int, int], place: str, format: str = "nf4") -> None:
        self.dense = torch.randn(shape, device=place, dtype=DTYPE)
        self.quantized = nf4.quantize(self.dense, format=format)
        nf4.dequantize(self.quantized, "bf16", out=self.dense)

    @functools.cached_property
    def packed(self) -> Tensor:
        """[experts, rows, columns / 2]."""
        experts, rows, cols = self.quantized.shape
        return self.quantized.packed.view(experts, rows, cols // 2)

    @functools.cached_property
    def scales(self) -> Tensor:
        """For peers that read flat ones: float32 [experts, rows, columns / blocksize]."""
        q = self.quantized
        inner = q.nested_absmax.repeat_interleave(NESTED_BLOCKSIZE)[: q.absmax.numel()]
        flat = q.nested_code[q.absmax.long()] * inner + q.nested_offset
        experts, rows, cols = q.shape
        return flat.view(experts, rows, cols // BLOCKSIZE)

    @functools.cached_property
    def room(self) -> Tensor:
        """For experts that are dequantized."""
        return torch.empty_like(self.dense)

    def nbytes(self, experts: float) -> float:
        """Of so many experts, packed with their scales."""
        elements = self.dense[0].numel()
        blocks = elements / self.quantized.blocksize
        nested = 4 * blocks / NESTED_BLOCKSIZE if self.quantized.nested else 0
        return experts * (elements / 2 + blocks + nested)


class Routing:
    """Each token to top_k experts at random. `ends` and `index` as nf4.matmul_grouped takes them;
    what the host knows of them is for peers that need it."""

    def __init__(self, model: Model, tokens: int, place: str) -> None:
        scores = torch.rand(tokens, model.experts, device=place)
        chosen, order = scores.topk(model.top_k).indices.flatten().sort(stable=True)
        every = torch.arange(model.experts, device=place)
        self.ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
        self.index = (order // model.top_k).int()
        self.experts = chosen
        counts = torch.bincount(chosen, minlength=model.experts).tolist()
        self.active = [expert for expert, count in enumerate(counts) if count]
        self.counts = [counts[expert] for expert in self.active]
        self.active_ends = self.ends[self.active].contiguous()
        self.active_index = torch.tensor(self.active, dtype=torch.int32, device=place)


class Operands:
    """Of one stack: x, of which libnf4 takes the rows by index or as they are, x sorted by expert
    for the others, and libnf4's y. One for all routings. Of a gradient x is dY, and y is dX."""

    def __init__(self, work: str, stack: Stack, tokens: int, first: Routing) -> None:
        _, rows, cols = stack.quantized.shape
        options = {"device": stack.dense.device, "dtype": DTYPE}
        self.stack, self.by_index, self.gradient = stack, work == "gate_up", work == "gradient"
        inner, outer = (rows, cols) if self.gradient else (cols, rows)
        self.x = torch.randn(tokens if self.by_index else len(first.index), inner, **options)
        self.sorted_x = self.x[first.index.long()] if self.by_index else self.x
        self.y = torch.empty(len(first.index), outer, **options)

    def right(self, dense: Tensor) -> Tensor:
        """What sorted_x is multiplied with, of dense experts: [experts, inner, outer]."""
        return dense if self.gradient else dense.transpose(1, 2)

    def expected(self, routing: Routing, rows: Tensor) -> Tensor:
        """Those rows of y in float64."""
        right = self.right(nf4.dequantize(self.stack.quantized, "fp32"))
        x, experts = self.sorted_x[rows].double(), routing.experts[rows]
        y = torch.empty(len(rows), self.y.shape[1], dtype=torch.float64, device=x.device)
        for expert in experts.unique().tolist():
            of_expert = experts == expert
            y[of_expert] = x[of_expert] @ right[expert].double()
        return y
