"""Int4Linear: made from, saved, loaded, reordered. test_layers.py has the rest."""

from __future__ import annotations

import copy
import dataclasses

import nf4
import pytest
import torch_cases
from torch_cases import ALLOWED, error, reference

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
from int4_torch_cases import CASES, GROUP, IN, OUT, arrays_of, dense_of, weight_of  # noqa: E402
from nf4.torch import Int4Linear  # noqa: E402
from nf4.torch._int4_columns import plain_g_idx  # noqa: E402

ACT_ORDER = [case for case, (_, _, act_order) in CASES.items() if act_order]


def layer_of(case: str = "gptq", seed: int = 0, bias: bool = True, **given) -> Int4Linear:
    made = torch.nn.Parameter(torch.randn(OUT)) if bias else None
    return Int4Linear.from_quantized(weight_of(case, seed, **given), made)


def empty_of(case: str, **given) -> Int4Linear:
    layout, symmetric, _ = CASES[case]
    return Int4Linear(IN, OUT, layout=layout, group_size=GROUP, symmetric=symmetric, **given)


X = torch.randn(3, IN)


# ---- Made from ------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_around_a_weight(case, bias):
    weight = weight_of(case)
    made = torch.nn.Parameter(torch.randn(OUT)) if bias else None
    layer = Int4Linear.from_quantized(weight, made)
    assert layer.quantized.packed.data_ptr() == weight.packed.data_ptr()
    assert layer.quantized.scales.data_ptr() == weight.scales.data_ptr()
    assert (layer.in_features, layer.out_features, layer.bits) == (IN, OUT, 4)
    assert (layer.layout, layer.group_size) == (weight.layout, GROUP)
    assert torch.equal(layer.dequantize("fp32"), dense_of(arrays_of(case)))
    assert error(layer(X), reference(X, weight, made)) <= ALLOWED["fp32"]
    dense = layer.to_linear("fp32")
    assert dense.bias is made and torch.equal(dense.weight, layer.dequantize("fp32"))


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_from_a_dense_layer(layout, symmetric):
    linear = torch.nn.Linear(IN, OUT).eval()
    options = {"layout": layout, "group_size": GROUP, "symmetric": symmetric}
    layer = Int4Linear.from_linear(linear, **options)
    expected = nf4.quantize_int4(linear.weight.detach(), **options)
    assert torch.equal(layer.dequantize(), nf4.dequantize(expected))
    assert layer.bias is linear.bias and not layer.training
    assert error(layer(X), reference(X, expected, linear.bias)) <= ALLOWED["fp32"]


def test_the_gradient_of_x_and_bias():
    layer, x = layer_of("gptq_v2, act order"), X.clone().requires_grad_()
    layer(x).sum().backward()
    assert error(x.grad, layer.dequantize("fp32").sum(0).expand(3, IN)) <= ALLOWED["fp32"]
    assert torch.equal(layer.bias.grad, torch.full((OUT,), 3.0))


def test_a_compute_dtype():
    layer = Int4Linear.from_quantized(weight_of(), compute_dtype="bf16")
    y = layer(X)
    assert y.dtype == torch.float32
    assert torch.equal(y, nf4.matmul(X.bfloat16(), layer.quantized).float())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("g_idx", ["plain", "not set"])
def test_a_g_idx_that_says_nothing_is_dropped(dtype, g_idx):
    weight = weight_of()
    plain = plain_g_idx(weight).to(dtype)
    given = plain if g_idx == "plain" else torch.full_like(plain, -1)
    layer = Int4Linear.from_quantized(dataclasses.replace(weight, g_idx=given))
    assert layer.g_idx is None and torch.equal(layer.state_dict()["g_idx"], plain.int())


REFUSED = {
    "g_idx[5] is 2; expected a group, 0 to 1": lambda: layer_with_g_idx(2),
    "g_idx[5] is -3; expected a group, 0 to 1": lambda: layer_with_g_idx(-3),
    "g_idx is torch.int32 of shape (3,)": lambda: Int4Linear.from_quantized(
        dataclasses.replace(weight_of(), g_idx=torch.zeros(3, dtype=torch.int32))
    ),
    "weight is of type torch.Tensor; expected an Int4Tensor": lambda: Int4Linear.from_quantized(X),
    "linear is of type": lambda: Int4Linear.from_linear(layer_of()),
    "layer is of type torch.nn.modules.linear.Linear": lambda: Int4Linear.from_module(
        torch.nn.Linear(2, 2)
    ),
    "packed is of shape": lambda: Int4Linear.from_quantized(
        dataclasses.replace(weight_of(), packed=torch.zeros(OUT, IN // 8, dtype=torch.int32))
    ),
    "bias is of shape (3,)": lambda: Int4Linear.from_quantized(
        weight_of(), torch.nn.Parameter(torch.zeros(3))
    ),
    "layout is 'int4'": lambda: Int4Linear(IN, OUT, layout="int4"),
    "group_size": lambda: Int4Linear(IN, OUT, group_size=48),
    "scales_dtype is 'fp32'": lambda: Int4Linear(IN, OUT, group_size=32, scales_dtype="fp32"),
}


def layer_with_g_idx(value: int) -> Int4Linear:
    weight = weight_of("gptq_v2, act order")
    weight.g_idx[5] = value
    return Int4Linear.from_quantized(weight)


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_layer_is_made_from(message):
    with pytest.raises(nf4.InvalidArgument) as caught:
        REFUSED[message]()
    assert message in str(caught.value)


# ---- Compiled ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_compiled(case):
    layer = layer_of(case)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), layer(X))
    other = weight_of(case, seed=1)
    layer.load_state_dict(Int4Linear.from_quantized(other, layer.bias).state_dict())
    assert torch.equal(compiled(X), nf4.matmul(X, other, bias=layer.bias.detach()))


