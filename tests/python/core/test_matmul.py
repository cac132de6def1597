"""nf4.matmul on host memory: its numbers, its shapes and strides, what is refused of it."""

import dataclasses

import cases
import nf4
import numpy as np
import oracle
import pytest
from cases import numbers
from fakes import CudaArray, DlpackArray, read_only
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import any_case

RNG = np.random.default_rng(0)
ROWS, COLS = 6, 64
WEIGHT = RNG.standard_normal((ROWS, COLS)).astype(np.float32)
# The relative error, by norm, that is never to be passed.
WORST = {"fp32": 1e-6, "fp16": 5e-4, "bf16": 4e-3}


def require_close(y, expected, allowed):
    assert (np.abs(y.astype(np.float64) - expected) <= allowed).all()


@given(
    any_case(awkward=False, shape=st.tuples(st.integers(0, 40), st.integers(0, 200))),
    st.lists(st.integers(0, 5), max_size=3),
    st.booleans(),
    st.integers(0, 200),
)
@settings(max_examples=300)
def test_products_are_those_of_the_header(case, leading, with_bias, gap):
    q = case.quantized()
    rows, cols = case.shape
    x = numbers(case.seed, (*leading, cols + gap), case.dtype)[..., :cols]
    bias = numbers(case.seed + 1, rows, case.dtype) if with_bias else None
    y = nf4.matmul(x, q, bias=bias)
    assert type(y) is np.ndarray and y.dtype == x.dtype and y.shape == (*leading, rows)
    require_close(y, *oracle.matmul(q, case.codebook_in_use, x, bias))


@pytest.mark.parametrize("case", cases.all_layouts(seed=40, elements=20000), ids=lambda c: c.id)
def test_every_layout(case):
    q = nf4.quantize(numbers(case.seed, case.shape, case.dtype), **case.layout)
    x = numbers(case.seed, (3, case.shape[1]), case.dtype)
    require_close(nf4.matmul(x, q), *oracle.matmul(q, case.codebook_in_use, x))


@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
@pytest.mark.parametrize("m", [1, 5, 64])
def test_relative_error_with_outliers(dtype, m):
    q = nf4.quantize(numbers(1, (96, 1000)))
    x = numbers(m, (m, 1000), dtype)
    x[:, ::97] = np.float32(1e3)
    y = nf4.matmul(x, q).astype(np.float64)
    expected, _ = oracle.matmul(q, nf4.codebook(), x)
    assert np.linalg.norm(y - expected) <= WORST[dtype] * np.linalg.norm(expected)


def test_leading_dimensions_of_a_weight_are_rows():
    q = nf4.quantize(numbers(2, (2, 3, COLS)))
    x = numbers(3, (4, COLS))
    y = nf4.matmul(x, q)
    assert y.shape == (4, 6)
    require_close(y, *oracle.matmul(q, nf4.codebook(), x))
    one = nf4.quantize(numbers(4, (COLS,)))
    assert nf4.matmul(x, one).shape == (4, 1)


def gapped(values, gap):
    """The same numbers with `gap` of 7s after each row."""
    wide = np.full((*values.shape[:-1], values.shape[-1] + gap), 7, values.dtype)
    wide[..., : values.shape[-1]] = values
    return wide[..., : values.shape[-1]]


VIEWS = {
    "gaps": lambda x: gapped(x, 3),
    "every other row": lambda x: np.repeat(x, 2, axis=-2)[..., ::2, :],
    "a row of a vector": lambda x: x[0, 0],
    "rows of length 1 between": lambda x: gapped(x, 5)[:, None],
    "read-only": read_only,
    "DLPack": lambda x: DlpackArray(gapped(x, 3), 2),
}


@pytest.mark.parametrize("view", VIEWS)
def test_x_may_have_gaps(view):
    q = nf4.quantize(WEIGHT)
    plain = numbers(5, (2, 3, COLS))
    x = VIEWS[view](plain)
    expected = nf4.matmul(getattr(x, "array", x).copy(), q)
    y = nf4.matmul(x, q)
    assert y.flags.c_contiguous and oracle.differing(y, expected) == 0


@pytest.mark.parametrize("gap", [0, 1, 9])
def test_what_is_between_the_rows_of_out_is_not_written(gap):
    q, x = nf4.quantize(WEIGHT), numbers(6, (2, 3, COLS))
    out = gapped(np.zeros((2, 3, ROWS), np.float32), gap)
    assert nf4.matmul(x, q, out=out) is out
    assert oracle.differing(out.copy(), nf4.matmul(x, q)) == 0
    assert (out.base[..., ROWS:] == 7).all()


