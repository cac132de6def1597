"""Every class of experts of transformers that its own grouped_mm serves, with weights in 4 bits,
beside that grouped_mm with the dequantized weights."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "in_process")]
torch_cases.require("torch", "transformers")

import torch  # noqa: E402
import transformers  # noqa: E402
from nf4.checkpoint.stacks import names_of  # noqa: E402
from nf4.torch import NF4Experts, experts  # noqa: E402
from torch import nn  # noqa: E402

EXPERTS, HIDDEN, INNER = 4, 64, 32
MODELS = Path(transformers.__file__).parent / "models"
DECORATED = re.compile(r"^@use_experts_implementation\b.*\n(?:@.*\n)*class (\w+)", re.M)
CLASSES = {
    name: path
    for path in sorted(MODELS.glob("*/modeling_*.py"))
    for name in DECORATED.findall(path.read_text(encoding="utf-8"))
}


def arguments(path):
    """Functions: what the constructors of its models may take."""
    parts = path.relative_to(MODELS.parent).with_suffix("").parts
    name = ".".join(("transformers", *parts)).replace("modeling_", "configuration_")
    module = importlib.import_module(name)
    for name, each in inspect.getmembers(module, inspect.isclass):
        if name.endswith("Config") and each.__module__ == module.__name__:
            yield lambda each=each: (each(),)
            yield lambda each=each: (each(), INNER)  # where a parent says the size
            for experts in ("num_experts", "n_routed_experts"):
                names = {experts: EXPERTS, "moe_intermediate_size": INNER}
                yield lambda each=each, names=names: (each(**names),)


def made_of(name):
    """One of the class, on meta, with the first config that suits."""
    path = CLASSES[name]
    parts = path.relative_to(MODELS.parent).with_suffix("").parts
    found = getattr(importlib.import_module(".".join(("transformers", *parts))), name)
    why = None
    for make in arguments(path):
        try:
            with torch.device("meta"):
                return found(*make())
        except Exception as error:  # of any kind: these are classes of many authors
            why = error
    raise AssertionError(f"no config makes a {name}") from why


def shrunk(module):
    """The module with small weights, which are all that it computes with."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    inner = 2 * INNER if module.has_gate else INNER
    for name, (rows, cols) in {first: (inner, HIDDEN), "down_proj": (HIDDEN, INNER)}.items():
        weight = 0.1 * torch.randn(EXPERTS, rows, cols)
        weight = weight.transpose(1, 2).contiguous() if module.is_transposed else weight
        setattr(module, name, nn.Parameter(weight))
        if module.has_bias:
            setattr(module, f"{name}_bias", nn.Parameter(0.1 * torch.randn(EXPERTS, rows)))
    if module.has_post_expert_norm:
        module.post_expert_norm = nn.LayerNorm(HIDDEN)
    module.num_experts, module.config = EXPERTS, copy.deepcopy(module.config)
    return module


def test_there_are_classes():
    assert {"GptOssExperts", "MixtralExperts", "Qwen3MoeExperts"} <= CLASSES.keys()


@pytest.mark.parametrize("name", CLASSES)
def test_its_outputs_are_those_of_grouped_mm(name):
    module = shrunk(made_of(name))
    holder = nn.ModuleDict({"experts": module})
    stacks = names_of(module)
    assert len(stacks) == 2
    for stack in stacks:
        experts.quantize_stack(holder, f"experts.{stack}", None)
    x = torch.randn(7, HIDDEN)
    weights, chosen = torch.rand(7, EXPERTS).topk(2)
    y = module(x, chosen, weights)
    for stack in stacks:
        quantized = getattr(module, stack)
        assert isinstance(quantized, NF4Experts)
        dense = quantized.dequantize()
        delattr(module, stack)
        dense = dense.transpose(1, 2).contiguous() if module.is_transposed else dense
        setattr(module, stack, nn.Parameter(dense))
    module.config._experts_implementation = "grouped_mm"
    torch.testing.assert_close(y, module(x, chosen, weights), rtol=1e-4, atol=1e-5)
