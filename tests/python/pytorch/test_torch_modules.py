"""NF4Linear: made from, state_dicts both ways with bitsandbytes. test_layers.py has the rest."""

from __future__ import annotations

import copy
import json
import pickle

import nf4
import pytest
import torch_cases
from torch_cases import ALLOWED, IN, OUT, error, linear4bit, reference

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "bitsandbytes")

import bitsandbytes as bnb  # noqa: E402
import nf4.torch  # noqa: E402
import torch  # noqa: E402
from nf4.torch import Int4Linear, NF4Experts, NF4Linear  # noqa: E402

LAYOUTS = {"nested": {}, "flat": {"nested_blocksize": 0}, "fp4": {"format": "fp4"}}
PARTS = ("weight", "absmax", "nested_absmax", "nested_code", "nested_offset")


def layer_of(layout: str = "nested", bias: bool = True, **options) -> NF4Linear:
    return NF4Linear.from_linear(torch.nn.Linear(IN, OUT, bias=bias), **LAYOUTS[layout], **options)


def same_parts(one: NF4Linear, other: NF4Linear) -> bool:
    for name in PARTS:
        first, second = getattr(one, name), getattr(other, name)
        if (first is None) != (second is None):
            return False
        if first is not None and not torch.equal(first, second):
            return False
    return True


X = torch.randn(3, IN)

