"""Weights that are cut for tensor parallelism keep their bits."""

import itertools

import nf4
import pytest

torch = pytest.importorskip("torch")
nf4_torch = pytest.importorskip("nf4.torch")
cuts = pytest.importorskip("nf4.vllm.cuts")

pytestmark = pytest.mark.interop


def quantized(rows: int, cols: int, blocksize: int = 64, nested: int = 256, format: str = "nf4"):
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows + cols))
    return nf4_torch.quantize(weight, format=format, blocksize=blocksize, nested_blocksize=nested)


def dense(weight: nf4.QuantizedTensor) -> "torch.Tensor":
    return nf4_torch.dequantize(weight, "fp32")


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [0, 256])
@pytest.mark.parametrize(
    ("rows", "cols", "blocksize", "parts"),
    [(256, 256, 64, 2), (96, 704, 64, 2), (24, 1408, 64, 4), (8, 4096, 4096, 8), (7, 64, 64, 1)],
)
def test_rows_and_columns_keep_their_bits(rows, cols, blocksize, parts, nested, format):
    weight = quantized(rows, cols, blocksize, nested, format)
    whole = dense(weight)
    for i in range(parts):
        bounds = [(size * i // parts, size * (i + 1) // parts) for size in (rows, cols)]
        for dim in (0, 1):
            made = cuts.cut(weight, dim, [bounds[dim]])
            begin, end = bounds[dim]
            assert torch.equal(dense(made), whole.narrow(dim, begin, end - begin))
            assert made.blocksize == blocksize or (cols // parts) % blocksize or blocksize > cols


def test_a_whole_weight_is_not_copied():
    weight = quantized(64, 128)
    assert cuts.cut(weight, 0, [(0, 64)]) is weight and cuts.cut(weight, 1, [(0, 128)]) is weight


def test_nested_blocks_become_smaller_only_where_a_cut_needs_it():
    weight = quantized(64, 4096)  # a nested block is four rows
    assert cuts.cut(weight, 0, [(0, 32)]).nested_blocksize == 256
    assert cuts.cut(weight, 1, [(2048, 4096)]).nested_blocksize == 32
    assert cuts.cut(weight, 0, [(2, 64)]).nested_blocksize == 128
    assert not cuts.cut(quantized(64, 320), 1, [(0, 192)]).nested  # 3 blocks of each row: flat


def test_a_cut_that_no_block_fits_is_refused():
    with pytest.raises(ValueError, match="columns 0 to 100 of a weight of 64x200"):
        cuts.cut(quantized(64, 200), 1, [(0, 100)])


def test_several_ranges_of_rows_become_one_weight():
    weight = quantized(96, 128)
    ranges = [(0, 16), (32, 40), (64, 65)]
    expected = torch.cat([dense(weight)[begin:end] for begin, end in ranges])
    assert torch.equal(dense(cuts.cut(weight, 0, ranges)), expected)


@pytest.mark.parametrize("nested", [0, 256])
def test_flat_weights_are_joined(nested):
    first, second = quantized(32, 128, nested=nested), quantized(16, 128, nested=nested)
    assert cuts.can_join(first, second) == (nested == 0)
    if nested == 0:
        both = torch.cat((dense(first), dense(second)))
        assert torch.equal(dense(cuts.join([first, second])), both)


def test_nested_weights_of_one_offset_are_joined_at_a_nested_block():
    weight = quantized(64, 1024)  # a nested block is 16 rows
    halves = [cuts.cut(weight, 0, [bounds]) for bounds in ((0, 32), (32, 64))]
    assert cuts.can_join(*halves)
    joined = cuts.join(halves)
    assert joined.nested and torch.equal(dense(joined), dense(weight))
    assert not cuts.can_join(*[cuts.cut(weight, 0, [each]) for each in ((0, 40), (40, 64))])


def test_flat_scales_are_those_of_the_nested():
    weight = quantized(48, 320)
    assert not cuts.flat(weight).nested and torch.equal(dense(cuts.flat(weight)), dense(weight))


def test_weights_that_differ_are_not_joined():
    weights = [
        quantized(32, 128, nested=0),
        quantized(32, 128, 32, nested=0),
        quantized(32, 256, nested=0),
        quantized(32, 128, nested=0, format="fp4"),
    ]
    for first, second in itertools.permutations(weights, 2):
        assert not cuts.can_join(first, second)
    assert not cuts.can_join(quantized(3, 32, nested=0), quantized(32, 32, nested=0))


def test_dense_rows_are_joined_with_dense_rows_alone():
    first, second, packed = torch.ones(2, 8), torch.zeros(3, 8), quantized(32, 128, nested=0)
    assert cuts.can_join(first, second)
    assert torch.equal(cuts.join([first, second]), torch.cat((first, second)))
    assert not cuts.can_join(first, packed) and not cuts.can_join(packed, first)


def test_ranges_that_follow_each_other_are_one():
    assert cuts.merged([(0, 2), (2, 5), (6, 7), (7, 8)]) == [(0, 5), (6, 8)]
    assert cuts.merged([]) == []
