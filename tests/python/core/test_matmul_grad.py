"""nf4.matmul_grad, and adapters beside a product and its gradient, in host memory."""

import nf4
import numpy as np
import pytest

ROWS, COLS, M = 24, 160, 5
DTYPES = {"fp32": np.float32, "fp16": np.float16}
ALLOWED = {"fp32": 1e-6, "fp16": 1e-3}


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def quantized(rng, **options):
    return nf4.quantize(rng.standard_normal((ROWS, COLS)).astype(np.float32), **options)


def dense_of(weight):
    return nf4.dequantize(weight, "fp32").astype(np.float64)


def adapter(rng, dtype=np.float32, rank=8, **options):
    a, b = rng.standard_normal((rank, COLS)), rng.standard_normal((ROWS, rank))
    return nf4.Lora(a.astype(dtype), b.astype(dtype), **options)


def delta(lora):
    return float(lora.scale) * (lora.b.astype(np.float64) @ lora.a.astype(np.float64))


def error(found, expected):
    return np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("nested_blocksize", [0, 256])
@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient(dtype, format, nested_blocksize, rng):
    weight = quantized(rng, format=format, nested_blocksize=nested_blocksize)
    grad_y = rng.standard_normal((2, M, ROWS)).astype(DTYPES[dtype])
    found = nf4.matmul_grad(grad_y, weight)
    assert found.dtype == grad_y.dtype and found.shape == (2, M, COLS)
    assert error(found, grad_y.astype(np.float64) @ dense_of(weight)) <= ALLOWED[dtype]
    for threads in (1, 2, 5):
        assert np.array_equal(nf4.matmul_grad(grad_y, weight, threads=threads), found)


