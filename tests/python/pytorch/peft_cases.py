"""A model of one linear layer with PEFT's adapters: over a base of 4 bits, and over the same
weight, dense."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import bitsandbytes as bnb
import nf4.torch
import peft
import pytest
import torch
from nf4.torch.peft import layers
from torch import nn

IN, OUT, RANK = 128, 192, 8
BASES = ("NF4Linear", "Linear4bit", "Int4Linear")
FORMATS = ("nf4", "mxfp4", "nvfp4")


class Model(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.one = nn.Parameter(torch.ones(()), requires_grad=False)  # PEFT asks for its device
        self.is_loaded_in_4bit = isinstance(linear, bnb.nn.Linear4bit)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def base(kind: str, dtype: torch.dtype, bias: bool, format: str = "nf4") -> nn.Module:
    """format: of an NF4Linear."""
    weight = torch.randn(OUT, IN, dtype=dtype) * IN**-0.5
    made = bnb.nn.Linear4bit(IN, OUT, bias=bias, compute_dtype=dtype, quant_type="nf4")
    made.support_avx512bf16_for_cpu = False
    made.weight.data = weight
    made = made.to("cpu")
    if bias:
        made.bias = nn.Parameter(torch.randn(OUT, dtype=dtype), requires_grad=False)
    linear = nn.Linear(IN, OUT, bias=False)
    linear.weight, linear.bias = nn.Parameter(weight), made.bias
    if kind == "Int4Linear":
        return nf4.torch.Int4Linear.from_linear(linear, group_size=32, compute_dtype=dtype)
    if format != "nf4":
        return nf4.torch.NF4Linear.from_linear(linear, format=format, compute_dtype=dtype)
    return made if kind == "Linear4bit" else nf4.torch.NF4Linear.from_bitsandbytes(made)


def dense(linear: nn.Module) -> nn.Linear:
    """The same weight."""
    if isinstance(linear, bnb.nn.Linear4bit):
        linear = nf4.torch.NF4Linear.from_bitsandbytes(linear)
    made = linear.to_linear(linear.compute_dtype)
    made.bias = copy.deepcopy(made.bias)
    return made


def adapted(linear: nn.Module, seed: int = 1, **options) -> peft.PeftModel:
    """With weights that are not zero. PEFT's adapters are fp32 unless `adapters` says more."""
    dtype = options.pop("adapters", torch.float32)
    config = {"r": RANK, "lora_alpha": 12, "target_modules": ["linear"]} | options
    made = peft.get_peft_model(Model(linear), peft.LoraConfig(**config))
    randomize(made, seed, dtype)
    return made


def randomize(model: nn.Module, seed: int, dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = (0.2 * torch.randn(parameter.shape)).to(dtype)
        if "magnitude" in name:
            parameter.data = parameter.data.abs() + 0.5


def pair(
    kind: str, dtype=torch.float32, bias=False, format="nf4", **options
) -> list[peft.PeftModel]:
    """Over 4 bits, and over the dense weight."""
    linear = base(kind, dtype, bias, format)
    return [adapted(each, **options) for each in (linear, dense(linear))]


def layer_of(model: peft.PeftModel) -> nn.Module:
    return model.base_model.model.linear


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def results(model: nn.Module, x: torch.Tensor, *arguments, **options) -> list[torch.Tensor]:
    """y, and the gradients of x and of what is trained."""
    x = x.detach().clone().requires_grad_()
    y = model(x, *arguments, **options)
    torch.manual_seed(9)
    grads = torch.autograd.grad(y, [x, *trained(model)], torch.randn(y.shape).to(y.dtype))
    return [y, *grads]


def require_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor], most: float) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert (a.double() - b.double()).norm() <= most * b.double().norm()


class Fused:
    """How many calls of layers have come to one product."""

    def __init__(self) -> None:
        self.count = 0


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fused]:
    fused, product = Fused(), layers.fused_forward

    def counting(*arguments):
        y = product(*arguments)
        fused.count += y is not None
        return y

    with monkeypatch.context() as patch:
        patch.setattr(layers, "fused_forward", counting)
        yield fused
