"""The operators of a decode step, a layer at a time in a CUDA graph, on the same bytes in NF4:

    libnf4   as nf4.vllm calls them: one call a fused layer, and a grouped product for each stack of
             experts, on nested scales
    peer     as vllm-bnb-plugin 0.0.3 calls bitsandbytes: for each part of a fused layer a product
             and a copy into its columns; both stacks of experts are dequantized, and torch
             multiplies them by groups. The scales are flat, as that plugin makes them while it
             loads. Its experts are routed beforehand, so this is less than what the plugin does

What vLLM itself does for both is left out: attention, norms, the router.

python bench/vllm_operators.py [--layers 8] [--replays 30]
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata

import nf4.torch.bitsandbytes
import torch
from nf4.torch._weight import WeightParts
from nf4.vllm import products
from nf4.vllm.cuts import flat
from nf4.vllm.loading import register
from nf4bench.device import Gpu
from nf4bench.measure import measure
from nf4bench.product import require
from torch import Tensor, nn

DTYPE = torch.bfloat16
MOST_ERROR = 2e-2


@dataclass(frozen=True)
class Size:
    """fused: the rows of each part, and the columns, of a layer's linear layers. experts: how many,
    how many a token has, hidden and intermediate size; None: none."""

    name: str
    fused: tuple[tuple[tuple[int, ...], int], ...]
    experts: tuple[int, int, int, int] | None = None


LLAMA_7B = Size(
    "LLaMA-7B",
    (((4096,) * 3, 4096), ((4096,), 4096), ((11008,) * 2, 4096), ((4096,), 11008)),
)
QWEN3_30B = Size("Qwen3-30B-A3B", (((4096, 512, 512), 2048), ((2048,), 4096)), (128, 8, 2048, 768))
BATCHES = (1, 8)


def quantized(*shape: int, place: str) -> nf4.QuantizedTensor:
    dense = torch.randn(shape, device=place, dtype=DTYPE) / shape[-1] ** 0.5
    return nf4.torch.quantize(dense)


def quant_state(weight: nf4.QuantizedTensor) -> object:
    """bitsandbytes' QuantState of a weight, with flat scales."""
    from bitsandbytes.functional import QuantState

    table = torch.from_numpy(nf4.codebook("nf4").copy()).to(weight.packed.device)
    return QuantState(
        absmax=flat(weight).absmax, shape=torch.Size(weight.shape), dtype=DTYPE,
        blocksize=weight.blocksize, code=table, quant_type="nf4",
    )  # fmt: skip


class Fused:
    """Linear layers that share x [m, columns]."""

    def __init__(self, rows: Sequence[int], cols: int, m: int, place: str) -> None:
        weights = [quantized(count, cols, place=place) for count in rows]
        self._layer = nn.Module()
        self._layer.nf4_specs = tuple(
            register(self._layer, f"weight{i or ''}", each) for i, each in enumerate(weights)
        )
        self._peers = [(each.packed.view(-1, 1), quant_state(each)) for each in weights]
        self._rows = sum(rows)
        self._x = torch.randn(m, cols, device=place, dtype=DTYPE)

    def libnf4(self) -> Tensor:
        return products.linear(self._layer, self._x, None)

    def peer(self) -> Tensor:
        from bitsandbytes import matmul_4bit

        y, begin = self._x.new_empty(len(self._x), self._rows), 0
        for packed, state in self._peers:
            end = begin + state.shape[0]
            y[:, begin:end] = matmul_4bit(self._x, packed.t(), state)
            begin = end
        return y


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


