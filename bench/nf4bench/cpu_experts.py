"""A layer of Qwen3-30B-A3B's experts on the CPU: grouped products of libnf4, and of each active
expert a dequantize by libnf4 and torch's product. Another random routing in each call, in turns;
the ratio is that of the first deciles, which other work on the machine disturbs least."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator

import nf4
import torch
from torch import Tensor

from nf4bench.cpu_layers import DTYPES, first_decile, require_near
from nf4bench.experts_cases import BLOCKSIZE, NESTED_BLOCKSIZE, QWEN, Model
from nf4bench.table import Table, number, text

TOKENS, TURNS, WARM_UP = (1, 4, 16), 12, 2

TABLE = Table(
    text("work", "experts of a layer"), text("model", "{model}"), text("dtype", "{dtype}"),
    number("threads", "{threads}"), number("tokens", "{tokens}"), number("ms", "{ms:.2f}"),
    number("ms dequantize + torch", "{theirs_ms:.2f}"), number("speed-up", "{ratio:.2f}x"),
)  # fmt: skip


def stack(experts: int, rows: int, cols: int) -> list[nf4.QuantizedTensor]:
    """Each expert of a stack, and last the stack: all of the same numbers, in memory of their
    own."""
    one = nf4.quantize(
        torch.randn(rows, cols) / cols**0.5, blocksize=BLOCKSIZE, nested_blocksize=NESTED_BLOCKSIZE
    )
    if rows * cols % (BLOCKSIZE * NESTED_BLOCKSIZE):
        raise ValueError(f"{rows}x{cols} ends within a block of scales")
    parts = {name: getattr(one, name).view(-1) for name in ("packed", "absmax", "nested_absmax")}
    whole = {name: part.repeat(experts) for name, part in parts.items()}
    split = {name: part.chunk(experts) for name, part in whole.items()}
    each = [
        dataclasses.replace(one, **{name: part[expert] for name, part in split.items()})
        for expert in range(experts)
    ]
    return [*each, dataclasses.replace(one, shape=(experts, rows, cols), **whole)]


class Layer:
    """gate_up and then down, without activation."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.stacks = [stack(*model.shape(name)) for name in ("gate_up", "down")]

    @functools.cache  # noqa: B019  (as long as the layer)
    def _room(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """For a dense expert: new memory takes longer than what is written there."""
        return torch.empty(shape, dtype=dtype)

    def _inputs(self, x: Tensor) -> Iterator[tuple[list[nf4.QuantizedTensor], Tensor]]:
        """Each stack with its x, sorted by expert: down has a part of gate_up's, of which there is
        enough."""
        yield self.stacks[0], x
        yield self.stacks[1], x[:, : self.model.intermediate].contiguous()

    def routed(self, tokens: int) -> Tensor:
        """The experts of rows sorted by expert."""
        chosen = torch.rand(tokens, self.model.experts).topk(self.model.top_k).indices
        return chosen.flatten().sort().values

    def libnf4(self, x: Tensor, experts: Tensor, threads: int) -> list[Tensor]:
        ends = torch.bincount(experts, minlength=self.model.experts).cumsum(0).int()
        return [
            nf4.matmul_grouped(each, weights[-1], ends, threads=threads)
            for weights, each in self._inputs(x)
        ]

    def dequantized(self, x: Tensor, experts: Tensor, threads: int) -> list[Tensor]:
        dtype, counts = DTYPES[x.dtype], torch.bincount(experts, minlength=self.model.experts)
        made = []
        for weights, each in self._inputs(x):
            dense = self._room(weights[0].shape, x.dtype)
            parts = [
                rows @ nf4.dequantize(weights[expert], dtype, out=dense, threads=threads).t()
                for expert, rows in enumerate(each.split(counts.tolist()))
                if len(rows)
            ]
            made.append(torch.cat(parts))
        return made


def rows(layer: Layer, dtype: torch.dtype, threads: int) -> Iterator[dict]:
    """Raises WrongResult before anything is timed."""
    torch.set_num_threads(threads)
    for tokens in TOKENS:
        x = torch.randn(tokens * layer.model.top_k, layer.model.hidden).to(dtype)
        routed = layer.routed(tokens)
        y, expected = layer.libnf4(x, routed, threads), layer.dequantized(x, routed, threads)
        what = f"experts, {tokens} tokens"
        error = max(require_near(what, *each) for each in zip(y, expected, strict=True))
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(WARM_UP + TURNS):
            routed = layer.routed(tokens)
            for found, work in zip(times, (layer.libnf4, layer.dequantized), strict=True):
                begin = time.perf_counter()
                work(x, routed, threads)
                if turn >= WARM_UP:
                    found.append((time.perf_counter() - begin) * 1e3)
        ours, theirs = map(first_decile, times)
        yield {
            "model": layer.model.name, "dtype": DTYPES[dtype], "threads": threads,
            "tokens": tokens, "ms": round(ours, 4), "theirs_ms": round(theirs, 4),
            "ratio": round(theirs / ours, 3), "error": error,
        }  # fmt: skip


def run(threads: int, report: Callable[[str], None] = print, model: Model = QWEN) -> list[dict]:
    """All figures; the number of torch's threads is `threads` afterwards."""
    layer, each = (
        Layer(model),
        itertools.product((torch.bfloat16, torch.float32), sorted({1, threads})),
    )
    found = TABLE.told((row for given in each for row in rows(layer, *given)), report)
    torch.set_num_threads(threads)
    return found