# ---- state_dict -------------------------------------------------------------------------

KEYS = {
    "gptq": {"qweight", "qzeros", "scales", "g_idx", "bias"},
    "gptq symmetric, act order": {"qweight", "qzeros", "scales", "g_idx", "bias"},
    "gptq_v2, act order": {"qweight", "qzeros", "scales", "g_idx", "bias"},
    "awq": {"qweight", "qzeros", "scales", "bias"},
    "compressed-tensors": {"weight_packed", "weight_scale", "weight_shape", "bias"},
    "compressed-tensors, zeros, act order": {
        "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
        "bias",
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["copied", "assigned", "from meta"])
@pytest.mark.parametrize("reordered", [False, True])
def test_saved_and_loaded(case, way, reordered):
    layer = layer_of(case)
    expected = layer.dequantize("fp32")
    if reordered:
        layer.reorder_()
    state = layer.state_dict()
    assert set(state) == KEYS[case]
    other = empty_of(case, device="meta" if way == "from meta" else None)
    memory = other.quantized.packed.data_ptr()
    found = other.load_state_dict(state, assign=way != "copied")
    assert not found.missing_keys and not found.unexpected_keys
    assert torch.equal(other.dequantize("fp32"), expected)
    assert (other.quantized.packed.data_ptr() == memory) == (way == "copied")
    for key, tensor in other.state_dict().items():
        assert torch.equal(tensor, state[key]), key


def test_a_bias_that_is_not_there_is_missing():
    state = layer_of("awq", bias=False).state_dict()
    found = empty_of("awq").load_state_dict(state, strict=False)
    assert found.missing_keys == ["bias"] and not found.unexpected_keys


FAULTS = {
    "g_idx[5] is 7; expected a group": lambda state: state["g_idx"].__setitem__(5, 7),
    "Missing key(s) in state_dict: \"qzeros\"": lambda state: state.pop("qzeros"),
    "packed is of shape": lambda state: state.update(qweight=state["qweight"].T),
    "Unexpected key(s) in state_dict: \"other\"": lambda state: state.update(other=X),
    "scales is of float64; expected fp16 or bf16": lambda state: state.update(
        scales=state["scales"].double()
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", FAULTS)
def test_a_state_dict_with_a_fault(message):
    state = dict(layer_of("gptq_v2, act order").state_dict())
    state["g_idx"] = state["g_idx"].clone()
    FAULTS[message](state)
    layer = empty_of("gptq_v2, act order")
    before = layer.qweight.clone()
    with pytest.raises((RuntimeError, nf4.InvalidArgument)) as caught:
        layer.load_state_dict(state)
    assert message in str(caught.value)
    if "Unexpected" not in message:
        assert torch.equal(layer.qweight, before)


def test_a_weight_shape_that_contradicts():
    state = layer_of("compressed-tensors").state_dict() | {"weight_shape": torch.tensor([3, 4])}
    with pytest.raises(RuntimeError, match=r"weight_shape is \[3, 4\]; expected \[24, 64\]"):
        empty_of("compressed-tensors").load_state_dict(state)


# ---- Act order ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", ACT_ORDER)
@pytest.mark.parametrize("cols", [IN, 256])
def test_reordered_once(case, cols):
    layer = layer_of(case, cols=cols)
    x, before, state = torch.randn(3, cols), layer.dequantize("fp32"), layer.state_dict()
    state = {key: tensor.clone() for key, tensor in state.items()}
    y = layer(x)
    assert "act order" in repr(layer)
    assert layer.reorder_() is layer and "reordered" in repr(layer)
    assert layer.quantized.g_idx is None and layer.permutation is not None
    assert torch.equal(layer.dequantize("fp32"), before)
    assert error(layer(x), y.double()) <= ALLOWED["fp32"]
    for key, tensor in layer.state_dict().items():
        assert torch.equal(tensor, state[key]), key
    copied = copy.deepcopy(layer).to(torch.float16)
    assert torch.equal(copied.dequantize("fp32"), before)


def test_reordering_without_act_order_does_nothing():
    layer = layer_of("awq")
    memory = layer.qweight.data_ptr()
    assert layer.reorder_().qweight.data_ptr() == memory and layer.permutation is None


def test_what_it_says_of_itself():
    assert repr(layer_of("compressed-tensors")) == (
        "Int4Linear(in_features=64, out_features=24, bias=True, layout=compressed-tensors, "
        "group_size=32, no zeros)"
    )


@pytest.mark.parametrize("reordered", [False, True])
@pytest.mark.parametrize("case", ACT_ORDER)
def test_an_index_written_past_the_checks_is_an_error(case, reordered):
    """It is written in place, or as accelerate assigns buffers. Nothing outside the weight is read
    or written."""
    for value in (10**6, -1, -(2**31)):
        layer = layer_of(case)
        name = "permutation" if reordered else next(n for n in layer._buffers if "g_idx" in n)
        if reordered:
            layer.reorder_()
        wrong = layer._buffers[name].clone()
        wrong[5] = value
        if value == -1:
            layer._buffers[name] = wrong
        else:
            layer._buffers[name].copy_(wrong)
        found = rf"(g_idx|permutation)\[5\] is {value}; expected 0 to"
        for rows in (1, 3, 40):
            with pytest.raises(nf4.InvalidArgument, match=found):
                layer(torch.randn(rows, IN))
        with pytest.raises(nf4.InvalidArgument, match=found):
            layer.dequantize("fp32")
