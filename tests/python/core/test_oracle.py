"""Every bit that the library writes, against numpy's reading of nf4.h."""

import dataclasses

import cases
import nf4
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from strategies import any_case


def assert_quantize_is_exact(case: cases.Case) -> nf4.QuantizedTensor:
    q = case.quantized()
    expected = oracle.quantize(
        case.source,
        blocksize=case.blocksize,
        nested_blocksize=case.nested_blocksize,
        codebook=case.codebook_in_use,
        scale_code=nf4.scale_code(),
    )
    for part, values in expected.items():
        assert oracle.differing(np.asarray(getattr(q, part)), values) == 0, part
    return q


def assert_dequantize_is_exact(q: nf4.QuantizedTensor, codebook: np.ndarray) -> None:
    for dtype in oracle.DTYPES:
        expected = oracle.dequantize(q, codebook, dtype)
        assert oracle.differing(nf4.dequantize(q, dtype), expected) == 0, dtype


@pytest.mark.parametrize("case", cases.all_layouts(seed=1, elements=9000), ids=lambda case: case.id)
def test_every_layout(case):
    assert_dequantize_is_exact(assert_quantize_is_exact(case), case.codebook_in_use)


@given(any_case(least=1))
@settings(max_examples=300)
def test_any_case(case):
    assert_dequantize_is_exact(assert_quantize_is_exact(case), case.codebook_in_use)


@given(any_case(least=1))
@settings(max_examples=150)
def test_dequantize_of_any_bytes(case):
    """Any packed byte and any scale is a weight: infinities, NaN and subnormals are used as
    they are."""
    q = case.quantized()
    rng = np.random.default_rng(case.seed)
    q.packed[:] = rng.integers(0, 256, q.packed.size)
    scales = q.nested_absmax if q.nested else q.absmax
    scales[:] = rng.choice(np.concatenate([cases.AWKWARD, [-1.5, 0.75]]), scales.size)
    assert_dequantize_is_exact(q, case.codebook_in_use)


@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_values_between_neighbours(format):
    """The midpoint of two entries goes to the lower, the float above it to the upper."""
    entries = np.unique(nf4.codebook(format))
    midpoints = np.float32(0.5) * (entries[:-1] + entries[1:])
    above = np.nextafter(midpoints, np.float32(2))
    # 1 makes the scale of each block 1, and its inverse too.
    values = np.concatenate([midpoints, above]).reshape(-1, 1)
    blocks = np.concatenate([values, np.ones((values.size, 31), np.float32)], axis=1)
    q = nf4.quantize(blocks, format=format, blocksize=32, nested_blocksize=0)
    found = nf4.dequantize(q)[:, 0]
    assert found.tolist() == np.concatenate([entries[:-1], entries[1:]]).tolist()


def test_scales_between_neighbours():
    """As for values: of scales whose mean is 2, those at 2 +- a midpoint go to the lower entry."""
    code = ((np.arange(256) - 127) / 128).astype(np.float32)
    midpoints = (np.arange(1, 120, 7, dtype=np.float32) + 0.5) / 128
    scales = np.concatenate([[3, 1], 2 + midpoints, 2 - midpoints]).astype(np.float32)
    source = np.repeat(scales, 32)
    q = dataclasses.replace(nf4.quantize(source, blocksize=32), nested_code=code)
    nf4.quantize(source, out=q)
    assert (q.nested_offset, q.nested_absmax.tolist()) == (2, [1])
    lower = np.concatenate([[1, -1], midpoints - 1 / 256, -midpoints - 1 / 256])
    lower = np.maximum(lower, code[0])
    assert code[q.absmax].tolist() == lower.tolist()
