"""What holds of any weight: errors bounded, nothing lost on the second way, dtypes, threads."""

import nf4
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import any_case


def widest_half_gap(entries: np.ndarray) -> float:
    """The farthest that a number in [-1, 1] can be from the nearest entry."""
    entries = np.unique(entries).astype(np.float64)
    ends = [entries[0] + 1, 1 - entries[-1]]
    return max(float(np.diff(entries).max()) / 2, *ends)


def per_element(values: np.ndarray, q: nf4.QuantizedTensor) -> np.ndarray:
    return np.repeat(values.astype(np.float64), q.blocksize)[: q.elements].reshape(q.shape)


@given(any_case(awkward=False, least=1, nested_blocksize=st.just(0)))
@settings(max_examples=200)
def test_error_is_within_half_a_gap_of_the_codebook(case):
    q = case.quantized()
    error = np.abs(nf4.dequantize(q, "fp32").astype(np.float64) - case.source.astype(np.float64))
    bound = per_element(q.absmax, q) * (widest_half_gap(case.codebook_in_use) + 1e-6)
    assert (error <= bound).all()


@given(any_case(awkward=False, least=1, nested_blocksize=st.sampled_from([1, 64, 256])))
@settings(max_examples=200)
def test_nesting_keeps_the_codes_and_moves_scales_within_half_a_gap(case):
    q = case.quantized()
    flat = case.quantized(nested_blocksize=0)
    assert q.packed.tolist() == flat.packed.tolist()
    spread = np.repeat(q.nested_absmax, q.nested_blocksize)[: q.blocks].astype(np.float64)
    rounding = 1e-6 * np.abs(flat.absmax).max()
    error = np.abs(oracle.scales_of(q).astype(np.float64) - flat.absmax)
    assert (error <= spread * widest_half_gap(nf4.scale_code()) + rounding).all()


@given(any_case(awkward=False, least=1, nested_blocksize=st.just(0), dtype=st.just("fp32")))
@settings(max_examples=200)
def test_quantizing_again_changes_nothing(case):
    q = case.quantized()
    again = nf4.quantize(nf4.dequantize(q), **case.layout)
    assert again.packed.tolist() == q.packed.tolist()
    assert oracle.differing(again.absmax, q.absmax) == 0


@given(any_case())
@settings(max_examples=200)
def test_sixteen_bits_are_the_fp32_result_rounded_once(case):
    q = case.quantized()
    full = nf4.dequantize(q, "fp32")
    for dtype in ("fp16", "bf16"):
        with np.errstate(over="ignore"):
            rounded = full.astype(oracle.DTYPES[dtype])
        assert oracle.differing(nf4.dequantize(q, dtype), rounded) == 0


@given(any_case(), st.integers(1, 5))
@settings(max_examples=100)
def test_the_number_of_threads_changes_nothing(case, threads):
    one, many = case.quantized(threads=1), case.quantized(threads=threads)
    assert one.packed.tolist() == many.packed.tolist()
    assert oracle.differing(one.absmax, many.absmax) == 0
    few = nf4.dequantize(one, threads=1)
    assert oracle.differing(few, nf4.dequantize(one, threads=threads)) == 0


@given(any_case())
@settings(max_examples=100)
def test_shapes_and_sizes(case):
    q = case.quantized()
    result = nf4.dequantize(q)
    assert result.shape == q.shape == case.shape
    assert result.dtype == oracle.DTYPES[case.dtype] and q.dtype == case.dtype
    assert q.packed.size == -(-q.elements // 2)
    assert q.absmax.size == q.blocks == -(-q.elements // case.blocksize)
    arrays = [q.packed, q.absmax]
    if q.nested:
        assert q.nested_absmax.size == -(-q.blocks // case.nested_blocksize)
        arrays += [q.nested_absmax, q.nested_offset]
    assert q.nbytes == sum(array.nbytes for array in arrays)
    assert q.bits_per_weight == (8 * q.nbytes / q.elements if q.elements else 0)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (3, 0, 7)])
@pytest.mark.parametrize("nested_blocksize", [0, 256])
def test_no_elements(shape, nested_blocksize):
    q = nf4.quantize(np.empty(shape, np.float32), nested_blocksize=nested_blocksize)
    assert (q.elements, q.blocks, q.packed.size, q.absmax.size) == (0, 0, 0, 0)
    assert nf4.dequantize(q).shape == shape


def test_zeros_stay_zeros_of_positive_sign():
    result = nf4.dequantize(nf4.quantize(np.full((3, 64), -0.0, np.float32), nested_blocksize=0))
    assert oracle.bits(result).any() == np.False_


def test_a_bad_element_does_not_spoil_its_neighbours():
    clean = np.random.default_rng(5).standard_normal(64).astype(np.float32)
    spoilt = clean.copy()
    spoilt[[3, 20, 41]] = [np.nan, np.inf, -np.inf]
    keep = np.setdiff1d(np.arange(64), [3, 20, 41, np.abs(clean).argmax()])
    a, b = (nf4.dequantize(nf4.quantize(each, nested_blocksize=0)) for each in (clean, spoilt))
    assert oracle.differing(a[keep], b[keep]) == 0 and np.isfinite(b).all()
    assert b[3] == 0 and b[20] == np.abs(clean).max() and b[41] == -np.abs(clean).max()


@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
@pytest.mark.parametrize("shape", [(1024, 2048), (3, 1025, 1031)])
def test_a_large_result_is_a_plain_array_that_begins_with_a_huge_page(shape, dtype):
    source = np.random.default_rng(7).standard_normal(shape, np.float32)
    q = nf4.quantize(source)
    result = nf4.dequantize(q, dtype)
    assert type(result) is np.ndarray and result.ctypes.data % (2 << 20) == 0
    assert (result.shape, result.dtype) == (shape, oracle.DTYPES[dtype])
    assert result.flags.c_contiguous and result.flags.writeable and result.flags.aligned
    out = np.empty(shape, oracle.DTYPES[dtype])
    assert oracle.differing(result, nf4.dequantize(q, out=out)) == 0
    other = nf4.dequantize(q, dtype)
    result[...] = 0
    assert oracle.differing(other, out) == 0 and not result.any()


def test_out_and_default_dtypes():
    source = np.random.default_rng(6).standard_normal((5, 33)).astype(np.float16)
    q = nf4.quantize(source)
    assert nf4.dequantize(q).dtype == np.float16
    out = np.empty(165, np.float32)
    assert nf4.dequantize(q, out=out) is out
    assert oracle.differing(out.reshape(5, 33), nf4.dequantize(q, np.float32)) == 0
    again = nf4.quantize(source * 2, out=q)
    assert again is q
    assert oracle.differing(nf4.dequantize(q, "fp32"), 2 * out.reshape(5, 33)) == 0
