"""One token through decoder layers of LLaMA-70B's shape under tensor parallelism, as each of
torchrun's processes runs it: NF4Linear and dense layers, cut over the GPUs, and whole on each. A
CUDA graph holds all layers, with their all-reduces; layers of NF4Linear also compiled by
torch.compile, which makes norms and other small work faster alike."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from nf4.torch import NF4Linear, _siblings
from nf4.torch.distributed import ColwiseParallel, RowwiseParallel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from nf4bench.measure import summary, taken
from nf4bench.models_llama import DTYPE, EPSILON, Mlp, random_weight
from nf4bench.product import require

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, CONTEXT = 8192, 28672, 64, 8, 512
HEAD, LAYERS = HIDDEN // HEADS, 4
REPLAYS, TURNS = 4, 15
CUT, ONE, DENSE, DENSE_ONE = "libnf4", "libnf4, one GPU", "dense", "dense, one GPU"
FORMS = (CUT, ONE, DENSE, DENSE_ONE)
COMPILED = {CUT: "libnf4, compiled", ONE: "libnf4, one GPU, compiled"}
MOST_ERROR = 2e-2  # both round y to bf16 after each product, and sums are of rounded halves
_SHAPES = {
    "q_proj": (HIDDEN, HIDDEN),
    "k_proj": (KV_HEADS * HEAD, HIDDEN),
    "v_proj": (KV_HEADS * HEAD, HIDDEN),
    "o_proj": (HIDDEN, HIDDEN),
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}
_ROWWISE = ("o_proj", "down_proj")


class Attention(nn.Module):
    """Of one token, over a cache of keys and values for this rank's heads, whose last place it
    takes."""

    def __init__(self, linears: Mapping[str, nn.Module], cache: Tensor) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, linears[name])
        self.register_buffer("cache", cache)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).view(1, -1, 1, HEAD) for each in (self.q_proj, self.k_proj, self.v_proj))
        keys, values = self.cache
        keys[:, :, -1:], values[:, :, -1:] = k, v
        seen = functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        return self.o_proj(seen.view(1, 1, -1))


class Layer(nn.Module):
    def __init__(self, linears: Mapping[str, nn.Module], cache: Tensor) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(linears, cache), Mlp(linears)
        self.register_buffer("norm", torch.ones(HIDDEN, dtype=DTYPE, device=cache.device))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(functional.rms_norm(x, (HIDDEN,), self.norm, EPSILON))
        return x + self.mlp(functional.rms_norm(x, (HIDDEN,), self.norm, EPSILON))


def _linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def _plan() -> dict[str, Any]:
    parents = {name: "attention" if name[0] in "qkvo" else "mlp" for name in _SHAPES}
    return {
        f"{parents[name]}.{name}": RowwiseParallel() if name in _ROWWISE else ColwiseParallel()
        for name in _SHAPES
    }


def models(place: str, mesh: Any) -> dict[str, nn.Sequential]:
    """By form, of the same weights: dense layers have those of NF4Linear."""
    layers: dict[str, list[Layer]] = {form: [] for form in FORMS}
    rank, world = mesh.get_local_rank(), mesh.size()
    for _ in range(LAYERS):
        linears: dict[str, dict[str, nn.Module]] = {form: {} for form in FORMS}
        for name, shape in _SHAPES.items():
            quantized = NF4Linear.from_linear(_linear(random_weight(*shape, place)))
            again = NF4Linear.from_quantized(quantized.quantized)
            dense = quantized.dequantize(DTYPE)
            made = (again, quantized, _linear(dense), _linear(dense))
            for form, each in zip(FORMS, made, strict=True):
                linears[form][name] = each
        cache = torch.randn(2, 1, KV_HEADS, CONTEXT, HEAD, dtype=DTYPE, device=place)
        for form in FORMS:
            own = cache.clone()
            if form in (CUT, DENSE):
                own = own.chunk(world, 2)[rank].clone()
            layer = Layer(linears[form], own)
            if form in (CUT, DENSE):
                parallelize_module(layer, mesh, _plan())
            layers[form].append(layer)
    found = {form: nn.Sequential(*each) for form, each in layers.items()}
    for form in (CUT, ONE):
        _siblings.join(found[form], unknown=True)
    return found


def _call(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


class Step:
    """A captured step of all layers."""

    def __init__(self, model: nn.Sequential, x: Tensor, compiles: bool = False) -> None:
        run = torch.compile(_call, fullgraph=True, dynamic=False) if compiles else _call
        self.stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(self.stream):
            for _ in range(2):
                functools.reduce(lambda x, layer: run(layer, x), model, x)
            torch.cuda.synchronize()
            dist.barrier()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.y = functools.reduce(lambda x, layer: run(layer, x), model, x)

    def __call__(self) -> float:
        """Microseconds of one layer, of the rank that takes longest."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.stream(self.stream):
            self.graph.replay()
            began.record()
            for _ in range(REPLAYS):
                self.graph.replay()
            ended.record()
        torch.cuda.synchronize()
        taken = began.elapsed_time(ended) * 1e3 / (REPLAYS * LAYERS)
        longest = torch.tensor(taken, device=self.y.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return longest.item()


def run(place: str) -> Mapping[str, Any]:
    """The figures, us of a layer; the same on every rank. Raises WrongResult before anything is
    timed. Graphs are gone when it returns: no process group is destroyed before them."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)
    made = models(place, mesh)
    x = torch.randn(1, 1, HIDDEN, dtype=DTYPE, device=place)
    steps = {form: Step(model, x) for form, model in made.items()}
    steps |= {name: Step(made[form], x, compiles=True) for form, name in COMPILED.items()}
    for each in steps.values():
        each()
    errors = {
        form: float(f"{require(form, MOST_ERROR, steps[ONE].y, each.y):.3e}")
        for form, each in steps.items()
    }
    times = taken(steps, TURNS, 1, rotate=True)
    return {form: summary(each).figures() | {"error": errors[form]} for form, each in times.items()}
