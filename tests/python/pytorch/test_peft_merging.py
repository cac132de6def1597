"""What PEFT does with an adapter's weights over an NF4Linear: merge, unmerge, DoRA, combined
adapters. Beside PEFT over the dense weight, up to the rounding to 4 bits."""

from __future__ import annotations

import copy

import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "served")]
torch_cases.require("torch", "bitsandbytes", "peft", "_nf4_fast")

import nf4.torch  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
from nf4.errors import InvalidArgument  # noqa: E402
from peft_cases import (  # noqa: E402
    FORMATS,
    IN,
    OUT,
    adapted,
    base,
    dense,
    layer_of,
    pair,
    randomize,
    require_equal,
    results,
)

# ||W' - W|| / ||W|| where W' is W in NF4 and normally distributed is 0.09.
QUANTIZED = 0.12


def weight(model: torch.nn.Module) -> torch.Tensor:
    made = layer_of(model)
    made = made.get_base_layer() if hasattr(made, "get_base_layer") else made
    if isinstance(made, nf4.torch.NF4Linear):
        return made.dequantize()
    return made.weight.detach()


def requantized(of: torch.Tensor, like: nf4.QuantizedTensor) -> torch.Tensor:
    """`of` in the format of another weight and, in NVFP4, with its global scale."""
    rule = "even" if like.format == "mxfp4" else None
    made = nf4.torch.quantize(of, format=like.format, scale_rule=rule)
    if like.format == "nvfp4":
        made.nested_absmax.copy_(like.nested_absmax)
        made = nf4.quantize(of.contiguous(), out=made)
    return nf4.torch.dequantize(made, "fp32")


def merged_base(model: torch.nn.Module) -> nf4.QuantizedTensor:
    return layer_of(model).get_base_layer().quantized


@pytest.mark.parametrize(
    ("kind", "format"),
    [*(("lora.Linear", each) for each in FORMATS), ("lora.bnb.Linear4bit", "nf4")],
)
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}])
@pytest.mark.parametrize("safe", [False, True])
def test_merge_and_unmerge(kind, format, options, safe):
    layers = "NF4Linear" if kind == "lora.Linear" else "Linear4bit"
    ours, theirs = pair(layers, format=format, **options)
    if kind == "lora.bnb.Linear4bit":
        nf4.torch.convert(ours)
        assert isinstance(layer_of(ours).base_layer, nf4.torch.NF4Linear)
    before = weight(ours)
    for each in (ours, theirs):  # an adapter that is small beside the weight, as trained ones are
        layer_of(each).lora_B["default"].weight.data /= 16
        each.merge_adapter(safe_merge=safe)
    assert layer_of(ours).merged
    require_equal([weight(ours)], [requantized(weight(theirs), merged_base(ours))], 1e-2)
    x = torch.randn(3, IN)
    require_equal([ours(x)], [theirs(x)], QUANTIZED)
    for each in (ours, theirs):
        each.unmerge_adapter()
    assert not layer_of(ours).merged
    require_equal([weight(ours)], [before], 2 * QUANTIZED)
    require_equal([ours(x)], [theirs(x)], 2 * QUANTIZED)


def test_merging_is_that_of_a_linear4bit():
    """Both quantize the sum in fp32."""
    theirs = adapted(base("Linear4bit", torch.float32, False))
    layer = layer_of(theirs).base_layer
    ours = adapted(nf4.torch.NF4Linear.from_bitsandbytes(layer))
    with pytest.warns(UserWarning, match="rounding"):
        theirs.merge_adapter()
    ours.merge_adapter()
    expected = nf4.torch.NF4Linear.from_bitsandbytes(layer).dequantize()
    require_equal([weight(ours)], [expected], 1e-2)  # of ties, the codes may differ


@pytest.mark.parametrize("format", FORMATS)
def test_two_adapters_are_merged_in_turn(format):
    ours, theirs = pair("NF4Linear", format=format)
    for each in (ours, theirs):
        each.add_adapter("other", peft.LoraConfig(r=4, lora_alpha=4, target_modules=["linear"]))
        randomize(each, 3)
        each.base_model.set_adapter(["default", "other"])
        each.merge_adapter()
    assert layer_of(ours).merged_adapters == ["default", "other"]
    require_equal([weight(ours)], [weight(theirs)], 2 * QUANTIZED)
    ours.unmerge_adapter()
    assert layer_of(ours).merged_adapters == []


