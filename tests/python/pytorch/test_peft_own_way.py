"""What goes PEFT's own way, with its results, rather than as one product."""

from __future__ import annotations

import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "served")]
torch_cases.require("torch", "bitsandbytes", "peft", "_nf4_fast")

import peft  # noqa: E402
import torch  # noqa: E402
from nf4.torch.peft import layers  # noqa: E402
from peft_cases import (  # noqa: E402
    BASES,
    IN,
    adapted,
    base,
    dense,
    layer_of,
    pair,
    randomize,
    require_equal,
    results,
    trained,
)
from torch import nn  # noqa: E402


def _hook(model):
    layer_of(model).lora_B["default"].register_forward_hook(lambda module, x, y: 2 * y)


def _hook_of_base(model):
    layer_of(model).base_layer.register_forward_hook(lambda module, x, y: 2 * y)


def _parametrized(model):
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    nn.utils.parametrize.register_parametrization(
        layer_of(model).lora_A["default"], "weight", Twice()
    )


def _several(model):
    model.add_adapter(
        "other", peft.LoraConfig(r=4, lora_alpha=4, target_modules=["linear"], lora_dropout=0.0)
    )
    model.base_model.set_adapter(["default", "other"])
    randomize(model, 3)


def _replaced_forward(model):
    base_layer = layer_of(model).base_layer
    original = base_layer.forward
    base_layer.forward = lambda x: 2 * original(x)


def _double(model):
    layer_of(model).lora_A.double()
    layer_of(model).lora_B.double()


CHANGES = {
    "a hook of B": _hook,
    "a hook of the base": _hook_of_base,
    "a parametrization of A": _parametrized,
    "two adapters": _several,
    "a forward of its own": _replaced_forward,
    "adapters in fp64": _double,
    "a bias of B": None,
    "DoRA": None,
}  # fmt: skip
OPTIONS = {"a bias of B": {"lora_bias": True}, "DoRA": {"use_dora": True}}


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("change", CHANGES)
def test_what_goes_pefts_way(kind, change, fused):
    ours, theirs = pair(kind, bias=True, **OPTIONS.get(change, {}))
    for each in (ours, theirs):
        if CHANGES[change]:
            CHANGES[change](each)
    x = torch.randn(4, IN)
    found = results(ours, x)
    assert fused.count == 0
    require_equal(found, results(theirs, x), 2e-6)


@pytest.mark.parametrize("kind", BASES)
def test_dropout_in_training_alone(kind, fused):
    ours, theirs = pair(kind, lora_dropout=0.5)
    x = torch.randn(4, IN)
    found = []
    for each in (ours, theirs):
        torch.manual_seed(5)
        found.append(each.train()(x))
    assert fused.count == 0
    require_equal(found[:1], found[1:], 2e-6)
    require_equal(results(ours.eval(), x), results(theirs.eval(), x), 2e-6)
    assert fused.count == 1


def test_a_batch_of_several_adapters(fused):
    ours, theirs = pair("NF4Linear")
    x, names = torch.randn(3, IN), ["default", "__base__", "default"]
    for each in (ours, theirs):
        each.eval()
    with torch.no_grad():
        require_equal([ours(x, adapter_names=names)], [theirs(x, adapter_names=names)], 2e-6)
    assert fused.count == 0


def test_a_subclass(fused):
    ours, theirs = pair("NF4Linear")
    layer_of(ours).__class__ = type("Own", (type(layer_of(ours)),), {})
    x = torch.randn(3, IN)
    require_equal(results(ours, x), results(theirs, x), 2e-6)
    assert fused.count == 0


def test_x_in_another_dtype(fused):
    """PEFT multiplies the adapter in fp32 then."""
    linear = base("Linear4bit", torch.bfloat16, False)
    ours = adapted(linear)
    y = ours(torch.randn(3, IN))
    assert y.dtype == torch.float32 and fused.count == 0


def test_torch_compile(fused):
    ours, theirs = pair("NF4Linear")
    x = torch.randn(3, IN)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    require_equal(results(compiled, x), results(theirs, x), 2e-6)
    assert fused.count == 0


def test_one_of_several_adapters(fused):
    ours, theirs = pair("NF4Linear")
    for each in (ours, theirs):
        each.add_adapter("other", peft.LoraConfig(r=4, lora_alpha=4, target_modules=["linear"]))
        randomize(each, 3)
        each.set_adapter("other")
    x = torch.randn(3, IN)
    require_equal(results(ours, x), results(theirs, x), 2e-6)
    assert fused.count == 1
    with ours.disable_adapter(), theirs.disable_adapter():
        require_equal([ours(x)], [theirs(x)], 2e-6)
    assert fused.count == 1


@pytest.mark.parametrize("kind", BASES)
def test_fp32_adapters_beside_fp16(kind, fused):
    """x A^T is beyond fp16's range, and y is not."""
    linear = base(kind, torch.float16, False)
    ours, theirs = adapted(linear), adapted(dense(linear))
    for each in (ours, theirs):
        layer_of(each).lora_A["default"].weight.data.fill_(10.0)
        layer_of(each).lora_B["default"].weight.data.mul_(1e-4)
    x = torch.full((3, IN), 100.0).half()
    found = results(ours, x)
    assert fused.count == 0 and all(each.isfinite().all() for each in found)
    require_equal(found, results(theirs, x), 2e-3)


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("scale", [nn.Parameter(torch.tensor(1.5)), torch.tensor(1.5)])
def test_a_scale_that_is_a_tensor(kind, scale, fused):
    ours, theirs = pair(kind)
    for each in (ours, theirs):
        layer_of(each).scaling["default"] = scale
    x = torch.randn(3, IN)
    require_equal(results(ours, x), results(theirs, x), 2e-6)
    if scale.requires_grad:
        grads = (torch.autograd.grad(each(x).sum(), scale) for each in (ours, theirs))
        require_equal(*grads, 2e-6)
    assert fused.count == 0


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("frozen", ["lora_A", "lora_B"])
def test_a_frozen_half(kind, frozen, fused):
    """As LoRA-FA has it. Beside a frozen A, x is not kept, and may be changed in place."""
    ours, theirs = pair(kind)
    kept, found = [], []
    for each in (ours, theirs):
        getattr(layer_of(each), frozen)["default"].requires_grad_(False)
        x = torch.linspace(-1, 1, 3 * IN).view(3, IN)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (kept.append(t.shape), t)[1], lambda t: t
        ):
            y = each(x)
        if frozen == "lora_A":
            x.zero_()
        found.append([y, *torch.autograd.grad(y.pow(2).sum(), trained(each))])
    require_equal(*found, 2e-6)
    assert ((3, IN) in kept) == (frozen == "lora_B")
    with torch.no_grad():
        assert fused.count == 0
        ours(x)
    assert fused.count == 1


def test_a_dense_base_is_told_at_once(monkeypatch):
    model = adapted(dense(base("NF4Linear", torch.float32, False)))
    monkeypatch.setattr(layers, "_adapter", None)
    monkeypatch.setattr(layers._private, "is_idle", None)
    assert model(torch.randn(3, IN)).isfinite().all()
