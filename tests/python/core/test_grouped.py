"""nf4.matmul_grouped: the products of experts."""

import ctypes

import nf4
import numpy as np
import pytest
from fakes import CudaArray
from nf4 import _abi

EXPERTS, ROWS, COLS, TOKENS = 5, 12, 64, 7
DTYPES = {"fp32": np.float32, "fp16": np.float16}
ALLOWED = {"fp32": 1e-6, "fp16": 1e-3}
HIGH = 0x7F12_0000_0000_0000


@pytest.fixture
def rng():
    return np.random.default_rng(19)


def stack(rng, **options):
    return nf4.quantize(rng.standard_normal((EXPERTS, ROWS, COLS)).astype(np.float32), **options)


def routing(rng, top_k=2):
    """The ends, and the token of each row of y."""
    chosen = np.concatenate([rng.permutation(EXPERTS)[:top_k] for _ in range(TOKENS)])
    order = np.argsort(chosen, kind="stable")
    counts = np.bincount(chosen, minlength=EXPERTS)
    return counts.cumsum().astype(np.int32), (order // top_k).astype(np.int32)


def expected_of(weight, x, ends, x_index, bias=0.0, row_scale=1.0):
    dense = nf4.dequantize(weight, "fp32").astype(np.float64)
    experts = np.searchsorted(ends, np.arange(len(x_index)), side="right")
    y = np.einsum("mk,mnk->mn", x.astype(np.float64)[x_index], dense[experts])
    if np.ndim(bias):
        y += bias[experts]
    return y * np.reshape(row_scale, (-1, 1))


def error(found, expected):
    return np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("nested_blocksize", [0, 256])
@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(dtype, format, nested_blocksize, rng):
    weight = stack(rng, format=format, nested_blocksize=nested_blocksize)
    ends, x_index = routing(rng)
    x = rng.standard_normal((TOKENS, COLS)).astype(DTYPES[dtype])
    bias = rng.standard_normal((EXPERTS, ROWS)).astype(DTYPES[dtype])
    row_scale = rng.random(len(x_index), dtype=np.float32)
    y = nf4.matmul_grouped(x, weight, ends, x_index=x_index, bias=bias, row_scale=row_scale)
    assert y.dtype == x.dtype and y.shape == (len(x_index), ROWS)
    expected = expected_of(weight, x, ends, x_index, bias, row_scale)
    assert error(y, expected) <= 2 * ALLOWED[dtype]
    for threads in (1, 2, 5):
        again = nf4.matmul_grouped(
            x, weight, ends, x_index=x_index, bias=bias, row_scale=row_scale, threads=threads
        )
        assert np.array_equal(again, y)


def test_sorted_rows_and_an_output_of_the_callers(rng):
    weight = stack(rng)
    ends, x_index = routing(rng)
    x = rng.standard_normal((TOKENS, COLS)).astype(np.float32)
    gathered = nf4.matmul_grouped(x, weight, ends, x_index=x_index)
    out = np.full((len(x_index), ROWS + 3), 7, np.float32)
    result = nf4.matmul_grouped(x[x_index], weight, ends, out=out[:, :ROWS])
    assert result.base is out
    assert np.array_equal(out[:, :ROWS], gathered) and (out[:, ROWS:] == 7).all()


def test_wrong_ends_and_indices_are_defined(rng):
    weight = stack(rng)
    x = rng.standard_normal((4, COLS)).astype(np.float32)
    x_index = np.array([0, -1, 3, 4, 1, 2], np.int32)
    ends = np.array([2, 1, 1, 5, 2**31 - 1], np.int32)
    y = nf4.matmul_grouped(x, weight, ends, x_index=x_index)
    padded, rows = np.vstack([x, np.zeros_like(x[:1])]), np.where(x_index == -1, 4, x_index)
    expected = expected_of(weight, padded, [2, 2, 2, 5, 6], rows)
    assert error(y, expected) <= 1e-6
    assert not y[[1, 3]].any()


@pytest.mark.parametrize("m", [0, 1])
def test_nothing_to_multiply(m, rng):
    weight = stack(rng)
    x = np.ones((3, COLS), np.float32)
    index = np.zeros(m, np.int32)
    y = nf4.matmul_grouped(x, weight, np.zeros(EXPERTS, np.int32), x_index=index)
    assert y.shape == (m, ROWS)


def test_tensors_of_torch(rng):
    torch = pytest.importorskip("torch")
    weight = nf4.quantize(torch.from_numpy(rng.standard_normal((EXPERTS, ROWS, COLS))).bfloat16())
    ends, x_index = (torch.from_numpy(each) for each in routing(rng))
    x = torch.from_numpy(rng.standard_normal((TOKENS, COLS))).bfloat16()
    y = nf4.matmul_grouped(x, weight, ends, x_index=x_index)
    assert isinstance(y, torch.Tensor) and y.dtype == torch.bfloat16
    dense = nf4.dequantize(weight, torch.float32)
    experts = torch.searchsorted(ends, torch.arange(len(x_index)), right=True)
    expected = torch.einsum("mk,mnk->mn", x.float()[x_index], dense[experts])
    assert (y.float() - expected).norm() <= 1e-2 * expected.norm()


WRONG = {
    "weight is of shape": {"weight": nf4.quantize(np.ones((60, 64), np.float32))},
    "weight is .* expected a QuantizedTensor of experts": {"weight": np.ones(3)},
    "x is of shape .* expected .rows, 64.": {"x": np.ones((2, 3, COLS), np.float32)},
    "x is of int32": {"x": np.ones((TOKENS, COLS), np.int32)},
    "x is an address": {"x": 4096},
    "ends is of int64": {"ends": np.zeros(EXPERTS, np.int64)},
    "ends has 4 elements; expected 5": {"ends": np.zeros(4, np.int32)},
    "x_index is of int64": {"x_index": np.zeros(3, np.int64)},
    "x_index is of shape": {"x_index": np.zeros((3, 1), np.int32)},
    "bias is of float64": {"bias": np.zeros((EXPERTS, ROWS))},
    "bias has 12 elements; expected 60": {"bias": np.zeros(ROWS, np.float32)},
    "row_scale has 2 elements; expected 7": {"row_scale": np.zeros(2, np.float32)},
    "row_scale is of fp16": {"row_scale": np.zeros(TOKENS, np.float16)},
    "out is of shape": {"out": np.zeros((3, ROWS), np.float32)},
    "out is of fp16": {"out": np.zeros((TOKENS, ROWS), np.float16)},
    "stream is": {"stream": 1},
    "workspace is given": {"workspace": np.zeros(16, np.uint8)},
    "threads is -1": {"threads": -1},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_named(message, rng):
    right = {
        "x": np.ones((TOKENS, COLS), np.float32),
        "weight": stack(rng),
        "ends": np.zeros(EXPERTS, np.int32),
    }
    with pytest.raises(nf4.InvalidArgument, match=message):
        nf4.matmul_grouped(**right | WRONG[message])


def test_experts_that_begin_within_a_block(rng):
    weight = nf4.quantize(np.ones((3, 5, 33), np.float32))
    x = np.ones((2, 33), np.float32)
    with pytest.raises(nf4.InvalidArgument, match="an expert has 165 elements"):
        nf4.matmul_grouped(x, weight, np.zeros(3, np.int32))


def test_everything_is_passed_to_a_launch(fake, last):
    weight = nf4.QuantizedTensor(packed=HIGH, absmax=HIGH + 16, shape=(EXPERTS, ROWS, COLS))
    needed = ctypes.c_size_t.in_dll(fake, "fake_workspace_per_row")
    needed.value = 32
    try:
        assert nf4.matmul_grouped_workspace_bytes(weight, 14, "bf16") == 14 * 32
        y = CudaArray(HIGH + 48, "bf16", 14, ROWS)
        result = nf4.matmul_grouped(
            CudaArray(HIGH + 32, "bf16", TOKENS, COLS, strides=(256, 2)),
            weight,
            CudaArray(HIGH + 64, "int32", EXPERTS),
            x_index=CudaArray(HIGH + 80, "int32", 14),
            bias=CudaArray(HIGH + 96, "bf16", EXPERTS, ROWS),
            row_scale=CudaArray(HIGH + 112, "fp32", 14),
            out=y,
            workspace=HIGH + 128,
            stream=HIGH + 144,
        )
    finally:
        needed.value = 0
    args = last.grouped
    assert result is y and args.struct_size == ctypes.sizeof(_abi.GroupedArgs)
    assert (args.dtype, args.experts, args.m) == (_abi.DTYPE_BF16, EXPERTS, 14)
    assert (args.x - HIGH, args.x_stride, args.x_rows) == (32, 128, TOKENS)
    assert (args.y - HIGH, args.y_stride) == (48, ROWS)
    assert (args.ends - HIGH, args.x_index - HIGH) == (64, 80)
    assert (args.bias - HIGH, args.bias_stride, args.row_scale - HIGH) == (96, ROWS, 112)
    assert (last.weight.rows, last.weight.cols) == (EXPERTS * ROWS, COLS)
    assert (last.workspace - HIGH, last.workspace_bytes) == (128, 14 * 32)
    assert last.stream - HIGH == 144
