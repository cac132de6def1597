"""PEFT's LoRA layers over weights in 4 bits as one product: beside PEFT over the same weights,
dense."""

from __future__ import annotations

import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "served")]
torch_cases.require("torch", "bitsandbytes", "peft", "_nf4_fast")

import torch  # noqa: E402
from nf4.torch import _fast, _kernels, _operators  # noqa: E402
from peft_cases import (  # noqa: E402
    BASES,
    IN,
    OUT,
    RANK,
    layer_of,
    pair,
    require_equal,
    results,
    trained,
)
from torch.utils.checkpoint import checkpoint  # noqa: E402

if not _fast.registered:
    pytest.skip("this torch has not what C++ needs", allow_module_level=True)

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


# ---- The same results ------------------------------------------------------------------


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(IN,), (3, IN), (2, 5, IN), (0, IN)])
def test_one_product_as_over_a_dense_weight(kind, dtype, narrow, bias, shape, fused):
    """y, and the gradients of x, A and B in their dtypes."""
    fuses = narrow or dtype != torch.float16
    ours, theirs = pair(kind, dtype, bias, adapters=dtype if narrow else torch.float32)
    x = torch.randn(shape).to(dtype)
    found = results(ours, x)
    assert fused.count == fuses
    require_equal(found, results(theirs, x), ROUNDING[dtype])
    assert fused.count == fuses
    with torch.no_grad():
        assert torch.equal(ours(x), found[0])
    assert fused.count == 2 * fuses


@pytest.mark.parametrize("options", [{"use_rslora": True}, {"lora_alpha": 1}, {"r": 1}, {"r": 40}])
def test_scales_and_ranks(options, fused):
    ours, theirs = pair("NF4Linear", **options)
    x = torch.randn(4, IN)
    require_equal(results(ours, x), results(theirs, x), 2e-6)
    layer_of(ours).set_scale("default", 3.0)
    layer_of(theirs).set_scale("default", 3.0)
    require_equal(results(ours, x), results(theirs, x), 2e-6)
    assert fused.count == 2


def test_a_bias_that_istrained(fused):
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
        [ours(x), *torch.autograd.grad(ours(x).sum(), trained(ours))],
        [theirs(x), *torch.autograd.grad(theirs(x).sum(), trained(theirs))],
        3e-6,
    )


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
        grads = torch.autograd.grad(model(x).pow(2).sum(), [x, *trained(model)], create_graph=True)
        return torch.autograd.grad(sum(each.pow(2).sum() for each in grads), [x, *trained(model)])

    require_equal(second(ours), second(theirs), 2e-5)


def test_only_what_is_asked_for(fused):
    """Gradients of A or B alone, of adapters whose x needs none."""
    ours, theirs = pair("NF4Linear")
    x = torch.randn(3, IN)
    for chosen in (slice(0, 1), slice(1, 2)):
        require_equal(
            *(
                torch.autograd.grad(each(x).pow(2).sum(), trained(each)[chosen])
                for each in (ours, theirs)
            ),
            2e-6,
        )
    assert fused.count == 2


@pytest.mark.parametrize("kind", BASES[:2])  # integers have no dX kernel
def test_the_gradient_of_a_sum(kind, monkeypatch):
    """One number, expanded: no dense weight is made for it."""
    ours, theirs = pair(kind)
    x = torch.randn(3, IN, requires_grad=True)
    y = ours(x)
    expected = torch.autograd.grad(theirs(x).sum(), [x, *trained(theirs)])
    monkeypatch.setattr(_operators, "linear_grad", None)
    require_equal(torch.autograd.grad(y.sum(), [x, *trained(ours)]), expected, 2e-6)


@pytest.mark.parametrize("kind", BASES)
def test_gradients_of_a_batch(kind):
    """A transform is around the backward pass."""
    ours, theirs = pair(kind)
    x = torch.randn(3, IN, requires_grad=True)
    grads_y = torch.randn(4, 3, OUT)
    found, expected = (
        torch.autograd.grad(each(x), [x, *trained(each)], grads_y, is_grads_batched=True)
        for each in (ours, theirs)
    )
    require_equal(found, expected, 2e-6)


@pytest.mark.parametrize("kind", BASES)
def test_a_mode_sees_the_backward_pass(kind):
    ours = pair(kind)[0]
    y, seen = ours(torch.randn(3, IN, requires_grad=True)), []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Seen():
        y.backward(torch.ones_like(y))
    assert any("nf4" in each for each in seen)


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
        if not reentrant:
            return [y, *torch.autograd.grad(y.sum(), [x, *trained(model)])]
        x.grad = None
        y.sum().backward()  # reentrant checkpoints take nothing else
        return [y, x.grad, *(each.grad for each in trained(model))]

    require_equal(run(ours), run(theirs), 2e-6)
    # Unless it is reentrant, the second run ends as soon as everything is there again.
    assert fused.count == 1 + reentrant


def test_gradients_accumulate():
    ours, theirs = pair("NF4Linear")
    x = torch.randn(3, IN)
    for each in (ours, theirs):
        for _ in range(3):
            each(x).pow(2).sum().backward()
    grads = ([p.grad for p in trained(each)] for each in (ours, theirs))
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


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dense", [False, True])
def test_backward_under_autocast(kind, dtype, dense, monkeypatch):
    """Of another dtype than the forward: the gradients are those without it."""
    if dense:
        monkeypatch.setattr(_kernels, "uses_fused_grad", lambda *_: False)
    model = pair(kind, dtype)[0]
    x = torch.randn(4, IN, dtype=dtype, requires_grad=True)
    found = []
    for enabled in (True, False):
        y = model(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(y, [x, *trained(model)], torch.ones_like(y)))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", BASES)
def test_fp16_under_autocast(kind, fused):
    """fp32 adapters are rounded to fp16 then, as PEFT's are."""
    ours, theirs = pair(kind, torch.float16)
    x = torch.randn(4, IN).half()
    with torch.autocast("cpu", torch.float16):
        require_equal(results(ours, x), results(theirs, x), 2e-3)
    assert fused.count == 1
