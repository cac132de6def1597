"""Models whose layers are siblings, for the tests of them captured and compiled."""

from __future__ import annotations

import copy

import nf4.torch
import torch
from nf4.torch import Int4Linear, NF4Linear

IN = 64
SIZES = {"q_proj": (32, True), "k_proj": (16, False), "v_proj": (24, True)}


class Attention(torch.nn.Module):
    def __init__(self, make=NF4Linear.from_linear):
        super().__init__()
        for name, (rows, bias) in SIZES.items():
            setattr(self, name, make(torch.nn.Linear(IN, rows, bias=bias)))

    def forward(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class Cross(Attention):
    """k and v are of something else."""

    def forward(self, x, key_value_states):
        return self.q_proj(x), self.k_proj(key_value_states), self.v_proj(key_value_states)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("gate_proj", "up_proj"):
            setattr(self, name, NF4Linear.from_linear(torch.nn.Linear(IN, 40)))

    def forward(self, x):
        return self.gate_proj(x) * self.up_proj(x)


def both(make=Attention, *arguments):
    """A model whose layers are siblings, and one whose layers are not."""
    alone = make(*arguments)
    joined = copy.deepcopy(alone)
    assert nf4.torch.convert(joined, siblings="all") == []
    return joined, alone


def integers(layout):
    return lambda linear: Int4Linear.from_linear(linear, layout=layout, group_size=32)


def same(found, expected):
    found, expected = ((each,) if torch.is_tensor(each) else each for each in (found, expected))
    return all(map(torch.equal, found, expected)) and [y.dtype for y in found] == [
        y.dtype for y in expected
    ]


def grads_of(model, x, run=None):
    """Of x and of what may be trained."""
    x = x.clone().requires_grad_()
    ys = (model if run is None else run)(x)
    parameters = [each for each in model.parameters() if each.requires_grad]
    for each in parameters:
        each.grad = None
    sum(y.float().sin().sum() for y in ([ys] if torch.is_tensor(ys) else ys)).backward()
    return [each.grad for each in (x, *parameters)]
