"""Models of quantized layers, whole and under FSDP2, and what a step of one gives: for checks by
several processes."""

import nf4.torch
import ranks
import torch
from nf4.torch import Int4Experts, Int4Linear, NF4Experts, NF4Linear
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

KINDS = ("nested", "flat", "gptq", "awq", "compressed-tensors", "act order")
WIDTH, X = 64, (5, 64)


def quantized(linear, kind):
    if kind == "nested":
        return NF4Linear.from_linear(linear)
    if kind == "flat":
        return NF4Linear.from_linear(linear, format="fp4", nested_blocksize=0)
    layout = "gptq" if kind == "act order" else kind
    made = Int4Linear.from_linear(linear, layout=layout, group_size=32, symmetric=kind == "awq")
    if kind != "act order":
        return made
    g_idx = torch.arange(linear.in_features, dtype=torch.int32) % (linear.in_features // 32)
    return Int4Linear.from_quantized(
        nf4.Int4Tensor(**{**vars_of(made.quantized), "g_idx": g_idx}), made.bias
    )


def vars_of(weight):
    names = ("layout", "shape", "group_size", "packed", "scales", "zeros")
    return {name: getattr(weight, name) for name in names}


class Block(nn.Module):
    """A frozen layer, one that is trained, a frozen one; of odd sizes if the kind allows it."""

    def __init__(self, kind):
        super().__init__()
        inner = 130 if kind in ("nested", "flat") else 160
        self.up = quantized(nn.Linear(WIDTH, inner), kind)
        self.trained = nn.Linear(inner, inner)
        self.down = quantized(nn.Linear(inner, WIDTH, bias=False), kind)

    def forward(self, x):
        return x + self.down(torch.relu(self.trained(self.up(x))))


class OfExperts(nn.Module):
    """Its first and second row go to an expert each, others to the third."""

    def __init__(self, seed=0, **options):
        super().__init__()
        torch.manual_seed(seed)
        self.trained = nn.Linear(WIDTH, WIDTH)
        dense = torch.randn(3, WIDTH, WIDTH)
        if "layout" in options:
            self.experts = Int4Experts(nf4.torch.quantize_int4(dense, group_size=32, **options))
        else:
            self.experts = NF4Experts.from_dense(dense, **options)

    def forward(self, x):
        ends = torch.tensor([1, 2, len(x)], dtype=torch.int32, device=x.device)
        return self.experts(self.trained(x), ends)


def model(kind, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(Block(kind), Block(kind)).to(ranks.place())


def inputs(seed=1):
    torch.manual_seed(seed)
    return torch.randn(X).to(ranks.place())


def all_ranks():
    """torch's own is of GPUs wherever it is built for them."""
    return init_device_mesh(ranks.place().type, (torch.distributed.get_world_size(),))


def shard(made, **options):
    options.setdefault("mesh", all_ranks())
    for block in made:
        fully_shard(block, **options)
    return fully_shard(made, **options)


def step(made, x):
    """y, the gradient of x and those of the parameters, by their names."""
    x = x.clone().requires_grad_()
    y = made(x)
    y.square().sum().backward()
    return y.detach(), x.grad, grads_of(made)


def grads_of(made):
    grads = {name: each.grad for name, each in made.named_parameters() if each.requires_grad}
    return {
        name: each.to(ranks.place()).full_tensor() if isinstance(each, DTensor) else each
        for name, each in grads.items()
    }


def require_same(found, expected):
    """y and dX have the same bits. Gradients of parameters are means over ranks that all had the
    same x; three times a number by three may be rounded."""
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert found[2].keys() == expected[2].keys() and found[2]
    for name, grad in expected[2].items():
        torch.testing.assert_close(found[2][name], grad, rtol=1e-6, atol=1e-6)
