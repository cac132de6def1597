"""The weight of a layer in 4 bits as PEFT's code reads and writes it, and PEFT's initialisations,
which do both."""

from __future__ import annotations

import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "served")]
torch_cases.require("torch", "bitsandbytes", "peft", "_nf4_fast")

import nf4.torch  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
from nf4.errors import InvalidArgument  # noqa: E402
from nf4.torch import peft as nf4_peft  # noqa: E402
from peft_cases import IN, OUT, Model, adapted, base, dense, layer_of, require_equal  # noqa: E402
from torch import nn  # noqa: E402

# ||W' - W|| / ||W|| where W' is W in NF4 and normally distributed is 0.09.
QUANTIZED = 0.12
# Functions of a module of PEFT's.
_PEFT = {"__name__": "peft.tuners.somewhere", "torch": torch}
weight_of = eval("lambda layer: layer.weight", _PEFT)


def made(dtype: torch.dtype = torch.float32) -> nf4.torch.NF4Linear:
    return base("NF4Linear", dtype, True)


def in_four_bits(of: torch.Tensor, like: nf4.torch.NF4Linear) -> torch.Tensor:
    return nf4.torch.dequantize(nf4.torch.quantize(of), like.dtype_before)


@pytest.mark.parametrize("kind", ["NF4Linear", "Int4Linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_for_peft_and_packed_for_others(kind, dtype):
    layer = base(kind, dtype, True)
    read = weight_of(layer)
    assert read.shape == (OUT, IN) and read.dtype == dtype and read.device == layer.weight.device
    assert torch.equal(read.clone(), layer.dequantize(dtype)) and read.is_contiguous()
    assert read.data_ptr() == layer.weight.data_ptr() and not hasattr(read, "quant_state")
    assert layer.weight.dtype == torch.uint8 and dict(layer.state_dict())
    assert [name for name, _ in layer.named_parameters()][-1] == "bias"


def test_what_others_put_there_is_found():
    layer = made()
    packed = layer._parameters.pop("weight").detach()
    layer.weight = packed  # as DataParallel does in a replica
    assert layer.weight is packed
    with pytest.raises(AttributeError, match="weight"):
        _ = nf4.torch.NF4Linear.__new__(nf4.torch.NF4Linear).weight


@pytest.mark.parametrize(
    "write",
    [
        "weight.data += 1",
        "weight.data = weight.data.clone().add_(1)",
        "weight.data.add_(torch.ones(192, 128))",
        "weight.data.reshape(-1)[::3] = 2",
        "weight.data[3:9, 5] *= 7",
        "weight.data.t()[4].zero_()",
        "weight.data[7:][2:, 3] -= 1",
        "weight.data.view(2, -1).chunk(2, 1)[1].fill_(3)",
        "torch.mul(weight, 2, out=weight)",
        "weight.detach().unbind(1)[7].copy_(torch.ones(192))",
    ],
)
def test_what_is_written_is_quantized(write):
    layer = made()
    expected = layer.dequantize()
    scope = {"weight": nn.Parameter(expected.clone(), requires_grad=False)}
    exec(write, _PEFT, scope)
    assert not torch.equal(scope["weight"], expected)
    exec(write, _PEFT, {"weight": weight_of(layer)})
    assert torch.equal(layer.dequantize(), in_four_bits(scope["weight"].data, layer))


def test_what_was_written_is_rounded_once():
    layer = made()
    weight = weight_of(layer)
    weight.data += 1
    once = layer.dequantize()
    weight_of(layer).data = weight.detach()
    assert torch.equal(layer.dequantize(), once)
    weight_of(layer).data = weight.to(torch.float64)
    assert torch.equal(layer.dequantize(), in_four_bits(once, layer))


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.ones(OUT, IN).fill_diagonal_(float("nan")), "has NaN or Inf"),
        (torch.full((OUT, IN), float("-inf")), "has NaN or Inf"),
        (torch.ones(IN, OUT), r"of shape \(128, 192\); expected \(192, 128\)"),
    ],
)
def test_what_cannot_be_written(value, what):
    layer = made()
    before = layer.dequantize()
    with pytest.raises(InvalidArgument, match=f"PEFT changes the weight of NF4Linear.*{what}"):
        weight_of(layer).data = value
    assert torch.equal(layer.dequantize(), before)


def test_integers_of_any_layout():
    linear = dense(made())
    layer = nf4.torch.Int4Linear.from_linear(linear, layout="compressed-tensors", group_size=32)
    read = weight_of(layer)
    copy = torch.empty(OUT, IN).copy_(read)
    assert torch.equal(copy, layer.dequantize("fp32")) and read.dtype == torch.float32
    with pytest.raises(InvalidArgument, match="into an Int4Linear"):
        read.data.zero_()


def test_no_gradient():
    weight = weight_of(made())
    with pytest.raises(
        InvalidArgument, match="the weight of NF4Linear.*expected it to stay frozen"
    ):
        weight.requires_grad = True
    with pytest.raises(InvalidArgument, match="expected it to stay frozen"):
        nn.Parameter(weight)
    weight.requires_grad = False
    assert not weight.requires_grad


