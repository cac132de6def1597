"""convert and to_dense on layers of GPTQModel, AutoAWQ and compressed-tensors. The first two are
stood in for by classes with the same names and attributes; the third is there itself."""

from __future__ import annotations

import importlib.util
import warnings

import nf4
import pytest
import torch_cases
from torch_cases import ALLOWED, error, reference

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
from int4_torch_cases import GROUP, IN, OUT, weight_of  # noqa: E402
from nf4.torch import Int4Linear  # noqa: E402
from nf4.torch._int4_columns import plain_g_idx  # noqa: E402

X = torch.randn(3, IN)
# loguru: which it imports
NEEDED = ("compressed_tensors", "loguru")
with_compressed_tensors = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED),
    reason="compressed-tensors is not installed",
)


class Words(torch.nn.Module):
    """What the layers of GPTQModel and AutoAWQ hold."""

    def __init__(self, case: str, **attributes):
        super().__init__()
        weight = weight_of(case)
        self.in_features, self.out_features, self.group_size = IN, OUT, GROUP
        parts = {"qweight": weight.packed, "qzeros": weight.zeros, "scales": weight.scales}
        for name, tensor in parts.items():
            self.register_buffer(name, tensor)
        self.register_buffer("bias", torch.randn(OUT).half())
        if weight.layout != "awq":
            g_idx = plain_g_idx(weight) if weight.g_idx is None else weight.g_idx
            self.register_buffer("g_idx", g_idx)
        for name, value in attributes.items():
            setattr(self, name, value)


class TorchLinear(Words):
    def __init__(self, case: str, zeros_format: int, **attributes):
        super().__init__(case, bits=4, format="gptq", **attributes)
        self._zeros_format = zeros_format

    def qzero_format(self):
        return self._zeros_format


class AwqGEMMLinear(Words):
    def __init__(self, case: str = "awq", **attributes):
        super().__init__(case, bits=4, **attributes)


class WQLinear_GEMM(Words):
    def __init__(self, case: str = "awq"):
        super().__init__(case, w_bit=4)


class MarlinLinear(TorchLinear):
    pass


