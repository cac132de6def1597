"""A 4-bit layer's `weight` in the hands of code that takes it for a dense one: torch's C++ fast
paths leave it alone, and functions refuse it by name."""

from __future__ import annotations

import copy
import pickle
import warnings

import nf4
import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "bitsandbytes")

import bitsandbytes as bnb  # noqa: E402
import nf4.torch  # noqa: E402
import torch  # noqa: E402
from nf4.torch import Int4Linear, NF4Experts, NF4Linear  # noqa: E402
from nf4.torch.modules import PackedCodes  # noqa: E402
from torch import nn  # noqa: E402

LAYERS = {
    "NF4Linear": NF4Linear.from_linear,
    "Int4Linear": lambda linear: Int4Linear.from_linear(linear, group_size=64),
}
X = torch.randn(2, 5, 64)


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("names", [("linear1",), ("linear2",), ("linear1", "linear2")])
def test_the_fast_path_of_a_transformer_leaves_the_layers_alone(kind, names):
    """bitsandbytes#963: with gradients torch goes another way, which calls the layers."""
    model = encoder()
    for block in model.layers:
        for name in names:
            setattr(block, name, LAYERS[kind](getattr(block, name)))
    expected = model(X)
    with torch.no_grad():
        assert torch_cases.error(model(X), expected) < 1e-6
        assert torch_cases.error(model.layers[0](X), model.layers[0](X.clone())) == 0
        padding = torch.zeros(2, 5, dtype=torch.bool)
        padding[1, 3:] = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of nested tensors
            assert model(X, src_key_padding_mask=padding).isfinite().all()


def test_convert_keeps_such_a_model_right():
    model = encoder()
    for block in model.layers:
        theirs = bnb.nn.Linear4bit(64, 128, compute_dtype=torch.float32, quant_type="nf4")
        block.linear1 = theirs.to("cpu")
    with torch.no_grad():
        expected = model(X)
        assert len(nf4.torch.convert(model)) == 2
        assert torch_cases.error(model(X), expected) < 1e-5


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("grad", [False, True])
def test_attention_that_reads_the_weight_names_it(kind, grad):
    attention = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    attention.out_proj = LAYERS[kind](nn.Linear(64, 64))
    with torch.set_grad_enabled(grad):
        with pytest.raises(nf4.InvalidArgument, match="multi_head_attention_forward is given the"):
            attention(X, X, X)


READS = {
    "linear": lambda weight: nn.functional.linear(X, weight),
    "matmul": lambda weight: torch.matmul(X, weight),
    "mul": lambda weight: weight * X[0, 0, 0],
    "einsum": lambda weight: torch.einsum("bik,nk->bin", X, weight),
    "addmm": lambda weight: torch.addmm(X[0, 0], X[0], weight),
    "cat": lambda weight: torch.cat([weight, X[0, :, :1]]),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", READS)
def test_a_function_that_reads_codes_as_a_weight_is_named(kind, name):
    layer = LAYERS[kind](nn.Linear(64, 64))
    said = f"{name} is given the packed codes of a 4-bit layer"
    with pytest.raises(nf4.InvalidArgument, match=said):
        READS[name](layer.weight)


def test_a_stack_of_experts_has_codes_too():
    experts = NF4Experts.from_dense(torch.randn(2, 64, 64))
    with pytest.raises(nf4.InvalidArgument, match="bmm is given the packed codes"):
        torch.bmm(X, experts.weight)


COPIES = {
    "copied": copy.deepcopy,
    "pickled": lambda layer: pickle.loads(pickle.dumps(layer)),
    "moved": lambda layer: layer.to("meta").to_empty(device="cpu"),
    "loaded": lambda layer: layer.load_state_dict(layer.state_dict(), assign=True) and layer,
    "merged": lambda layer: layer.requantize(torch.randn(64, 64)) or layer,
}


@pytest.mark.parametrize("case", COPIES)
def test_the_codes_stay_what_they_are(case):
    layer = COPIES[case](NF4Linear.from_linear(nn.Linear(64, 64)))
    assert type(layer.weight) is PackedCodes and not layer.weight.requires_grad
    assert isinstance(layer.weight, nn.Parameter)
    assert type(layer.state_dict()["weight"]) is torch.Tensor


def test_what_only_asks_or_stores_is_allowed():
    layer = NF4Linear.from_linear(nn.Linear(64, 64))
    weight, other = layer.weight, NF4Linear.from_linear(nn.Linear(64, 64)).weight
    assert (weight.dtype, weight.shape, weight.is_cuda) == (torch.uint8, (2048, 1), False)
    assert weight.float().dtype == torch.float32 and weight.to(X).dtype == X.dtype
    assert torch.zeros(2048, 1).copy_(weight).dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(weight.copy_(other), other)
    assert type(nn.Parameter(weight.data, requires_grad=False)) is nn.Parameter


def test_functions_over_all_parameters_take_the_codes():
    """Such as an optimizer's or a moving average's, and as they take a Params4bit."""
    ours, others = (NF4Linear.from_linear(nn.Linear(64, 128)) for _ in range(2))
    with torch.no_grad():
        torch._foreach_copy_(list(ours.parameters()), list(others.parameters()))
    for mine, other in zip(ours.parameters(), others.parameters(), strict=True):
        assert torch.equal(mine, other)
    flat = torch._utils._flatten_dense_tensors(list(ours.parameters()))
    assert flat.numel() == ours.weight.numel() + 128
    assert torch.result_type(ours.weight, ours.bias) == torch.float32