def test_out_may_be_an_address_or_a_dlpack_object():
    q, x = nf4.quantize(WEIGHT), numbers(7, (5, COLS))
    expected = nf4.matmul(x, q)
    out = np.zeros((5, ROWS), np.float32)
    assert nf4.matmul(x, q, out=out.ctypes.data) == out.ctypes.data
    assert oracle.differing(out, expected) == 0
    out[...] = 0
    nf4.matmul(x, q, out=DlpackArray(out, 2), bias=np.zeros(ROWS, np.float32).ctypes.data)
    assert oracle.differing(out, expected) == 0


def test_the_number_of_threads_changes_nothing():
    q, x = nf4.quantize(numbers(8, (700, 129))), numbers(9, (7, 129))
    one = nf4.matmul(x, q, threads=1)
    for threads in (0, 2, 5, 2**31 - 1):
        assert oracle.differing(nf4.matmul(x, q, threads=threads), one) == 0


def test_an_x_that_is_not_finite_spoils_its_own_row_only():
    q, x = nf4.quantize(WEIGHT), numbers(10, (5, COLS))
    expected = nf4.matmul(x, q)
    x[1, 3], x[3, 9] = np.nan, np.inf
    y = nf4.matmul(x, q)
    assert not np.isfinite(y[[1, 3]]).any()
    keep = [0, 2, 4]
    assert oracle.differing(y[keep], expected[keep]) == 0


@pytest.mark.parametrize(
    "rows, cols, leading", [(0, 5, (3,)), (4, 0, (3,)), (4, 5, (0,)), (0, 0, ()), (4, 0, (2, 0, 3))]
)
def test_nothing_to_multiply(rows, cols, leading):
    q = nf4.quantize(np.empty((rows, cols), np.float32))
    bias = numbers(11, rows)
    x = np.empty((*leading, cols), np.float32)
    zeros = np.zeros((*leading, rows), np.float32)
    assert oracle.differing(nf4.matmul(x, q), zeros) == 0
    assert oracle.differing(nf4.matmul(x, q, bias=bias), zeros + bias) == 0


def test_workspace_bytes():
    q = nf4.quantize(WEIGHT)
    for dtype in ("bf16", np.float16, "fp32"):
        assert nf4.matmul_workspace_bytes(q, 3, dtype) >= 0
    for message, arguments in {
        "m is -1; expected 0 or more": (-1, "bf16"),
        "m is 1.0; expected an integer": (1.0, "bf16"),
        f"m is {1 << 63}; expected a 64-bit integer": (1 << 63, "bf16"),
        "dtype is 'int8'": (1, "int8"),
        f"rows . stride of x is {1 << 62} . {COLS}; expected at most": (1 << 62, "bf16"),
    }.items():
        with pytest.raises(nf4.InvalidArgument, match=message):
            nf4.matmul_workspace_bytes(q, *arguments)


