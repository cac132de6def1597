"""convert and to_dense: layers of a model swapped in place, with their hooks."""

from __future__ import annotations

import types

import nf4
import pytest
import torch_cases
from torch_cases import ALLOWED, IN, OUT, error, linear4bit

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "bitsandbytes")

import bitsandbytes as bnb  # noqa: E402
import nf4.torch  # noqa: E402
import torch  # noqa: E402
from nf4.torch import Int4Linear, NF4Linear  # noqa: E402

X = torch.randn(3, IN)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = linear4bit(compute_dtype=torch.float32)
        self.nested = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(OUT, IN))
        self.nested.append(bnb.nn.LinearNF4(IN, OUT))
        self.again = self.first
        self.nested.to("cpu")

    def forward(self, x):
        return self.nested(self.first(x)) + self.again(x)


def test_convert_swaps_every_layer_in_place():
    block = Block()
    expected = block(X)
    assert nf4.torch.convert(block) == ["first", "again", "nested.2"]
    assert type(block.first) is NF4Linear and block.again is block.first
    assert type(block.nested[2]) is NF4Linear and type(block.nested[1]) is torch.nn.Linear
    assert error(block(X), expected) <= 4 * ALLOWED["fp32"]
    assert nf4.torch.convert(block) == []


def test_convert_keeps_hooks_and_mode():
    block = Block()
    calls = []
    block.first.register_forward_hook(lambda *_: calls.append(1))
    nf4.torch.convert(block.eval())
    block(X)
    assert len(calls) == 2 and not block.first.training


def test_convert_leaves_other_classes_alone():
    class Scaled(bnb.nn.Linear4bit):
        def forward(self, x):
            return 2 * super().forward(x)

    made = Scaled(IN, OUT, quant_type="nf4").to("cpu")
    assert nf4.torch.convert(torch.nn.Sequential(made)) == []


def test_convert_swaps_all_or_nothing():
    model = torch.nn.Sequential(linear4bit(), bnb.nn.Linear4bit(IN, OUT))
    with pytest.raises(
        nf4.InvalidArgument, match="^1: layer is of type bitsandbytes.*Linear4bit without a"
    ):
        nf4.torch.convert(model)
    assert type(model[0]) is bnb.nn.Linear4bit


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float32, "bf16"])
def test_dense_again(bias, dtype):
    linear = torch.nn.Linear(IN, OUT, bias).half().eval()
    model = torch.nn.Sequential(NF4Linear.from_linear(linear))
    expected = model[0].dequantize(dtype)
    assert nf4.torch.to_dense(model, dtype) == ["0"] and type(model[0]) is torch.nn.Linear
    assert torch.equal(model[0].weight, expected) and not model[0].weight.requires_grad
    assert model[0].extra_repr() == linear.extra_repr() and not model[0].training
    if bias:
        assert torch.equal(model[0].bias, linear.bias.to(expected.dtype))
        assert (model[0].bias is linear.bias) == (dtype is None)
    assert model(X.to(expected.dtype)).dtype == expected.dtype
    assert nf4.torch.to_dense(model) == []


def test_a_forward_of_its_own_is_not_lost():
    layer = linear4bit()
    layer.forward = lambda x: x
    with pytest.raises(nf4.InvalidArgument, match="^0: the layer has a forward of its own"):
        nf4.torch.convert(torch.nn.Sequential(layer))


def test_what_convert_refuses():
    with pytest.raises(nf4.InvalidArgument, match="model is of type .*Linear4bit itself"):
        nf4.torch.convert(linear4bit())
    with pytest.raises(
        nf4.InvalidArgument, match="model is of type str; expected a torch.nn.Module"
    ):
        nf4.torch.convert("model")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compute_dtype": "cpu"}, "'cpu'"),
        ({"compute_dtype": torch.float64}, "float64"),
    ],
)
def test_a_compute_dtype_that_is_none_is_refused_at_once(options, said):
    with pytest.raises(nf4.InvalidArgument, match=said):
        NF4Linear.from_linear(torch.nn.Linear(64, 8), **options)


def test_a_compute_dtype_may_be_a_name():
    layer = NF4Linear.from_linear(torch.nn.Linear(64, 8), compute_dtype="bf16")
    assert layer.compute_dtype is torch.bfloat16
    assert layer(torch.zeros(2, 64)).dtype == torch.float32


def test_a_weight_or_bias_of_another_kind_is_named():
    weight = nf4.torch.quantize(torch.ones(8, 64))
    for bias, said in (
        (torch.zeros(8), "bias is of type torch.Tensor; expected"),
        (torch.nn.Parameter(torch.zeros(5)), r"bias is of shape \(5,\)"),
    ):
        with pytest.raises(nf4.InvalidArgument, match=said):
            NF4Linear.from_quantized(weight, bias)
    with pytest.raises(nf4.InvalidArgument, match="weight is of type .*Linear; expected a Quan"):
        NF4Linear.from_quantized(torch.nn.Linear(64, 8))


@pytest.mark.parametrize("kept", [False, True])
def test_a_model_is_in_4_bits_as_long_as_one_of_its_layers_is(kept):
    class Derived(NF4Linear):
        pass

    last = (Derived if kept else NF4Linear).from_linear(torch.nn.Linear(8, 8))
    model = torch.nn.Sequential(NF4Linear.from_linear(torch.nn.Linear(64, 8)), last)
    model.config = types.SimpleNamespace(quantization_config={})
    assert nf4.torch.to_dense(model) == (["0"] if kept else ["0", "1"])
    assert hasattr(model.config, "quantization_config") == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_to_dense_gives_layers_in_the_dtype_of_the_model(dtype, bias):
    """The scales of integers are of 16 bits whatever the model is."""
    linear = torch.nn.Linear(64, 64, bias=bias).to(dtype)
    layers = Int4Linear.from_linear(linear, group_size=32), NF4Linear.from_linear(linear)
    model, x = torch.nn.Sequential(*layers), torch.randn(3, 64, dtype=dtype)
    expected = model(x)
    nf4.torch.to_dense(model)
    assert {each.dtype for each in model.parameters()} == {dtype}
    assert error(model(x), expected) <= 4 * ALLOWED["fp32" if dtype == torch.float32 else "bf16"]


def test_to_dense_follows_a_model_that_was_loaded_in_another_dtype():
    layer = Int4Linear(64, 64, bias=False, group_size=32, scales_dtype="fp16")
    half = NF4Linear.from_linear(torch.nn.Linear(64, 64, bias=False).bfloat16())
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), layer, half)
    assert len(nf4.torch.to_dense(model)) == 2
    assert model(torch.randn(3, 64)).dtype == torch.float32