@pytest.mark.parametrize("format", FORMATS)
def test_merge_and_unload_gives_an_nf4linear(format):
    ours, theirs = pair("NF4Linear", bias=True, lora_bias=True, format=format)
    made, expected = ours.merge_and_unload(), theirs.merge_and_unload()
    assert type(made.linear) is nf4.torch.NF4Linear
    assert made.linear.compute_dtype == torch.float32 and made.linear.dtype_before == "fp32"
    assert made.linear.format == format
    require_equal([made.linear.bias], [expected.linear.bias], 1e-6)
    x = torch.randn(3, IN)
    require_equal([made(x)], [expected(x)], QUANTIZED)
    again = nf4.torch.NF4Linear(IN, OUT, dtype=torch.float32)
    again.load_state_dict(made.linear.state_dict())
    assert torch.equal(again(x), made.linear(x))


def test_merged_within_pefts_linear4bit_too():
    """As bitsandbytes' layers are, once they are converted."""
    model = adapted(base("Linear4bit", torch.float32, False))
    before = copy.deepcopy(model)
    nf4.torch.convert(model)
    x = torch.randn(3, IN)
    require_equal(results(model, x), results(before, x), 2e-6)
    require_equal([model.merge_and_unload()(x)], [before(x)], QUANTIZED)


def test_disable_adapter_of_a_merged_layer():
    ours, theirs = pair("NF4Linear")
    ours.merge_adapter()
    theirs.merge_adapter()
    x = torch.randn(3, IN)
    with ours.disable_adapter(), theirs.disable_adapter():
        require_equal([ours(x)], [theirs(x)], 2 * QUANTIZED)
    assert not layer_of(ours).merged


@pytest.mark.parametrize("kind", ["linear", "cat", "svd", "ties"])
def test_adapters_that_are_combined(kind):
    ours, theirs = pair("NF4Linear")
    for each in (ours, theirs):
        each.add_adapter("other", peft.LoraConfig(r=8, lora_alpha=4, target_modules=["linear"]))
        randomize(each, 3)
        options = {"density": 0.5} if kind == "ties" else {}
        each.add_weighted_adapter(
            ["default", "other"], [0.7, 0.2], "both", combination_type=kind, **options
        )
        each.set_adapter("both")
    x = torch.randn(3, IN)
    require_equal([ours(x)], [theirs(x)], 1e-5)


def test_dora_trains_as_over_a_dense_weight():
    ours, theirs = pair("NF4Linear", use_dora=True)
    assert (layer_of(ours).lora_magnitude_vector["default"].weight.shape) == (OUT,)
    x = torch.randn(3, IN)
    require_equal(results(ours, x), results(theirs, x), 3e-6)


def test_a_broken_adapter_is_not_merged():
    ours = pair("NF4Linear")[0]
    layer_of(ours).lora_A["default"].weight.data[0, 0] = float("nan")
    before = weight(ours)
    with pytest.raises(ValueError, match="not finite; adapter default"):
        ours.merge_adapter(safe_merge=True)
    assert torch.equal(weight(ours), before) and not layer_of(ours).merged


def test_a_bias_that_the_base_lacks():
    with pytest.warns(UserWarning, match="lora_bias"):
        ours = pair("NF4Linear", lora_bias=True)[0]
    before = weight(ours)
    with pytest.raises(RuntimeError, match="the base layer has no bias"):
        ours.merge_adapter()
    assert torch.equal(weight(ours), before)


def test_merging_twice_and_unmerging_nothing():
    ours = pair("NF4Linear")[0]
    ours.merge_adapter()
    merged = weight(ours)
    with pytest.warns(UserWarning, match="[Aa]lready"):
        ours.merge_adapter()
    assert torch.equal(weight(ours), merged)
    ours.unmerge_adapter()
    with pytest.warns(UserWarning, match="Already unmerged"):
        layer_of(ours).unmerge()


@pytest.mark.parametrize("format", FORMATS)
def test_requantize(format):
    linear = base("NF4Linear", torch.bfloat16, False, format)
    same = linear.dequantize("fp32")
    wanted = torch.randn(OUT, IN).t().contiguous().t()
    linear.requantize(wanted)
    assert torch.equal(linear.dequantize("fp32"), requantized(wanted, linear.quantized))
    assert linear.dtype_before == "bf16" and linear.format == format
    if format in ("mxfp4", "nvfp4"):  # scales are powers of two, or those of before
        linear.requantize(same)
        assert torch.equal(linear.dequantize("fp32"), same)
    with pytest.raises(InvalidArgument, match=r"weight is of shape \(128, 192\); expected"):
        linear.requantize(wanted.t())
    assert dense(linear).weight.shape == (OUT, IN)


def test_no_merge_into_integers():
    ours, _ = pair("Int4Linear")
    with pytest.raises(InvalidArgument, match="into an Int4Linear.*; expected adapters that stay"):
        ours.merge_adapter()
    assert not layer_of(ours).merged
