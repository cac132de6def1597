"""Scales and codes by what the columns of x were: without a search they are the library's, with one
they are exact where 4 bits can be, and their error in the output is smaller; readers of the formats
get what was meant."""

from __future__ import annotations

import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
from nf4.torch.calibration import rounding, weights  # noqa: E402
from nf4.torch.calibration.layers import Seen  # noqa: E402

SHAPES = [(96, 128), (40, 200), (7, 33), (3, 24)]
LAYOUTS = ["gptq", "gptq_v2", "awq", "compressed-tensors"]


def seen(columns):
    """Columns of different size that depend on each other."""
    x = torch.randn(1000, columns) * torch.logspace(-1, 1, columns)
    x = x + x @ torch.randn(columns, columns) / columns
    return Seen(x.T @ x / len(x), len(x))


def error(weight, dense, of):
    """What the weight's rounding costs the output, in the mean over the tokens."""
    lost = nf4.torch.dequantize(weight).double() - dense.double()
    return ((lost @ of.hessian.double()) * lost).sum().item()


@pytest.mark.parametrize("nested", [0, 256])
@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_magnitude_gives_the_bytes_of_quantize(shape, format, nested):
    weight = torch.randn(shape)
    weight.view(-1)[:64] = 0
    expected = nf4.torch.quantize(weight, format=format, blocksize=64, nested_blocksize=nested)
    grid = rounding.Codebook(format, 64, weight.device)
    scales = rounding.largest_scales(weight, grid)
    codes, _ = rounding.nearest(weight, grid, scales)
    assert torch.equal(weights.packed(codes), expected.packed)
    if nested:
        stored = rounding.nested(scales.scale)[1]
        assert torch.equal(stored.codes, expected.absmax)
        assert torch.equal(stored.absmax, expected.nested_absmax)
        assert torch.equal(stored.offset, expected.nested_offset)
    else:
        assert torch.equal(scales.scale, expected.absmax)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_largest_magnitude_gives_the_integers_of_quantize_int4(dtype, symmetric):
    weight = torch.randn(16, 96).to(dtype)
    options = {"layout": "compressed-tensors", "group_size": 32, "symmetric": symmetric}
    expected = nf4.torch.quantize_int4(weight, **options)
    grid = rounding.Integers(32, symmetric, dtype)
    scales = rounding.largest_scales(weight.float(), grid)
    _, worth = rounding.nearest(weight.float(), grid, scales)
    assert torch.equal(scales.scale.view(16, 3).to(dtype), expected.scales)
    assert torch.equal(worth.to(dtype), nf4.torch.dequantize(expected))


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_error_is_smaller_and_the_bytes_are_what_was_meant(shape, format, nested):
    weight, of = torch.randn(shape), seen(shape[1])
    plain = nf4.torch.quantize(
        weight, format=format, blocksize=64, nested_blocksize=256 if nested else 0
    )
    made = weights.quantize(weight, of, format=format, blocksize=64, with_nested=nested)
    assert error(made, weight, of) < error(plain, weight, of)
    grid = rounding.Codebook(format, 64, weight.device)
    scales = rounding.searched_scales(weight, grid, of.hessian.diagonal())
    scales = rounding.nested(scales.scale)[0] if nested else scales
    meant = rounding.with_feedback(weight, grid, scales, of.hessian, weights.DAMPING)[1]
    assert torch.equal(nf4.torch.dequantize(made), meant)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group_size", [32, -1])
def test_integers_of_smaller_error_in_every_layout(layout, group_size, symmetric):
    weight, of = torch.randn(48, 160), seen(160)
    options = {"layout": layout, "group_size": group_size, "symmetric": symmetric}
    plain = nf4.torch.quantize_int4(weight, **options)
    made = weights.quantize_int4(weight, of, **options)
    for part in ("packed", "scales", "zeros"):
        one, other = getattr(made, part), getattr(plain, part)
        assert (one is None) == (other is None)
        assert one is None or (one.shape, one.dtype) == (other.shape, other.dtype), part
    assert error(made, weight, of) < error(plain, weight, of)
    first = weights.quantize_int4(weight, of, **{**options, "layout": LAYOUTS[0]})
    assert torch.equal(nf4.torch.dequantize(made), nf4.torch.dequantize(first))


def test_weights_that_4_bits_can_hold_are_exact():
    dense = nf4.torch.dequantize(nf4.torch.quantize(torch.randn(32, 128), nested_blocksize=0))
    made = weights.quantize(dense, seen(128), format="nf4", blocksize=64, with_nested=False)
    assert torch.equal(nf4.torch.dequantize(made), dense)


def test_a_column_that_is_never_used_changes_no_other():
    of = seen(64)
    of.hessian[5], of.hessian[:, 5] = 0, 0
    one = torch.randn(24, 64)
    one[:, 0] = 4  # the largest magnitude of each block
    other = one.clone()
    other[:, 5] = torch.randn(24)
    first, second = (
        nf4.torch.dequantize(
            weights.quantize(each, of, format="nf4", blocksize=64, with_nested=False)
        )
        for each in (one, other)
    )
    kept = [column for column in range(64) if column != 5]
    assert torch.equal(first[:, kept], second[:, kept])


def test_columns_that_are_never_used_have_plain_scales():
    weight, of = torch.randn(24, 128), seen(128)
    of.hessian[64:], of.hessian[:, 64:] = 0, 0
    made = weights.quantize(weight, of, format="nf4", blocksize=64, with_nested=False)
    plain = nf4.torch.quantize(weight, nested_blocksize=0)
    same = (made.absmax == plain.absmax).view(24, 2)
    assert same[:, 1].all() and not same[:, 0].all()
    assert torch.equal(nf4.torch.dequantize(made)[:, 64:], nf4.torch.dequantize(plain)[:, 64:])


def test_a_scale_of_8_bits_below_0_gives_the_codes_that_are_meant():
    grid, of = rounding.Codebook("nf4", 64, torch.device("cpu")), seen(64)
    weight = torch.randn(16, 64)
    scales = rounding.Scales(torch.full((16,), -2.0))
    rounded = rounding.nearest(weight, grid, scales)[1]
    assert (rounded - weight).abs().median() < 0.2
    meant = rounding.with_feedback(weight, grid, scales, of.hessian, 0.3)
    assert torch.equal(meant[1], grid.worth(meant[0].long(), scales.at((slice(None), None))))


def test_equal_columns_make_up_for_each_other():
    """The sum of two columns with the same x is rounded, not each of them."""
    x = torch.randn(500, 1)
    of = Seen(x.T @ x / 500 * torch.ones(64, 64), 500)
    weight = torch.rand(40, 64) - 0.5
    made = weights.quantize(weight, of, format="nf4", blocksize=64, with_nested=False)
    plain = nf4.torch.quantize(weight, nested_blocksize=0)
    lost = [(nf4.torch.dequantize(each) - weight).sum(1).abs().mean() for each in (made, plain)]
    assert lost[0] < 0.2 * lost[1]


def test_a_layer_that_saw_only_zeros_is_rounded_to_nearest():
    weight, nothing = torch.randn(8, 64), Seen(torch.zeros(64, 64), 10)
    made = weights.quantize(weight, nothing, format="nf4", blocksize=64, with_nested=False)
    grid = rounding.Codebook("nf4", 64, weight.device)
    nearest = rounding.nearest(weight, grid, rounding.Scales(made.absmax))[1]
    assert torch.equal(nf4.torch.dequantize(made), nearest)