X = numbers(12, (3, COLS))
FAULTS = {
    "x is of type list; expected a numpy array": {"x": [1.0] * COLS},
    "x is an address; expected an array, which has a shape": {"x": 4096},
    "x is of shape (); expected [..., 64]": {"x": np.zeros((), np.float32)},
    "x is of shape (3, 63); expected [..., 64]": {"x": X[:, 1:]},
    "x is of shape (64, 3); expected [..., 64]": {"x": X.T},
    "x is of shape (2, -1, 64); expected dimensions of 0 or more": {
        "x": CudaArray(64, "fp16", 2, -1, COLS)
    },
    "x is of shape (3, 64) and strides (128, 2); expected contiguous rows": {
        "x": numbers(0, (3, 2 * COLS))[:, ::2]
    },
    "x is of shape (3, 64) and strides (0, 1); expected": {"x": np.broadcast_to(X[0], (3, COLS))},
    "x is of shape (3, 64) and strides (-64, 1); expected": {"x": X[::-1]},
    "x is of shape (3, 64) and strides (8, 1); expected": {
        "x": np.lib.stride_tricks.sliding_window_view(np.zeros(80, np.float32), COLS)[:17:8]
    },
    "x is of shape (2, 2, 64) and strides (192, 64, 1); expected": {
        "x": numbers(0, (2, 3, COLS))[:, :2]
    },
    "x has strides of (258, 4) bytes; expected multiples of an element's 4": {
        "x": np.ndarray((3, COLS), np.float32, np.zeros(1024, np.uint8), strides=(258, 4))
    },
    "the number of rows of x is 1180591620717411303424; expected a 64-bit integer": {
        "x": CudaArray(64, "fp16", 1 << 70, COLS)
    },
    "the stride of x is 1180591620717411303424; expected a 64-bit integer": {
        "x": CudaArray(64, "fp16", 2, COLS, strides=(1 << 71, 2))
    },
    "x is of float64; expected fp32, fp16 or bf16": {"x": X.astype(np.float64)},
    "x is of uint8; expected": {"x": X.astype(np.uint8)},
    "x is a masked array": {"x": np.ma.masked_array(X)},
    "bias has 5 elements; expected 6": {"bias": np.zeros(5, np.float32)},
    "bias is of fp16; expected fp32": {"bias": np.zeros(6, np.float16)},
    "bias is not contiguous": {"bias": np.zeros(12, np.float32)[::2]},
    "bias is in device memory": {"bias": CudaArray(4096, "fp32", 6)},
    "out is of shape (3, 5); expected [..., 6]": {"out": np.zeros((3, 5), np.float32)},
    "out is of shape (18,); expected [..., 6]": {"out": np.zeros(18, np.float32)},
    "out is of shape (4, 6); expected (3, 6)": {"out": np.zeros((4, 6), np.float32)},
    "out is of shape (1, 3, 6); expected (3, 6)": {"out": np.zeros((1, 3, 6), np.float32)},
    "out is of shape (3, 6) and strides (1, 3); expected": {"out": np.zeros((6, 3), np.float32).T},
    "out is of shape (3, 6) and strides (0, 1); expected": {
        "out": np.lib.stride_tricks.as_strided(np.zeros(6, np.float32), (3, 6), (0, 4))
    },
    "out is of fp16; expected fp32, as x is": {"out": np.zeros((3, 6), np.float16)},
    "out is of float64; expected fp32": {"out": np.zeros((3, 6))},
    "out is read-only": {"out": read_only(np.zeros((3, 6), np.float32))},
    "out is in device memory": {"out": CudaArray(4096, "fp32", 3, 6)},
    "out is of type list": {"out": [0.0]},
    "out is -8; expected an address": {"out": -8},
    "out is 0x": {"out": np.ndarray((3, ROWS), np.float32, bytearray(128), offset=1)},
    "workspace is given; expected None for host memory": {"workspace": np.zeros(64, np.uint8)},
    "threads is -1; expected 0 or more": {"threads": -1},
    "threads is 0.0; expected an integer": {"threads": 0.0},
    f"threads is {1 << 32}; expected a 32-bit integer": {"threads": 1 << 32},
    "stream is 0; expected None for host memory": {"stream": 0},
}


@pytest.mark.parametrize("message", FAULTS)
def test_what_is_refused(message):
    out = np.zeros((3, ROWS), np.float32)
    arguments = {"x": X, "out": out} | FAULTS[message]
    with pytest.raises(nf4.InvalidArgument) as caught:
        nf4.matmul(arguments.pop("x"), nf4.quantize(WEIGHT), **arguments)
    assert message in str(caught.value)
    assert not out.any()
    if isinstance(arguments["out"], np.ndarray):
        assert not arguments["out"].any()


def test_out_that_overlaps():
    q, shared = nf4.quantize(WEIGHT), numbers(13, (3, COLS))
    before = shared.copy()
    with pytest.raises(nf4.InvalidArgument, match="^x overlaps out$"):
        nf4.matmul(shared, q, out=shared[:, :ROWS])
    bias = before[0, :ROWS].copy()
    with pytest.raises(nf4.InvalidArgument, match="^bias overlaps out$"):
        nf4.matmul(shared[:1], q, bias=bias, out=bias.reshape(1, ROWS))
    assert (shared == before).all() and (bias == before[0, :ROWS]).all()


def test_the_weight_is_checked_as_ever():
    q = nf4.quantize(WEIGHT)
    for message, changes in {
        "packed has 191 elements; expected 192": {"packed": np.zeros(191, np.uint8)},
        "blocksize is 65;": {"blocksize": 65},
    }.items():
        with pytest.raises(nf4.InvalidArgument, match=message):
            nf4.matmul(X, dataclasses.replace(q, **changes))