@pytest.mark.parametrize("of", ["own", "fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters(dtype, of, rng):
    weight, numpy_dtype = quantized(rng), DTYPES[dtype]
    product = np.empty((M, 8), numpy_dtype)
    lora = adapter(rng, numpy_dtype if of == "own" else np.float32, scale=0.5, product=product)
    whole = dense_of(weight) + delta(lora)
    x, bias = (rng.standard_normal(n).astype(numpy_dtype) for n in ((M, COLS), ROWS))
    y = nf4.matmul(x, weight, bias=bias, lora=lora)
    assert error(y, x.astype(np.float64) @ whole.T + bias) <= 2 * ALLOWED[dtype]
    assert error(product, x.astype(np.float64) @ lora.a.T) <= ALLOWED[dtype]
    grad_y = rng.standard_normal((M, ROWS)).astype(numpy_dtype)
    grad_x = nf4.matmul_grad(grad_y, weight, lora=lora)
    assert error(grad_x, grad_y.astype(np.float64) @ whole) <= 2 * ALLOWED[dtype]
    assert error(product, grad_y.astype(np.float64) @ lora.b) <= ALLOWED[dtype]
    without = nf4.Lora(lora.a, lora.b, 0.5)
    assert np.array_equal(nf4.matmul_grad(grad_y, weight, lora=without), grad_x)


def test_matrices_with_gaps_and_outputs_of_the_callers(rng):
    weight = quantized(rng)
    wide = adapter(rng, rank=20)
    lora = nf4.Lora(wide.a[::2], wide.b[:, :10], 2)
    grad_y = rng.standard_normal((2 * M, ROWS + 3)).astype(np.float32)[::2, :ROWS]
    out = np.full((M, COLS + 5), 7, np.float32)
    assert nf4.matmul_grad(grad_y, weight, lora=lora, out=out[:, :COLS]).base is out
    assert error(out[:, :COLS], grad_y @ (dense_of(weight) + delta(lora))) <= 1e-6
    assert (out[:, COLS:] == 7).all()


def test_weights_of_more_dimensions_count_them_as_rows(rng):
    weight = nf4.quantize(rng.standard_normal((2, 3, 64)).astype(np.float32))
    grad_y = rng.standard_normal((M, 6)).astype(np.float32)
    expected = grad_y @ dense_of(weight).reshape(6, 64)
    assert error(nf4.matmul_grad(grad_y, weight), expected) <= 1e-6


@pytest.mark.parametrize("shape", [(0, 64), (6, 0)])
def test_empty_weights(shape):
    weight = nf4.quantize(np.zeros(shape, np.float32))
    lora = nf4.Lora(np.ones((4, shape[1]), np.float32), np.ones((shape[0], 4), np.float32))
    grad_x = nf4.matmul_grad(np.ones((M, shape[0]), np.float32), weight, lora=lora)
    assert grad_x.shape == (M, shape[1]) and not grad_x.any()


def test_the_workspace_grows_with_the_rank(rng):
    weight = quantized(rng)
    for gradient in (False, True):
        sizes = [
            nf4.matmul_workspace_bytes(weight, 100, "bf16", rank=rank, gradient=gradient)
            for rank in (0, 1, 128)
        ]
        assert sizes[0] < sizes[1] < sizes[2]


def bad_product(rng):
    return adapter(rng, product=np.empty((M, 7), np.float32))


FAULTS = {
    "grad_y is of shape (5, 23); expected [..., 24]": lambda rng: {
        "grad_y": np.zeros((M, ROWS - 1), np.float32)
    },
    "grad_y is of int32; expected fp32, fp16 or bf16": lambda rng: {
        "grad_y": np.zeros((M, ROWS), np.int32)
    },
    "out is of shape (5, 24); expected": lambda rng: {"out": np.zeros((M, ROWS), np.float32)},
    "lora is 3; expected an nf4.Lora": lambda rng: {"lora": 3},
    "lora.a is of shape (8, 159); expected (rank, 160)": lambda rng: {
        "lora": nf4.Lora(adapter(rng).a[:, 1:], adapter(rng).b)
    },
    "lora.a is of shape (160,); expected 2 dimensions": lambda rng: {
        "lora": nf4.Lora(adapter(rng).a[0], adapter(rng).b)
    },
    "lora.b is of shape (24, 7); expected (24, 8)": lambda rng: {
        "lora": nf4.Lora(adapter(rng).a, adapter(rng).b[:, 1:])
    },
    "lora.a is of fp16; expected fp32": lambda rng: {"lora": adapter(rng, np.float16)},
    "lora.b is of fp16; expected fp32": lambda rng: {
        "lora": nf4.Lora(adapter(rng).a, adapter(rng, np.float16).b)
    },
    "lora.scale is inf": lambda rng: {"lora": adapter(rng, scale=float("inf"))},
    "lora.scale is 'much'; expected a number": lambda rng: {"lora": adapter(rng, scale="much")},
    "lora.rank is 129; expected 1 to 128": lambda rng: {"lora": adapter(rng, rank=129)},
    "lora.rank is 0; expected 1 to 128": lambda rng: {"lora": adapter(rng, rank=0)},
    "lora.product has 35 elements; expected 40": lambda rng: {"lora": bad_product(rng)},
    "workspace is given": lambda rng: {"workspace": np.zeros(64, np.uint8)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault, rng):
    given = {"grad_y": np.ones((M, ROWS), np.float32)} | FAULTS[fault](rng)
    with pytest.raises(nf4.InvalidArgument) as raised:
        nf4.matmul_grad(weight=quantized(rng), **given)
    assert fault in str(raised.value)


def test_overlaps_have_the_names_of_the_arguments(rng):
    memory = np.ones((COLS, COLS), np.float32)
    with pytest.raises(nf4.InvalidArgument, match="grad_y overlaps out"):
        nf4.matmul_grad(memory[:, :ROWS], quantized(rng), out=memory)


def test_integer_weights_have_neither(rng):
    weight = nf4.quantize_int4(rng.standard_normal((ROWS, 128)).astype(np.float32))
    grad_y, x = np.ones((M, ROWS), np.float32), np.ones((M, 128), np.float32)
    with pytest.raises(nf4.InvalidArgument, match="only it has a gradient"):
        nf4.matmul_grad(grad_y, weight)
    with pytest.raises(nf4.InvalidArgument, match="only it has a gradient"):
        nf4.matmul_workspace_bytes(weight, M, "fp16", gradient=True)
    with pytest.raises(nf4.InvalidArgument, match="only it has adapters"):
        nf4.matmul(x, weight, lora=adapter(rng))