# ---- Made from ------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [False, True])
def test_from_a_dense_layer(layout, bias):
    linear = torch.nn.Linear(IN, OUT, bias=bias).eval()
    layer = NF4Linear.from_linear(linear, **LAYOUTS[layout])
    expected = nf4.quantize(linear.weight.detach(), **LAYOUTS[layout])
    assert torch.equal(layer.dequantize(), nf4.dequantize(expected))
    assert layer.bias is linear.bias and not layer.training
    assert not layer.weight.requires_grad and layer.weight.shape == (OUT * IN // 2, 1)
    assert error(layer(X), reference(X, expected, linear.bias)) <= ALLOWED["fp32"]


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_from_bitsandbytes_the_bytes_are_shared(format, nested, storage):
    theirs = linear4bit(format, nested, storage)
    layer = NF4Linear.from_bitsandbytes(theirs)
    state = theirs.weight.quant_state
    assert layer.weight.data_ptr() == theirs.weight.data_ptr()
    assert layer.absmax.data_ptr() == state.absmax.data_ptr()
    assert layer.bias is theirs.bias and layer.weight.dtype == torch.uint8
    if nested:
        assert layer.nested_absmax.data_ptr() == state.state2.absmax.data_ptr()
        assert layer.nested_offset.data_ptr() == state.offset.data_ptr()
    assert torch.equal(layer.dequantize(), bnb.functional.dequantize_4bit(theirs.weight, state))
    assert error(layer(X), theirs(X)) <= ALLOWED["fp32"]


def test_numbers_that_are_not_finite_can_be_allowed():
    linear = nonfinite(float("nan"))
    assert NF4Linear.from_linear(linear, allow_nonfinite=True).dequantize()[OUT - 1, 3] == 0
    made = Int4Linear.from_linear(linear, group_size=32, allow_nonfinite=True)
    assert made.dequantize().isfinite().all()
    assert NF4Experts.from_dense(linear.weight[None], allow_nonfinite=True).experts == 1


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_table_of_torchs_default_dtype_is_the_same_layer(format, nested, dtype):
    """bitsandbytes makes the table in it, and computes without it (bitsandbytes#1521)."""
    theirs = linear4bit(format, nested)
    expected = NF4Linear.from_bitsandbytes(theirs)(X)
    theirs.weight.quant_state.code = theirs.weight.quant_state.code.to(dtype)
    assert torch.equal(NF4Linear.from_bitsandbytes(theirs)(X), expected)
    layer = NF4Linear(IN, OUT)
    layer.load_state_dict(theirs.state_dict())
    assert torch.equal(layer(X), expected)
    theirs.weight.quant_state.code = theirs.weight.quant_state.code * 2
    with pytest.raises(nf4.InvalidArgument, match=f"is not the table of {format}"):
        NF4Linear.from_bitsandbytes(theirs)


def moved(layer):
    return layer._apply(torch.clone)


IN_INFERENCE = {
    "from_linear": layer_of,
    "zeros": lambda: NF4Linear(IN, OUT),
    "integers": lambda: Int4Linear(IN, OUT, group_size=32),
    "copied": lambda: copy.deepcopy(layer_of()),
    "moved": lambda: moved(layer_of()),
    "pickled": lambda: pickle.loads(pickle.dumps(layer_of())),
    "dense": lambda: layer_of().to_linear(),
}


@pytest.mark.parametrize("case", IN_INFERENCE)
def test_a_layer_that_inference_mode_made_can_be_trained(case):
    with torch.inference_mode():
        layer = IN_INFERENCE[case]()
    x = X.clone().requires_grad_()
    layer(x).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    weight = layer.weight if case == "dense" else layer.dequantize()
    assert error(x.grad, weight.sum(0).expand_as(x)) <= ALLOWED["fp32"]


def test_a_weight_that_inference_mode_made_can_be_trained():
    with torch.inference_mode():
        weight = nf4.torch.quantize(torch.randn(OUT, IN))
    x = X.clone().requires_grad_()
    nf4.torch.linear(x, weight).sum().backward()
    expected = nf4.torch.dequantize(weight).sum(0).expand_as(x)
    assert error(x.grad, expected) <= ALLOWED["fp32"]


def test_the_compute_dtype_is_that_of_the_layer_before():
    theirs = linear4bit(compute_dtype=torch.bfloat16)
    layer = NF4Linear.from_bitsandbytes(theirs)
    assert layer.compute_dtype == torch.bfloat16
    y = layer(X)
    assert y.dtype == torch.float32
    assert error(y, theirs(X)) <= 2 * ALLOWED["bf16"]


def test_a_layer_around_a_weight_of_ones_own():
    weight = nf4.torch.quantize(torch.randn(OUT, IN))
    layer = NF4Linear.from_quantized(weight)
    assert layer.weight.data_ptr() == weight.packed.data_ptr()
    assert (layer.in_features, layer.out_features, layer.bias) == (IN, OUT, None)


REFUSED = {
    "linear is of type bitsandbytes.nn.modules.Linear4bit; expected a torch.nn.Linear": lambda: (
        NF4Linear.from_linear(linear4bit())
    ),
    "layer is of type bitsandbytes.nn.modules.Linear4bit without a quant_state": lambda: (
        NF4Linear.from_bitsandbytes(bnb.nn.Linear4bit(IN, OUT))
    ),
    "in bitsandbytes' layout for CPUs": lambda: NF4Linear.from_bitsandbytes(repacked()),
    "quant_state.code is not the table of nf4": lambda: NF4Linear.from_bitsandbytes(
        with_another_table()
    ),
    "weight is of shape (2, 3, 64); expected two": lambda: NF4Linear.from_quantized(
        nf4.torch.quantize(torch.randn(2, 3, 64))
    ),
    "linear.weight has NaN or Inf; expected finite": lambda: NF4Linear.from_linear(
        nonfinite(float("nan"))
    ),
    "linear.weight has NaN or Inf": lambda: Int4Linear.from_linear(
        nonfinite(-float("inf")), group_size=32
    ),
    "weight has NaN or Inf": lambda: NF4Experts.from_dense(nonfinite(float("inf")).weight[None]),
    "codebook is given": lambda: NF4Linear.from_quantized(
        nf4.torch.quantize(torch.randn(2, 64), codebook=torch.linspace(-1, 1, 16))
    ),
}


def nonfinite(value: float) -> torch.nn.Linear:
    linear = torch.nn.Linear(IN, OUT)
    linear.weight.data[OUT - 1, 3] = value
    return linear


def repacked():
    layer = linear4bit()
    layer.weight.quant_state.packing_format_for_cpu = True
    return layer


def with_another_table():
    layer = linear4bit()
    layer.weight.quant_state.code = torch.linspace(-1, 1, 16)
    return layer


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_layer_is_made_from(message):
    with pytest.raises(nf4.InvalidArgument) as caught:
        REFUSED[message]()
    assert message in str(caught.value)


def test_what_it_says_of_itself():
    assert repr(layer_of()) == (
        "NF4Linear(in_features=64, out_features=24, bias=True, format=nf4, blocksize=64, "
        "nested_blocksize=256)"
    )


# ---- state_dict ----------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_bitsandbytes_and_we_save_the_same(format, nested, bias):
    theirs = linear4bit(format, nested, bias=bias)
    saved = theirs.state_dict()
    ours = NF4Linear.from_bitsandbytes(theirs).state_dict()
    assert ours.keys() == saved.keys()
    for key, value in saved.items():
        if "quant_state" in key:
            fields = [json.loads(bytes(each.tolist())) for each in (ours[key], value)]
            assert fields[0] == fields[1]
        else:
            assert torch.equal(ours[key], value), key


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("assign", [False, True])
def test_we_load_what_bitsandbytes_saved(format, nested, storage, assign):
    theirs = linear4bit(format, nested, storage)
    saved = {f"model.{key}": value for key, value in theirs.state_dict().items()}
    model = torch.nn.ModuleDict({"model": NF4Linear(IN, OUT)})
    result = model.load_state_dict(saved, assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    layer = model["model"]
    assert same_parts(layer, NF4Linear.from_bitsandbytes(theirs))
    assert torch.equal(layer.bias, theirs.bias)
    assert (layer.weight.data_ptr() == theirs.weight.data_ptr()) == assign
    assert torch.equal(layer(X), NF4Linear.from_bitsandbytes(theirs)(X))


def test_a_table_that_weights_share_is_not_written_to():
    first, second = (NF4Linear.from_quantized(nf4.quantize(torch.randn(OUT, IN))) for _ in range(2))
    assert first.nested_code.data_ptr() == second.nested_code.data_ptr()
    expected = second(X)
    saved = first.state_dict()
    saved["weight.nested_quant_map"] = saved["weight.nested_quant_map"] / 2
    first.load_state_dict(saved)
    assert torch.equal(first.nested_code, second.nested_code / 2)
    assert torch.equal(second(X), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bitsandbytes_loads_what_we_saved(layout):
    layer = layer_of(layout)
    saved = layer.state_dict()
    stats = {key.removeprefix("weight."): v for key, v in saved.items() if "weight." in key}
    loaded = bnb.nn.Params4bit.from_prequantized(saved["weight"], stats, device="cpu")
    dense = bnb.functional.dequantize_4bit(loaded.data, loaded.quant_state)
    assert torch.equal(dense, layer.dequantize())


def test_a_state_dict_through_safetensors(tmp_path):
    from safetensors.torch import load_file, save_file

    layers = torch.nn.Sequential(layer_of(), NF4Linear.from_linear(torch.nn.Linear(OUT, IN)))
    save_file(layers.state_dict(), tmp_path / "model.safetensors")
    other = torch.nn.Sequential(NF4Linear(IN, OUT), NF4Linear(OUT, IN))
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other(X), layers(X))


def _without(key):
    return lambda saved: saved.pop(key)


def _changed(key, value):
    return lambda saved: saved.update({key: value})


STATE = "weight.quant_state.bitsandbytes__nf4"
FAULTS = {
    "weight.absmax is missing beside weight.quant_state": _without("weight.absmax"),
    "weight.nested_quant_map is missing": _without("weight.nested_quant_map"),
    "weight is of torch.uint8 and has no quant_state": _without(STATE),
    "NF4Linear.from_linear quantizes a dense weight": lambda saved: (
        saved.clear(), saved.update(torch.nn.Linear(IN, OUT).state_dict())
    ),
    "weight.quant_map is not the table of nf4": _changed("weight.quant_map", torch.zeros(16)),
    "Expecting value": _changed(STATE, torch.zeros(7, dtype=torch.uint8)),
    "weight is of shape (64, 24); expected (24, 64)": lambda saved: saved.update(
        NF4Linear.from_linear(torch.nn.Linear(OUT, IN, bias=False)).state_dict()
    ),
    'Missing key(s) in state_dict: "weight"': lambda saved: [
        saved.pop(key) for key in list(saved) if key.startswith("weight")
    ],
    'Unexpected key(s) in state_dict: "weight.more"': _changed("weight.more", torch.zeros(1)),
    "absmax has 3 elements; expected 24": _changed(
        "weight.absmax", torch.zeros(3, dtype=torch.uint8)
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", FAULTS)
def test_a_state_dict_that_is_refused(message):
    saved = layer_of().state_dict()
    FAULTS[message](saved)
    layer = layer_of()
    before = copy.deepcopy(layer)
    with pytest.raises(RuntimeError) as caught:
        layer.load_state_dict(saved)
    assert message in str(caught.value)
    if "Unexpected" not in message:
        assert same_parts(layer, before)
