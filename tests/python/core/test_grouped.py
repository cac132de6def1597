"""nf4.matmul_grouped: the products of experts, and matmul_grouped_grad, their gradient."""

import copy
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


@pytest.mark.parametrize("zeros", [True, False], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
def test_experts_of_integers(layout, zeros, rng):
    dense = rng.standard_normal((EXPERTS, 16, COLS)).astype(np.float32)
    weight = nf4.quantize_int4(dense, layout=layout, group_size=32, symmetric=not zeros)
    assert weight.shape == dense.shape and weight.packed.shape[0] == EXPERTS
    assert (weight.zeros is None) == (not zeros and layout == "compressed-tensors")
    stored = np.stack([nf4.dequantize(weight.expert(e), "fp32") for e in range(EXPERTS)])
    assert error(stored, dense) <= 0.2
    ends, x_index = routing(rng)
    x = rng.standard_normal((TOKENS, COLS)).astype(np.float32)
    bias = rng.standard_normal((EXPERTS, 16)).astype(np.float32)
    row_scale = rng.random(len(x_index), dtype=np.float32)
    y = nf4.matmul_grouped(x, weight, ends, x_index=x_index, bias=bias, row_scale=row_scale)
    experts = np.searchsorted(ends, np.arange(len(x_index)), side="right")
    expected = np.einsum("mk,mnk->mn", x[x_index], stored[experts]) + bias[experts]
    assert error(y, expected * row_scale[:, None]) <= 1e-5


def test_a_stack_of_integers_is_for_matmul_grouped_alone(rng):
    weight = nf4.quantize_int4(np.ones((2, 16, 64), np.float32), group_size=32)
    x = np.ones((1, 64), np.float32)
    for use in (lambda: nf4.matmul(x, weight), lambda: nf4.dequantize(weight)):
        with pytest.raises(nf4.InvalidArgument, match="a stack of experts; expected one expert"):
            use()
    ends = np.ones(2, np.int32)
    assert nf4.matmul_grouped(x, weight, ends).shape == (1, 16)
    with pytest.raises(nf4.InvalidArgument, match="a stack of experts"):  # afterwards, too
        nf4.matmul(x, weight)
    copied = copy.deepcopy(weight)
    assert np.array_equal(nf4.matmul_grouped(x, copied, ends), nf4.matmul_grouped(x, weight, ends))
    with pytest.raises(nf4.InvalidArgument, match="expected a stack"):
        weight.expert(0).expert(0)


@pytest.mark.parametrize("nested_blocksize", [0, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient(dtype, nested_blocksize, rng):
    weight = stack(rng, nested_blocksize=nested_blocksize)
    ends, y_index = routing(rng)
    grad_y = rng.standard_normal((TOKENS, ROWS)).astype(DTYPES[dtype])
    row_scale = rng.random(len(y_index), dtype=np.float32)
    dense = nf4.dequantize(weight, "fp32").astype(np.float64)
    experts = np.searchsorted(ends, np.arange(len(y_index)), side="right")
    expected = np.einsum("mn,mnk->mk", grad_y.astype(np.float64)[y_index], dense[experts])
    given = {"y_index": y_index, "row_scale": row_scale}
    out = np.full((len(y_index), COLS + 2), 7, DTYPES[dtype])
    for threads in (1, 3):
        found = nf4.matmul_grouped_grad(
            grad_y, weight, ends, **given, out=out[:, :COLS], threads=threads
        )
        assert found.base is out and (out[:, COLS:] == 7).all()
        assert error(found, expected * row_scale[:, None]) <= 2 * ALLOWED[dtype]
    assert np.array_equal(nf4.matmul_grouped_grad(grad_y, weight, ends, **given), found)
    sorted_rows = nf4.matmul_grouped_grad(grad_y[y_index], weight, ends, row_scale=row_scale)
    assert np.array_equal(sorted_rows, found)


WRONG_GRADIENT = {
    "grad_y is of shape .*; expected 2 dimensions": {
        "grad_y": np.ones((TOKENS, COLS), np.float32)[0]
    },
    "grad_y is of int32": {"grad_y": np.ones((TOKENS, ROWS), np.int32)},
    "y_index is of int64": {"y_index": np.zeros(3, np.int64)},
    "out is of shape": {"out": np.zeros((TOKENS, ROWS), np.float32)},
    "only it has a gradient": {
        "weight": nf4.quantize_int4(np.ones((EXPERTS, ROWS, COLS), np.float32), group_size=32)
    },
}


@pytest.mark.parametrize("message", WRONG_GRADIENT)
def test_what_is_wrong_of_a_gradient_is_named(message, rng):
    right = {
        "grad_y": np.ones((TOKENS, ROWS), np.float32),
        "weight": stack(rng),
        "ends": np.zeros(EXPERTS, np.int32),
    }
    with pytest.raises(nf4.InvalidArgument, match=message):
        nf4.matmul_grouped_grad(**right | WRONG_GRADIENT[message])


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
    "weight is of type numpy.ndarray; expected a QuantizedTensor or an Int4Tensor": {
        "weight": np.ones(3)
    },
    "x is of shape .2, 3, 64.; expected 2 dimensions": {"x": np.ones((2, 3, COLS), np.float32)},
    "x is of shape .7, 63.; expected .*, 64.": {"x": np.ones((TOKENS, COLS - 1), np.float32)},
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


@pytest.mark.parametrize("integers", [False, True])
def test_the_gradient_and_integers_are_passed_to_a_launch(integers, fake, last):
    if integers:
        weight = nf4.Int4Tensor(
            layout="gptq_v2",
            shape=(EXPERTS, 16, COLS),
            group_size=32,
            packed=HIGH,
            scales=HIGH + 16,
            scales_dtype="bf16",
        )
        launch, columns, out_columns = nf4.matmul_grouped, COLS, 16
    else:
        weight = nf4.QuantizedTensor(packed=HIGH, absmax=HIGH + 16, shape=(EXPERTS, ROWS, COLS))
        launch, columns, out_columns = nf4.matmul_grouped_grad, ROWS, COLS
    y = CudaArray(HIGH + 48, "bf16", TOKENS, out_columns)
    ends = CudaArray(HIGH + 64, "int32", EXPERTS)
    scale = CudaArray(HIGH + 80, "fp32", TOKENS)
    x = CudaArray(HIGH + 32, "bf16", TOKENS, columns)
    assert launch(x, weight, ends, row_scale=scale, out=y, stream=HIGH + 144) is y
    args = last.grouped
    assert (args.dtype, args.experts, args.m) == (_abi.DTYPE_BF16, EXPERTS, TOKENS)
    assert (args.x - HIGH, args.x_stride, args.x_rows) == (32, columns, TOKENS)
    assert (args.y - HIGH, args.y_stride, args.x_index) == (48, out_columns, None)
    assert (args.ends - HIGH, args.row_scale - HIGH, args.bias) == (64, 80, None)
    assert last.gradient == (not integers) and last.stream - HIGH == 144
    if integers:
        assert (last.int4[0].rows, last.int4[0].cols, last.int4[0].packed - HIGH) == (16, COLS, 0)