def compressed(symmetric: bool = True, group_size: int | None = GROUP, bits: int = 4, **scheme):
    """A model of one layer that compressed-tensors has quantized and compressed, and the weight
    that it dequantizes to."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    model = torch.nn.Sequential(torch.nn.Linear(IN, OUT))
    weights = QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, group_size=group_size,
        strategy="channel" if group_size is None else "group",
    )  # fmt: skip
    group = QuantizationScheme(
        targets=["Linear"], weights=weights, format="pack-quantized", **scheme
    )
    config = QuantizationConfig(config_groups={"group_0": group}, format="pack-quantized")
    apply_quantization_config(model, config)
    layer = model[0]
    layer.weight_scale.data = (torch.rand_like(layer.weight_scale) / 16 + 0.01).half()
    if not symmetric:
        layer.weight_zero_point.data = torch.randint(-8, 8, layer.weight_scale.shape).to(torch.int8)
    layer.weight.data = layer.weight.data.half()
    ModelCompressor(quantization_config=config).compress_model(model)
    return model


MADE = {
    "GPTQModel, v1": (lambda: TorchLinear("gptq", 1), "gptq", "gptq"),
    "GPTQModel, v2": (lambda: TorchLinear("gptq_v2, act order", 2), "gptq_v2",
                      "gptq_v2, act order"),
    "GPTQModel, AWQ": (AwqGEMMLinear, "awq", "awq"),
    "AutoAWQ": (WQLinear_GEMM, "awq", "awq"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MADE)
def test_layers_of_words(kind):
    make, layout, case = MADE[kind]
    theirs = make().eval()
    model = torch.nn.ModuleDict({"a": theirs, "b": torch.nn.ReLU(), "same": theirs})
    assert nf4.torch.convert(model) == ["a", "same"]
    layer = model["a"]
    assert type(layer) is Int4Linear and layer is model["same"] and not layer.training
    assert layer.layout == layout and layer.group_size == GROUP
    for name in ("qweight", "qzeros", "scales", "bias"):
        assert getattr(layer, name).data_ptr() == getattr(theirs, name).data_ptr(), name
    expected = reference(X, weight_of(case), theirs.bias)
    assert error(layer(X), expected) <= ALLOWED["fp32"]
    assert set(layer.state_dict()) == set(theirs.state_dict())
    assert nf4.torch.convert(model) == []


@with_compressed_tensors
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [GROUP, None])
def test_layers_of_compressed_tensors(symmetric, group_size):
    model = compressed(symmetric, group_size)
    theirs = model[0]
    assert nf4.torch.convert(model) == ["0"]
    layer = model[0]
    assert type(layer) is Int4Linear and layer.bias is theirs.bias
    assert layer.weight_packed.data_ptr() == theirs.weight_packed.data_ptr()
    assert layer.group_size == (-1 if group_size is None else group_size)
    assert set(layer.state_dict()) == set(theirs.state_dict())
    again = torch.nn.Sequential(theirs)
    from compressed_tensors.compressors import decompress_module

    decompress_module(theirs)
    assert torch.equal(layer.dequantize("fp16"), again[0].weight)


@with_compressed_tensors
def test_a_whole_model_that_would_decompress_itself():
    from compressed_tensors.compressors import ModelCompressor

    model = compressed()
    ModelCompressor().add_decompress_hook(model)
    nf4.torch.convert(model)
    assert not model._forward_pre_hooks and not hasattr(model, "ct_decompress_hook")
    assert error(model(X), reference(X, model[0].quantized, model[0].bias)) <= ALLOWED["fp32"]


def test_hooks_go_along():
    model = torch.nn.Sequential(TorchLinear("gptq", 1))
    called = []
    model[0].register_forward_hook(lambda *_: called.append(1))
    nf4.torch.convert(model)
    model(X)
    assert called == [1]


def test_other_bits_are_left_alone_with_a_warning():
    model = torch.nn.Sequential(TorchLinear("gptq", 1), TorchLinear("gptq", 1))
    model[1].bits = 8
    with pytest.warns(UserWarning, match="left alone: 1: it has 8 bits"):
        assert nf4.torch.convert(model) == ["0"]
    assert type(model[1]) is TorchLinear


@with_compressed_tensors
@pytest.mark.parametrize("what", ["bits", "activations"])
def test_what_compressed_tensors_has_besides_is_left_alone(what):
    from compressed_tensors.quantization import QuantizationArgs

    scheme = {"input_activations": QuantizationArgs(num_bits=8)} if what == "activations" else {}
    model = compressed(bits=8 if what == "bits" else 4, **scheme)
    match = "num_bits of its weights is 8" if what == "bits" else "its activations are quantized"
    with pytest.warns(UserWarning, match=match):
        assert nf4.torch.convert(model) == []


def test_a_model_without_such_layers_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nf4.torch.convert(torch.nn.Sequential(torch.nn.Linear(2, 2))) == []


def with_(layer, **changes):
    for name, value in changes.items():
        setattr(layer, name, value)
    return layer


REFUSED = {
    "MarlinLinear, which may hold its codes in an order of its own": lambda: MarlinLinear(
        "gptq", 1
    ),
    "layer has an adapter, which would be lost": lambda: TorchLinear("gptq", 1, adapter=object()),
    "the layer has a forward of its own": lambda: TorchLinear("gptq", 1, forward=lambda x: x),
    "qweight is of shape (8, 24); expected": lambda: with_(
        TorchLinear("gptq", 1), in_features=IN // 2
    ),
    "scales is of torch.float32; expected float16 or bfloat16": lambda: TorchLinear(
        "gptq", 1
    ).float(),
    "g_idx[0] is 9; expected a group": lambda: with_(
        TorchLinear("gptq", 1), g_idx=torch.full((IN,), 9, dtype=torch.int32)
    ),
    "the weight is on meta": lambda: TorchLinear("gptq", 1).to("meta"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused_replaces_nothing(message):
    model = torch.nn.Sequential(TorchLinear("gptq", 1), REFUSED[message]())
    first = model[0]
    with pytest.raises(nf4.InvalidArgument) as caught:
        nf4.torch.convert(model)
    assert str(caught.value).startswith("1: ") and message in str(caught.value)
    assert model[0] is first


def test_the_model_itself():
    with pytest.raises(nf4.InvalidArgument, match="TorchLinear itself"):
        nf4.torch.convert(TorchLinear("gptq", 1))


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_to_dense(dtype):
    model = torch.nn.Sequential(AwqGEMMLinear(), torch.nn.ReLU())
    nf4.torch.convert(model)
    expected = model[0].dequantize(dtype)
    assert nf4.torch.to_dense(model, dtype) == ["0"]
    assert type(model[0]) is torch.nn.Linear and torch.equal(model[0].weight, expected)
