"""PEFT's LoRA layers over weights in 4 bits as one product: beside PEFT over the same weights,
dense; and what goes PEFT's own way."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "served")]
torch_cases.require("torch", "bitsandbytes", "peft", "_nf4_fast")

import peft  # noqa: E402
import torch  # noqa: E402
from nf4.torch import _fast  # noqa: E402
from nf4.torch import peft as nf4_peft  # noqa: E402
from peft_cases import (  # noqa: E402
    BASES,
    IN,
    RANK,
    adapted,
    base,
    counted,
    layer_of,
    pair,
    randomize,
    require_equal,
    results,
)
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

if not _fast.registered:
    pytest.skip("this torch has not what C++ needs", allow_module_level=True)

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


@pytest.fixture
def fused(monkeypatch):
    with counted(monkeypatch) as found:
        yield found


# ---- The same results ------------------------------------------------------------------


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(IN,), (3, IN), (2, 5, IN), (0, IN)])
def test_one_product_as_over_a_dense_weight(kind, dtype, narrow, bias, shape, fused):
    """y, and the gradients of x, A and B in their dtypes."""
    ours, theirs = pair(kind, dtype, bias, adapters=dtype if narrow else torch.float32)
    x = torch.randn(shape).to(dtype)
    found = results(ours, x)
    assert fused.count == 1
    require_equal(found, results(theirs, x), ROUNDING[dtype])
    assert fused.count == 1
    with torch.no_grad():
        assert torch.equal(ours(x), found[0])
    assert fused.count == 2


@pytest.mark.parametrize("options", [{"use_rslora": True}, {"lora_alpha": 1}, {"r": 1}, {"r": 40}])
def test_scales_and_ranks(options, fused):
    ours, theirs = pair("NF4Linear", **options)
    x = torch.randn(4, IN)
    require_equal(results(ours, x), results(theirs, x), 2e-6)
    layer_of(ours).set_scale("default", 3.0)
    layer_of(theirs).set_scale("default", 3.0)
    require_equal(results(ours, x), results(theirs, x), 2e-6)
    assert fused.count == 2


def test_a_bias_that_is_trained(fused):
    ours, theirs = pair("NF4Linear", bias=True)
    for each in (ours, theirs):
        layer_of(each).base_layer.bias.requires_grad_()
    x = torch.randn(2, 3, IN)
    require_equal(results(ours, x), results(theirs, x), 2e-6)
    assert fused.count == 1


@pytest.mark.parametrize("transform", [
    lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[..., :1].expand(x.shape),
])  # fmt: skip
def test_x_of_any_strides(transform):
    ours, theirs = pair("NF4Linear")
    x = transform(torch.randn(4, 6, IN))
    require_equal(
        [ours(x), *torch.autograd.grad(ours(x).sum(), _trained(ours))],
        [theirs(x), *torch.autograd.grad(theirs(x).sum(), _trained(theirs))],
        3e-6,
    )


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


@pytest.mark.parametrize("kind", BASES)
def test_the_derivatives_are_right(kind, fused):
    """By differences: y is linear in each argument, so that wide ones are exact."""
    layer = layer_of(pair(kind)[0])
    x = torch.randn(2, IN, requires_grad=True)
    inputs = [x, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    y_of = layer(x)
    grads = torch.autograd.grad(y_of, inputs, torch.ones_like(y_of))
    for tensor, grad in zip(inputs, grads, strict=True):
        direction = torch.randn_like(tensor)
        with torch.no_grad():
            tensor += direction
            above = layer(x).double().sum()
            tensor -= 2 * direction
            below = layer(x).double().sum()
            tensor += direction
        expected = (above - below) / 2
        assert torch.isclose((grad.double() * direction).sum(), expected, rtol=1e-4, atol=1e-3)
    assert fused.count == 7


@pytest.mark.parametrize("kind", BASES)
def test_a_second_derivative(kind):
    ours, theirs = pair(kind)
    x = torch.randn(3, IN, requires_grad=True)

    def second(model):
        grads = torch.autograd.grad(model(x).pow(2).sum(), [x, *_trained(model)], create_graph=True)
        return torch.autograd.grad(sum(each.pow(2).sum() for each in grads), [x, *_trained(model)])

    require_equal(second(ours), second(theirs), 2e-5)


def test_only_what_is_asked_for(fused):
    """Gradients of A or B alone, and of adapters whose x needs none."""
    ours, theirs = pair("NF4Linear")
    for frozen in ("lora_A", "lora_B"):
        for each in (ours, theirs):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_("lora_" in name and frozen not in name)
        x = torch.randn(3, IN)
        found, expected = (
            torch.autograd.grad(each(x).pow(2).sum(), _trained(each)) for each in (ours, theirs)
        )
        require_equal(found, expected, 2e-6)
    assert fused.count == 2


# ---- What is kept, and run twice ----------------------------------------------------------


@pytest.mark.parametrize("kind", BASES)
def test_x_and_p_alone_are_kept(kind):
    """No cast copy of x, nothing as large as y."""
    ours = pair(kind, torch.bfloat16)[0]
    kept = []
    x = torch.randn(64, IN, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        ours(x)
    of_rows = [each for each in kept if each.shape[0] == 64]
    assert {tuple(each.shape) for each in of_rows} == {(64, IN), (64, RANK)}
    assert len({each.data_ptr() for each in of_rows}) == 2
    assert [each.data_ptr() for each in of_rows if each.shape[1] == IN] == [x.data_ptr()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, fused):
    ours, theirs = pair("Linear4bit")
    x = torch.randn(3, IN, requires_grad=True)

    def run(model):
        y = checkpoint(model, x, use_reentrant=reentrant)
        return [y, *torch.autograd.grad(y.sum(), [x, *_trained(model)])]

    if reentrant:  # takes .backward() alone
        y = checkpoint(ours, x, use_reentrant=True)
        y.sum().backward()
        assert fused.count == 2 and x.grad is not None
        return
    require_equal(run(ours), run(theirs), 2e-6)
    assert fused.count == 1  # the second run ends as soon as everything is there again


def test_gradients_accumulate():
    ours, theirs = pair("NF4Linear")
    x = torch.randn(3, IN)
    for each in (ours, theirs):
        for _ in range(3):
            each(x).pow(2).sum().backward()
    grads = ([p.grad for p in _trained(each)] for each in (ours, theirs))
    require_equal(*grads, 2e-6)


# ---- Autocast --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(kind, x_dtype, fused):
    """As PEFT's own way: a Linear4bit gives y in the dtype of x, NF4Linear in autocast's."""
    ours = pair(kind, torch.bfloat16)[0]
    x = torch.randn(4, IN).to(x_dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(ours, x)
        assert fused.count == 1
        handle = layer_of(ours).register_forward_hook(lambda *_: None)
        hook = layer_of(ours).lora_A["default"].register_forward_hook(lambda *_: None)
        expected = results(ours, x)
        handle.remove()
        hook.remove()
    assert fused.count == 1
    require_equal(found, expected, 1.2e-2)


# ---- PEFT's own way --------------------------------------------------------------------


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


# ---- What is replaced ------------------------------------------------------------------


def test_given_back_and_taken_again(fused):
    ours = pair("NF4Linear")[0]
    x = torch.randn(3, IN)
    before = results(ours, x)
    nf4_peft.unregister()
    try:
        assert nf4_peft.served() == ([], [])
        own = results(ours, x)
        assert fused.count == 1
    finally:
        again = nf4_peft.register()
    require_equal(own, before, 2e-6)
    assert results(ours, x)[0].equal(before[0]) and fused.count == 2
    assert again.left_alone == [] and len(again.functions) >= 8


def test_bitsandbytes_on_its_own_kernels(fused):
    from nf4.torch import bitsandbytes as backend

    ours, theirs = pair("Linear4bit")
    backend.unregister()
    x = torch.randn(3, IN)
    require_equal(results(ours, x), results(theirs, x), 1e-5)
    assert fused.count == 0


def test_an_unknown_source_is_left_alone(monkeypatch):
    nf4_peft.unregister()
    try:
        with monkeypatch.context() as patch:
            forward = peft.tuners.lora.layer.Linear.forward
            patch.setattr(
                peft.tuners.lora.layer.Linear, "forward", lambda *a, **k: forward(*a, **k)
            )
            found = nf4_peft.register()
            assert found.left_alone == ["peft.tuners.lora.layer.Linear.forward"]
            nf4_peft.unregister()
    finally:
        nf4_peft.register()


@pytest.mark.parametrize("first", ["nf4.torch", "peft"])
def test_in_any_order_of_imports(first):
    second = {"nf4.torch": "peft", "peft": "nf4.torch"}[first]
    code = (
        f"import {first}, {second}, sys, peft.tuners.lora.bnb; "
        "from nf4.torch import peft as ours; found = ours.served(); "
        "print(len([each for each in found.functions if 'tuners.lora' in each]), found.left_alone)"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, left_alone = made.stdout.strip().splitlines()[-1].split(maxsplit=1)
    assert int(count) >= 6 and left_alone == "[]", made.stdout
