"""Siblings: layers that share x are multiplied in one call, with the bits of single products."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import weakref

import nf4
import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
from nf4.torch import NF4Linear, _capture  # noqa: E402
from siblings_cases import IN, Attention, Cross, Mlp, both, grads_of, integers, same  # noqa: E402


@pytest.fixture
def captured(monkeypatch):
    """As while a CUDA graph is captured."""
    monkeypatch.setattr(_capture, "id_of", lambda x: 1)


def test_eager_calls_are_single(batches):
    joined, alone = both()
    for _ in range(3):
        x = torch.randn(3, IN)
        with torch.no_grad():
            assert same(joined(x), alone(x))
        assert same(grads_of(joined, x), grads_of(alone, x))
    assert batches == []


def test_the_state_dict_is_that_of_single_layers():
    joined, alone = both()
    assert joined.state_dict().keys() == alone.state_dict().keys()


def test_each_by_itself():
    joined, _ = both()
    assert all(layer._siblings is not None for layer in joined.children())
    nf4.torch.convert(joined, siblings=False)
    assert all(layer._siblings is None for layer in joined.children())


def test_those_of_several_inputs_are_no_siblings():
    joined, _ = both(Cross)
    assert all(layer._siblings is None for layer in joined.children())


# ---- Whose forward is known ------------------------------------------------------------


class Writing(Attention):
    """Writes to x, and to a bias, before k is called."""

    def forward(self, x):
        x = x * 1
        q = self.q_proj(x)
        x.add_(1)
        with torch.no_grad():
            self.v_proj.bias.add_(1)
        return q, self.k_proj(x), self.v_proj(x)


def test_parents_of_unknown_classes_are_not_joined():
    torch._dynamo.reset()
    joined = Writing()
    alone = copy.deepcopy(joined)
    nf4.torch.convert(joined)
    assert all(layer._siblings is None for layer in joined.children())
    x = torch.randn(3, IN)
    compiled = torch.compile(joined, backend="aot_eager")
    with torch.no_grad():
        assert same(compiled(x), alone(x))


@pytest.mark.parametrize("kind", ["its own", "derived", "patched", "adapted", "hidden"])
def test_parents_of_transformers_classes_are_joined(kind):
    torch_cases.require("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    made = type("Derived", (LlamaMLP,), {}) if kind == "derived" else LlamaMLP
    mlp = made(LlamaConfig(hidden_size=IN, intermediate_size=96))
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(mlp, name, NF4Linear.from_linear(getattr(mlp, name)))
    layers = mlp.gate_proj, mlp.up_proj
    if kind == "patched":
        mlp.forward = lambda x: x
    if kind in ("adapted", "hidden"):
        holder = type("Holder", (torch.nn.Module,), {})()
        holder.base_layer = mlp.up_proj
        type(holder).__module__ = "peft.tuners.lora.layer" if kind == "adapted" else "elsewhere"
        mlp.up_proj = holder
    known = kind in ("its own", "adapted")
    for siblings, joined in ((True, known), ("all", True), (True, known), (False, False)):
        nf4.torch.convert(mlp, siblings=siblings)
        assert [layer._siblings is not None for layer in layers] == [joined] * 2


def test_which_siblings_are_joined_is_checked():
    with pytest.raises(nf4.InvalidArgument, match="siblings is 'both'; expected True"):
        nf4.torch.convert(Attention(), siblings="both")


# ---- Captured --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [NF4Linear.from_linear, integers("gptq"), integers("awq")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(IN,), (1, IN), (2, 9, IN), (0, IN)])
def test_the_bits_are_those_of_single_layers(captured, batches, make, dtype, shape):
    joined, alone = both(Attention, make)
    with torch.no_grad():
        x = torch.randn(shape, dtype=dtype)
        assert same(joined(x), alone(x))
        assert same(joined(x), alone(x))
    assert batches == [3, 3]


@pytest.mark.parametrize("make", [Attention, Mlp])
@pytest.mark.parametrize("on", [False, True])
def test_gradients_have_the_same_bits(captured, batches, make, on):
    joined, alone = both(make)
    x = torch.randn(5, IN)
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        assert same(grads_of(joined, x), grads_of(alone, x))
        assert len(batches) == (0 if on else 1)  # each layer's gradient is cast before the sum
        assert same(grads_of(joined, x.bfloat16()), grads_of(alone, x.bfloat16()))
    assert len(batches) == (1 if on else 2)


@pytest.mark.parametrize("compute_dtype", [None, "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_under_autocast_and_with_a_compute_dtype(captured, batches, compute_dtype, dtype):
    def make(linear):
        return NF4Linear.from_linear(linear, compute_dtype=compute_dtype)

    joined, alone = both(Attention, make)
    x = torch.randn(3, IN, dtype=dtype)
    for on in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            assert same(joined(x), alone(x))
    assert batches == [3, 3]


def test_a_gradient_for_one_of_them(captured):
    joined, alone = both()
    x = torch.randn(5, IN, requires_grad=True)
    found, expected = (torch.autograd.grad(m(x)[1].sum(), x) for m in (joined, alone))
    assert same(found, expected)


@pytest.mark.parametrize("other", ["x", "version", "no_grad", "inference", "autocast", "dtype"])
def test_products_are_taken_for_the_same_x_alone(captured, batches, other):
    joined, alone = both()
    x = torch.randn(3, IN)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=other == "dtype"):
        joined.q_proj(x)
    with (
        torch.set_grad_enabled(other == "no_grad"),
        torch.inference_mode(other == "inference"),
        torch.autocast("cpu", torch.float16, enabled=other in ("autocast", "dtype")),
    ):
        x = x.clone() if other == "x" else x.add_(1) if other == "version" else x
        assert same(joined.k_proj(x), alone.k_proj(x))
        assert same(joined(x), alone(x))  # from here on each by itself
    assert batches == [3] and joined.q_proj._siblings[0]._ahead is None


def test_a_later_capture_takes_nothing_of_an_earlier_one(monkeypatch, batches):
    joined, _ = both()
    x = torch.randn(3, IN)
    for number in (1, 2):
        monkeypatch.setattr(_capture, "id_of", lambda x, number=number: number)
        (joined.q_proj if number == 1 else joined.k_proj)(x)
        assert (joined.q_proj._siblings[0]._ahead is None) == (number == 2)
    joined(x)
    assert batches == [3]


def test_an_eager_call_drops_what_nobody_took(monkeypatch, batches):
    joined, alone = both()
    x = torch.randn(3, IN)
    with monkeypatch.context() as patch:
        patch.setattr(_capture, "id_of", lambda x: 1)
        joined.q_proj(x)
    product = weakref.ref(joined.q_proj._siblings[0]._ahead[2][1])
    assert torch.equal(joined.v_proj(x), alone.v_proj(x))
    assert product() is None and batches == [3]


def test_the_driver_tells_which_capture_it_is(monkeypatch):
    """A stand-in for cuStreamGetCaptureInfo, by the streams that it knows."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 6)

    @kind
    def ask(stream, status, number, *rest):
        ctypes.c_int.from_address(status).value = (stream or 0) % 3
        ctypes.c_uint64.from_address(number).value = 2**40 + (stream or 0)
        return 0 if stream != 4 else 900  # in a capture, with an error

    monkeypatch.setattr(_capture, "_driver", lambda: ask)
    assert [_capture.id_on(stream) for stream in (0, 1, 2, 4)] == [None, 2**40 + 1, None, None]
    monkeypatch.setattr(_capture, "_driver", lambda: None)
    assert _capture.id_on(1) is None and _capture.id_of(torch.ones(1)) is None


