"""What a bitsandbytes layer does beside its product, with libnf4 as without."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch_cases
from torch_cases import ALLOWED, IN, OUT, error, linear4bit

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "bitsandbytes", "_nf4_fast")

import bitsandbytes as bnb  # noqa: E402
import torch  # noqa: E402
from bitsandbytes_cases import (  # noqa: E402
    DTYPES,
    both,
    layer,
)
from nf4.torch import _fast  # noqa: E402

if not _fast.registered:
    pytest.skip("this torch has not what C++ needs", allow_module_level=True)


# ---- What a layer does beside ---------------------------------------------------------


def test_the_bias_is_cast_for_good():
    def call(made):
        y = made(torch.randn(3, IN))
        return y, made.bias.dtype

    for y, dtype in both(lambda: linear4bit(compute_dtype=torch.bfloat16), call):
        assert y.dtype == torch.float32 and dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_compute_dtype_is_chosen_once(dtype, caplog):
    def call(made):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            x = torch.randn(1, IN).to(DTYPES[dtype])
            ys = [made(x), made(x), made(torch.randn(2, IN))]
        said = [record.message for record in caplog.records]
        return [y.dtype for y in ys], made.compute_dtype, made.compute_type_is_set, said

    off, on = both(linear4bit, call)
    assert off == on
    assert len(on[3]) == (dtype == "fp16")


def test_autocast_changes_nothing(served):
    made, x = layer("fp32"), torch.randn(3, IN, requires_grad=True)
    expected = made(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = made(x)
    assert y.dtype == torch.float32 and torch.equal(y, expected)


def test_hooks_and_subclasses_run(served, calls):
    class Doubling(bnb.nn.Linear4bit):
        def forward(self, x):
            return 2 * super().forward(x)

    made, seen = layer(), []
    x = torch.randn(3, IN)
    expected = made(x)
    made.__class__ = Doubling
    made.register_forward_pre_hook(lambda module, arguments: seen.append("before"))
    made.register_forward_hook(lambda module, arguments, y: seen.append("after"))
    assert torch.equal(made(x), 2 * expected) and seen == ["before", "after"]
    assert calls.count == 0


def test_adapters_of_peft():
    peft = pytest.importorskip("peft")

    def call(made):
        config = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
        model = peft.get_peft_model(torch.nn.Sequential(made, torch.nn.ReLU()), config)
        x = torch.randn(2, 5, IN)
        y = model(x)
        y.square().sum().backward()
        grads = [each.grad for each in model.parameters() if each.grad is not None]
        return [y.detach(), *grads]

    off, on = both(layer, call)
    assert len(on) == len(off) == 3
    assert all(error(a, b) <= ALLOWED["fp32"] for a, b in zip(on, off, strict=True))


def test_a_state_that_got_lost_is_taken_from_the_layer(served):
    made, x = layer(), torch.randn(3, IN)
    expected = made(x)
    made.weight = torch.nn.Parameter(made.weight.data, requires_grad=False)
    assert torch.equal(made(x), expected)
    assert type(made.weight) is bnb.nn.Params4bit and made.weight.quant_state is made.quant_state


def test_a_layer_that_is_not_quantized_says_so(caplog):
    def call(made):
        with pytest.raises(Exception) as caught, caplog.at_level(logging.WARNING):
            made(torch.randn(3, IN))
        return type(caught.value), str(caught.value)

    off, on = both(lambda: bnb.nn.Linear4bit(IN, OUT, compute_dtype=torch.float32), call)
    assert off == on


def test_a_weight_is_followed_where_it_goes(served):
    made, other, x = layer(), layer(), torch.randn(3, IN)
    expected = other(x) - other.bias + made.bias
    made(x)
    made.weight.data = other.weight.data.clone()
    made.weight.quant_state.absmax = other.weight.quant_state.absmax.clone()
    made.weight.quant_state.state2.absmax = other.weight.quant_state.state2.absmax
    made.weight.quant_state.offset = other.weight.quant_state.offset
    assert error(made(x), expected) <= ALLOWED["fp32"]
    moved = copy.deepcopy(made).to("cpu")
    assert torch.equal(moved(x), made(x))
    assert b"nf4.torch" not in pickle.dumps(made)


def test_a_parametrized_bias(served):
    made, x = layer(), torch.randn(3, IN)
    expected = made(x) + made.bias

    class Doubled(torch.nn.Module):
        def forward(self, bias):
            return 2 * bias

    torch.nn.utils.parametrize.register_parametrization(made, "bias", Doubled())
    assert error(made(x), expected) <= ALLOWED["fp32"]