class Experts:
    """The experts of a layer, of which each token has top_k at random."""

    def __init__(
        self, count: int, top_k: int, hidden: int, intermediate: int, m: int, place: str
    ) -> None:
        stacks = {
            "w13": quantized(count, 2 * intermediate, hidden, place=place),
            "w2": quantized(count, hidden, intermediate, place=place),
        }
        self._layer = nn.Module()
        self._layer.expert_map = None
        for name, weight in stacks.items():
            names, _ = register(self._layer, f"{name}_weight", weight)
            setattr(self._layer, f"nf4_{name}", (names, WeightParts.of(weight).spec))
        self._peers = [(each.packed.view(-1, 1), quant_state(each)) for each in stacks.values()]
        self._x = torch.randn(m, hidden, device=place, dtype=DTYPE)
        scores = torch.rand(m, count, device=place)
        self._ids = scores.topk(top_k).indices.int()
        self._weights = torch.softmax(torch.rand(m, top_k, device=place), dim=-1)
        chosen, self._order = self._ids.flatten().sort(stable=True)
        every = torch.arange(count, device=place, dtype=torch.int32)
        self._ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
        self._sorted_x = self._x[self._order // top_k]

    def libnf4(self) -> Tensor:
        return products.experts(self._layer, self._x, self._weights, self._ids, silu_and_mul)

    def peer(self) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        w13, w2 = (dequantize_4bit(packed, state) for packed, state in self._peers)
        gate_up = torch._grouped_mm(self._sorted_x, w13.transpose(1, 2), offs=self._ends)
        y = torch._grouped_mm(silu_and_mul(gate_up), w2.transpose(1, 2), offs=self._ends)
        y = torch.empty_like(y).index_copy_(0, self._order, y).view(*self._ids.shape, -1)
        return (y * self._weights.unsqueeze(-1)).sum(dim=1).to(DTYPE)


class Layer:
    def __init__(self, size: Size, m: int, place: str) -> None:
        self._parts: list[Fused | Experts] = [Fused(*each, m, place) for each in size.fused]
        if size.experts:
            self._parts.append(Experts(*size.experts, m, place))

    def run(self, name: str, stream: int = 0) -> list[Tensor]:
        """name: "libnf4" or "peer"."""
        return [getattr(part, name)() for part in self._parts]

    def check(self) -> float:
        """Returns the largest error. Raises WrongResult."""
        pairs = zip(self.run("libnf4"), self.run("peer"), strict=True)
        return max(require("libnf4", MOST_ERROR, theirs, ours) for ours, theirs in pairs)


@torch.no_grad()
def times(size: Size, m: int, layers: int, gpu: Gpu, replays: int) -> tuple[float, float, float]:
    """Returns microseconds of a layer by libnf4 and by the peer, and the largest error."""
    made = [Layer(size, m, gpu.place) for _ in range(layers)]
    error = max(layer.check() for layer in made)
    launches: dict[str, list[Callable]] = {
        name: [partial(layer.run, name) for layer in made] for name in ("libnf4", "peer")
    }
    found = measure(gpu, launches, replays)
    return found["libnf4"].us, found["peer"].us, error


def main() -> None:
    parser = argparse.ArgumentParser(description="The operators of a decode step, by plugin.")
    parser.add_argument("--layers", type=int, default=8, help="each has weights of its own")
    parser.add_argument("--replays", type=int, default=30)
    arguments = parser.parse_args()
    if nf4.torch.bitsandbytes.served() is not None:
        sys.exit("libnf4 serves bitsandbytes here; run with NF4_BITSANDBYTES=0")
    gpu = Gpu()
    versions = ", ".join(f"{each} {metadata.version(each)}" for each in ("torch", "bitsandbytes"))
    print(f"{datetime.date.today()}, {gpu.name}, {versions}\n")
    print("| layer | batch | libnf4, us | peer, us | libnf4 / peer | error |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for size in (LLAMA_7B, QWEN3_30B):
        for m in BATCHES:
            ours, theirs, error = times(size, m, arguments.layers, gpu, arguments.replays)
            figures = f"{ours:.1f} | {theirs:.1f} | {ours / theirs:.3f} | {error:.1e}"
            print(f"| {size.name} | {m} | {figures} |", flush=True)
            gpu.release()


if __name__ == "__main__":
    main()
