"""What test_gpu_distributed.py has two processes check, each with a GPU: layers that are cut,
beside the same layers on one GPU."""

import gc

import nf4.torch
import torch
from nf4.torch import Int4Linear, NF4Linear
from nf4.torch.distributed import ColwiseParallel, RowwiseParallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

IN, INNER, DTYPE = 1024, 4096, torch.bfloat16
# By norm. y and gradients are sums of two halves that are rounded to bf16.
ALLOWED = 8e-3
PLAN = {
    "gate_proj": ColwiseParallel,
    "up_proj": ColwiseParallel,
    "down_proj": RowwiseParallel,
}


class MLP(nn.Module):
    def __init__(self, make):
        super().__init__()
        for name, shape in (
            ("gate_proj", (IN, INNER)), ("up_proj", (IN, INNER)), ("down_proj", (INNER, IN)),
        ):  # fmt: skip
            setattr(self, name, make(nn.Linear(*shape, device="cuda", dtype=DTYPE)))

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


MAKES = {
    "nested": NF4Linear.from_linear,
    "gptq": lambda linear: Int4Linear.from_linear(linear, layout="gptq"),
    "awq": lambda linear: Int4Linear.from_linear(linear, layout="awq", symmetric=False),
    "compressed-tensors": lambda linear: Int4Linear.from_linear(
        linear, layout="compressed-tensors"
    ),
}


def both(kind, world):
    """Whole, and cut."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(MLP(MAKES[kind]))
    mesh = init_device_mesh("cuda", (world,))
    parallelize_module(made[1], mesh, {name: style() for name, style in PLAN.items()})
    for each in made:
        nf4.torch.convert(each, siblings="all")
    return made


def close(found, expected):
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < ALLOWED, error.item()


def x_of(rows, seed=1):
    torch.manual_seed(seed)
    return torch.randn(rows, IN, device="cuda", dtype=DTYPE)


def check_products(rank, world):
    for kind in MAKES:
        whole, cut = both(kind, world)
        for rows in (1, 16, 64, 512):
            x = x_of(rows)
            given, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
            y, reference = cut(given), whole(expected)
            close(y.detach(), reference.detach())
            reference.float().square().sum().backward()
            y.float().square().sum().backward()
            close(given.grad, expected.grad)
            close(cut.down_proj.bias.grad, whole.down_proj.bias.grad)
            theirs = whole.up_proj.bias.grad.chunk(world)[rank]
            close(cut.up_proj.bias.grad, theirs)
            whole.zero_grad(), cut.zero_grad()
            with torch.no_grad():
                close(cut(x), reference.detach())


def check_cuda_graphs(rank, world):
    """With the all-reduces inside, and siblings in one call."""
    for kind in ("nested", "gptq"):
        _, cut = both(kind, world)
        x = x_of(1)
        stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(stream):
            cut(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                y = cut(x)
            for seed in (2, 3):
                x.copy_(x_of(1, seed))
                graph.replay()
                assert torch.equal(y, cut(x)), kind
        torch.cuda.synchronize()
        # A process group is not destroyed while a graph holds its collectives.
        del graph, y
        gc.collect()


def check_compiled(rank, world):
    _, cut = both("nested", world)
    compiled = torch.compile(cut, fullgraph=True, dynamic=False)
    x = x_of(1)
    with torch.no_grad():
        close(compiled(x), cut(x))