def test_gradients_of_what_is_beside():
    layer = made()
    x = torch.randn(3, IN, requires_grad=True)
    y = torch.nn.functional.linear(x, weight_of(layer))
    expected = torch.nn.functional.linear(x, layer.dequantize())
    grad = layer.dequantize().sum(0).expand(3, -1)
    require_equal([y, *torch.autograd.grad(y.sum(), x)], [expected, grad], 1e-6)


def test_compiled_code_reads_the_dense_weight_of_an_adapter_s_layer():
    layer, alone = made(), made()
    peft.get_peft_model(nn.Sequential(layer), peft.LoraConfig(target_modules=["0"]))
    compiled = torch.compile(lambda x: x @ layer.weight.t(), backend="eager", fullgraph=True)
    x = torch.randn(3, IN)
    require_equal([compiled(x)], [x @ layer.dequantize().t()], 1e-6)
    asked = torch.compile(lambda: alone.weight.dtype == torch.uint8, backend="eager")
    assert asked() and alone.weight.dtype == torch.uint8


def test_given_back():
    layer = made()
    nf4_peft.unregister()
    try:
        assert weight_of(layer) is layer.weight and "weight" not in vars(nf4.torch.NF4Linear)
        assert weight_of(base("Int4Linear", torch.float32, False)).dtype == torch.uint8
    finally:
        nf4_peft.register()
    assert weight_of(layer).shape == (OUT, IN)


def test_converted_after_the_adapter():
    """PEFT's layers for bitsandbytes ask for what an NF4Linear has not."""
    model = peft.get_peft_model(
        Model(base("Linear4bit", torch.float32, False)), peft.VeraConfig(target_modules=["linear"])
    )
    nf4.torch.convert(model)
    with pytest.raises(AttributeError, match="NF4Linear has no quant_state.*before PEFT adds"):
        model.merge_adapter()


# ---- Initialisations --------------------------------------------------------------------

_OPTIONS = {"loftq": {"loftq_config": {"loftq_bits": 4}}, "eva": {"eva_config": peft.EvaConfig()}}
INITIALISATIONS = [
    True, False, "gaussian", "orthogonal", "olora", "pissa", "pissa_niter_4", "mica", "eva",
    "loftq",
]  # fmt: skip


def initialised(linear: nn.Module, init: bool | str) -> peft.PeftModel:
    config = peft.LoraConfig(
        r=8, target_modules=["linear"], init_lora_weights=init, **_OPTIONS.get(init, {})
    )
    torch.manual_seed(4)
    return peft.get_peft_model(Model(linear), config)


def numbers(model: peft.PeftModel) -> list[torch.Tensor]:
    layer = layer_of(model)
    return [layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()]


@pytest.mark.parametrize("init", INITIALISATIONS)
def test_initialisations(init):
    layers = {"Linear4bit": base("Linear4bit", torch.float32, False)}
    layers["NF4Linear"] = nf4.torch.NF4Linear.from_bitsandbytes(layers["Linear4bit"])
    layers["dense"] = dense(layers["Linear4bit"])
    x = torch.randn(5, IN)
    before = layers["dense"](x)
    try:
        expected = initialised(layers["dense"], init)
    except (ImportError, RuntimeError) as error:  # LoftQ's needs scipy and a GPU
        pytest.skip(str(error))
    ours = initialised(layers["NF4Linear"], init)
    for a, b in zip(numbers(ours), numbers(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    if init not in (False, "orthogonal"):
        require_equal([ours(x)], [before], 2 * QUANTIZED)
    weight = in_four_bits(layer_of(expected).base_layer.weight.data, layers["NF4Linear"])
    require_equal([layer_of(ours).base_layer.dequantize()], [weight], 2e-2)


def test_olora_is_that_over_a_linear4bit():
    theirs = base("Linear4bit", torch.float32, False)
    ours = initialised(nf4.torch.NF4Linear.from_bitsandbytes(theirs), "olora")
    theirs = initialised(theirs, "olora")
    require_equal(numbers(ours), numbers(theirs), 1e-5)
    x = torch.randn(5, IN)
    require_equal([ours(x)], [theirs(x)], 1e-3)


@pytest.mark.parametrize("init", ["olora", "pissa"])
def test_no_initialisation_changes_integers(init):
    layer = base("Int4Linear", torch.float32, False)
    before = layer.dequantize()
    with pytest.raises(InvalidArgument, match="into an Int4Linear.*; expected adapters that stay"):
        initialised(layer, init)
    assert torch.equal(layer.dequantize(), before)


# ---- Parameters that are counted --------------------------------------------------------


@pytest.mark.parametrize("kind", ["NF4Linear", "Int4Linear"])
def test_parameters_are_counted_as_those_of_a_dense_layer(kind):
    linear = base(kind, torch.float32, True)
    ours, theirs = adapted(linear), adapted(dense(linear))
    assert ours.get_nb_trainable_parameters() == theirs.get_nb_trainable_parameters()


def test_a_mixed_model_counts_alike():
    linear = made()
    config = peft.LoraConfig(r=8, target_modules=["linear"])
    ours, theirs = (
        peft.PeftMixedModel(Model(each), config, "default") for each in (linear, dense(linear))
    )
    assert ours.get_nb_trainable_parameters() == theirs.get_nb_trainable_parameters()