def test_a_layer_called_twice_computes_twice(captured):
    joined, alone = both()
    x = torch.randn(3, IN)
    first, second = joined.q_proj(x), joined.q_proj(x)
    assert first is not second and same(first, second)
    assert same(joined(x), alone(x))


def test_in_inference_mode(captured, batches):
    joined, alone = both()
    with torch.inference_mode():
        x = torch.randn(3, IN)
        assert same(joined(x), alone(x))
    assert batches == [3]


def test_one_call_in_inference_mode(captured):
    joined, _ = both()
    with torch.inference_mode(), torch.profiler.profile() as made:
        joined(torch.randn(3, IN))
    assert any(each.name.startswith("nf4::_linear_batch") for each in made.events())


def test_hooks_may_change_x(captured):
    joined, alone = both()
    called = []
    joined.k_proj.register_forward_hook(lambda *_: called.append(1))
    for model in (joined, alone):
        model.v_proj.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    for _ in range(2):
        x = torch.randn(3, IN)
        assert same(joined(x), alone(x))
    assert len(called) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_model_has_groups_of_its_own(captured, batches, copied):
    joined, alone = both()
    made = copied(joined)
    for model in (made, alone):
        for layer in model.children():
            layer.bias = None
    del joined
    x = torch.randn(3, IN)
    assert same(made(x), alone(x))
    assert batches == [3]


def test_a_copy_of_a_layer_brings_no_others(captured, batches):
    joined, alone = both()
    x = torch.randn(3, IN)
    for made in (copy.deepcopy(joined.q_proj), copy.copy(joined.q_proj)):
        assert len(pickle.dumps(made)) < 1.2 * len(pickle.dumps(alone.q_proj)) + 500
        assert torch.equal(made(x), alone.q_proj(x))
    assert batches == []
    assert same(joined(x), alone(x)) and batches == [3]


def test_a_layer_that_is_replaced_is_no_sibling(captured, batches):
    joined, alone = both()
    x = torch.randn(3, IN)
    for model in (joined, alone):
        model.k_proj = model.k_proj.to_linear()
    gc.collect()
    assert same(joined(x), alone(x))
    assert batches == []


def test_adapters_hold_the_layers_that_they_adapt(captured, batches):
    class Adapter(torch.nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer

        def forward(self, x):
            return self.base_layer(x) + x[..., :1]

    alone = Attention()
    alone.q_proj = Adapter(alone.q_proj)
    joined = copy.deepcopy(alone)
    nf4.torch.convert(joined, siblings="all")
    x = torch.randn(3, IN)
    assert same(joined(x), alone(x))
    assert batches == [3]
