"""nf4.lora_grad: the gradients of an adapter's matrices in host memory, and what is passed to the
C library for device memory (a fake of it and a fake torch, no GPU needed)."""

import ctypes
import re
import sys

import fake_torch
import ml_dtypes
import nf4
import numpy as np
import pytest
from fakes import CudaArray, DlpackArray
from nf4 import _abi

ROWS, COLS, M, RANK, SCALE = 24, 160, 37, 8, 0.75
DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
ALLOWED = {"fp32": 1e-6, "fp16": 5e-4, "bf16": 4e-3}
HIGH = 0x7F12_0000_0000_0000


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def matrices(rng, dtype="fp32", m=M, rank=RANK):
    """x, grad_y, p and q."""
    shapes = (m, COLS), (m, ROWS), (m, rank), (m, rank)
    return [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes]


def expected(x, grad_y, p, q):
    x, grad_y, p, q = (
        each.reshape(-1, each.shape[-1]).astype(np.float64) for each in (x, grad_y, p, q)
    )
    return SCALE * (q.T @ x), SCALE * (grad_y.T @ p)


def require_near(found, wanted, allowed):
    for each, other in zip(found, wanted, strict=True):
        assert each.shape == other.shape
        assert np.linalg.norm(each.astype(np.float64) - other) <= allowed * np.linalg.norm(other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", ["own", "fp32"])
@pytest.mark.parametrize("rank", [1, 8, 128])
def test_the_gradients(dtype, of, rank, rng):
    given = matrices(rng, dtype, rank=rank)
    found = nf4.lora_grad(*given, SCALE, dtype=None if of == "own" else of)
    numpy_dtype = DTYPES[dtype if of == "own" else of]
    assert [each.dtype for each in found] == [numpy_dtype] * 2
    require_near(found, expected(*given), ALLOWED[dtype if of == "own" else of])
    for threads in (1, 2, 5):
        again = nf4.lora_grad(*given, SCALE, dtype=numpy_dtype, threads=threads)
        assert all(map(np.array_equal, again, found))


def test_one_gradient_alone(rng):
    x, grad_y, p, q = matrices(rng, "fp16")
    both = nf4.lora_grad(x, grad_y, p, q, SCALE)
    grad_a, none = nf4.lora_grad(x, None, None, q, SCALE)
    assert none is None and np.array_equal(grad_a, both[0])
    none, grad_b = nf4.lora_grad(None, grad_y, p, None, SCALE)
    assert none is None and np.array_equal(grad_b, both[1])


def test_leading_dimensions_gaps_and_outputs_of_the_callers(rng):
    x = rng.standard_normal((2, 3, COLS + 5)).astype(np.float32)[..., :COLS]
    grad_y = rng.standard_normal((6, ROWS + 1)).astype(np.float32)[:, 1:]
    p, q = (rng.standard_normal((2, 3, RANK)).astype(np.float32) for _ in range(2))
    wide_a, wide_b = np.full((RANK, COLS + 3), 7, np.float32), np.full((ROWS, 20), 7, np.float32)
    out_a, out_b = wide_a[:, :COLS], wide_b[:, 4 : 4 + RANK]
    found = nf4.lora_grad(x, grad_y, p, q, SCALE, out=(out_a, out_b))
    assert found[0] is out_a and found[1] is out_b
    require_near(found, expected(x, grad_y, p, q), 1e-6)
    assert (wide_a[:, COLS:] == 7).all()
    assert (wide_b[:, :4] == 7).all() and (wide_b[:, 4 + RANK :] == 7).all()


def test_outputs_say_the_dtype_and_may_be_addresses(rng):
    given = matrices(rng, "fp16")
    out_b = np.empty((ROWS, RANK), np.float32)
    grad_a, grad_b = nf4.lora_grad(*given, SCALE, out=[None, out_b])
    assert grad_b is out_b and grad_a.dtype == np.float32
    address = out_b.ctypes.data
    found = nf4.lora_grad(*given, SCALE, dtype="fp32", out=[None, address])
    assert found[1] == address and np.array_equal(found[0], grad_a)


def test_no_rows_give_0_and_empty_gradients_are_left(rng):
    for each in nf4.lora_grad(*matrices(rng, m=0), SCALE):
        assert each.size and not each.any()
    x, grad_y, p, q = matrices(rng)
    grad_a, grad_b = nf4.lora_grad(x[:, :0], grad_y, p, q, SCALE)
    assert grad_a.shape == (RANK, 0)
    require_near([grad_b], [expected(x, grad_y, p, q)[1]], 1e-6)


def test_arrays_of_other_libraries(rng):
    given = matrices(rng)
    found = nf4.lora_grad(*(DlpackArray(each, 2) for each in given), SCALE)
    assert all(map(np.array_equal, found, nf4.lora_grad(*given, SCALE)))


def test_it_is_what_products_with_an_adapter_are_for(rng):
    weight = nf4.quantize(rng.standard_normal((ROWS, COLS)).astype(np.float32))
    a, b = rng.standard_normal((RANK, COLS)), rng.standard_normal((ROWS, RANK))
    a, b = a.astype(np.float32), b.astype(np.float32)
    x, grad_y, p, q = matrices(rng)
    nf4.matmul(x, weight, lora=nf4.Lora(a, b, SCALE, product=p))
    nf4.matmul_grad(grad_y, weight, lora=nf4.Lora(a, b, SCALE, product=q))
    x64, grad = x.astype(np.float64), grad_y.astype(np.float64)
    wanted = SCALE * ((grad @ b).T @ x64), SCALE * (grad.T @ (x64 @ a.T))
    require_near(nf4.lora_grad(x, grad_y, p, q, SCALE), wanted, 2e-6)


FAULTS = {
    "q is None, but x is not; expected both or none": {"q": None},
    "grad_y is None, but p is not": {"grad_y": None},
    "x and grad_y are None; expected x and q, grad_y and p, or all four": dict.fromkeys(
        ("x", "grad_y", "p", "q")
    ),
    "x is an address; expected an array": {"x": 4096},
    "x is of shape (); expected one dimension": {"x": np.zeros((), np.float32)},
    "x is of int32; expected fp32, fp16 or bf16": {"x": np.zeros((M, COLS), np.int32)},
    "x is of type list": {"x": [1.0]},
    "grad_y is of fp16; expected fp32, as x is": {"grad_y": np.zeros((M, ROWS), np.float16)},
    "q is of shape (36, 8); expected 37 rows, as x has": {"q": np.zeros((36, RANK), np.float32)},
    "q is of shape (37, 7); expected 8 columns, as p has": {"q": np.zeros((M, 7), np.float32)},
    "p is not contiguous": {"p": np.zeros((M, 9), np.float32)[:, :RANK]},
    "expected contiguous rows": {"x": np.zeros((COLS, M), np.float32).T},
    "rank is 129; expected 1 to 128": dict.fromkeys("pq", np.zeros((M, 129), np.float32)),
    "rank is 0; expected 1 to 128": dict.fromkeys("pq", np.zeros((M, 0), np.float32)),
    "scale is inf": {"scale": float("inf")},
    "scale is 'much'; expected a number": {"scale": "much"},
    "dtype is fp16; expected fp32": {"dtype": "fp16"},
    "dtype is 'fp64'; expected \"fp32\"": {"dtype": "fp64"},
    "out[0] is fp16; expected fp32": {"out": [np.zeros((RANK, COLS), np.float16), None]},
    "out[1] is of fp16; expected fp32, as dtype is": {
        "dtype": "fp32",
        "out": [None, np.zeros((ROWS, RANK), np.float16)],
    },
    "out[0] is of shape (7, 160); expected (8, 160)": {"out": [np.zeros((7, COLS), "f4"), None]},
    "out[1] is of shape (24, 9); expected [..., 8]": {"out": [None, np.zeros((ROWS, 9), "f4")]},
    "out[0] is given; expected None, as x and q are": {
        "x": None,
        "q": None,
        "out": [np.zeros((RANK, COLS), np.float32), None],
    },
    "out has 1 elements; expected 2": {"out": [None]},
    "out is of type numpy.ndarray; expected a list of two": {"out": np.zeros((2, 3), np.float32)},
    "threads is -1": {"threads": -1},
    "stream is 1; expected None for host memory": {"stream": 1},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault, rng):
    given = dict(zip(("x", "grad_y", "p", "q"), matrices(rng), strict=True)) | FAULTS[fault]
    with pytest.raises(nf4.InvalidArgument) as raised:
        nf4.lora_grad(**given)
    assert fault in str(raised.value)


def test_a_read_only_output_is_named(rng):
    out = np.zeros((RANK, COLS), np.float32)
    out.flags.writeable = False
    with pytest.raises(nf4.InvalidArgument, match=r"out\[0\] is read-only"):
        nf4.lora_grad(*matrices(rng), out=[out, None])


def test_overlaps_have_the_names_of_the_arguments(rng):
    x, grad_y, p, q = matrices(rng)
    for out, names in ((grad_y[:RANK], {"grad_y", "out[1]"}), (p[:ROWS], {"p", "out[1]"})):
        out_b = out.reshape(-1)[: ROWS * RANK].reshape(ROWS, RANK)
        with pytest.raises(nf4.InvalidArgument, match="overlaps") as raised:
            nf4.lora_grad(x, grad_y, p, q, out=[None, out_b])
        assert names == {word for word in str(raised.value).split() if word in names}
    memory = np.zeros(RANK * COLS, np.float32)
    out_a, out_b = memory.reshape(RANK, COLS), memory[-ROWS * RANK :].reshape(ROWS, RANK)
    with pytest.raises(nf4.InvalidArgument, match=r"out\[.\] overlaps out\[.\]"):
        nf4.lora_grad(x, grad_y, p, q, out=[out_a, out_b])


FAR = (1 << 59, 2)
FAR_STRIDES = {
    "rows * stride of x is 8 *": {"x": CudaArray(HIGH, "bf16", 8, COLS, strides=FAR)},
    "rows * stride of grad_y is 8 *": {"grad_y": CudaArray(HIGH, "bf16", 8, ROWS, strides=FAR)},
    "rank * stride of out[0] is 8 *": {
        "out": [CudaArray(HIGH, "bf16", RANK, COLS, strides=FAR), HIGH]
    },
    "rows * stride of out[1] is 24 *": {
        "out": [HIGH, CudaArray(HIGH, "bf16", ROWS, RANK, strides=FAR)]
    },
}


@pytest.mark.parametrize("message", FAR_STRIDES)
def test_strides_that_are_too_far_are_named(message):
    """By the library, which has not looked at memory then."""
    shapes = {"x": (8, COLS), "grad_y": (8, ROWS), "p": (8, RANK), "q": (8, RANK)}
    given = {name: CudaArray(HIGH, "bf16", *shape) for name, shape in shapes.items()}
    with pytest.raises(nf4.InvalidArgument, match=re.escape(message)):
        nf4.lora_grad(**given | {"out": [HIGH, HIGH]} | FAR_STRIDES[message])


# ---- What is passed for device memory ----------------------------------------------------


def array(offset, *shape, dtype="bf16", **more):
    return CudaArray(HIGH + offset, dtype, *shape, **more)


def on_device(**more):
    wide, narrow = (3, 1 << 33, 5 << 12), (3 << 33, RANK)
    return {
        "x": array(16, *wide, strides=(1 << 49, 1 << 16, 2)),
        "grad_y": array(32, 3 << 33, 7 << 12),
        "p": array(48, *narrow),
        "q": array(64, *narrow),
        "out": [
            array(80, RANK, 5 << 12, dtype="fp32"),
            array(96, 7 << 12, RANK, dtype="fp32"),
        ],
    } | more


def test_everything_is_passed_at_full_width(last):
    given = on_device(scale=0.5, stream=HIGH + 112)
    assert nf4.lora_grad(**given) == tuple(given["out"]) and last.count == 1
    args = last.lora_grad
    assert args.struct_size == ctypes.sizeof(_abi.LoraGradArgs)
    assert (args.dtype, args.grad_dtype) == (_abi.DTYPE_BF16, _abi.DTYPE_FP32)
    assert (args.rank, args.scale, args.m) == (RANK, 0.5, 3 << 33)
    assert (args.rows, args.cols) == (7 << 12, 5 << 12)
    assert (args.x - HIGH, args.x_stride, args.q - HIGH) == (16, 1 << 15, 64)
    assert (args.dy - HIGH, args.dy_stride, args.p - HIGH) == (32, 7 << 12, 48)
    assert (args.da - HIGH, args.da_stride) == (80, 5 << 12)
    assert (args.db - HIGH, args.db_stride) == (96, RANK)
    assert last.stream == HIGH + 112


def test_a_gradient_that_is_not_asked_for_is_null(last):
    out_a, out_b = on_device()["out"]
    nf4.lora_grad(**on_device(x=None, q=None, out=[None, out_b]))
    args = last.lora_grad
    assert (args.x, args.q, args.da, args.cols) == (None, None, None, 0)
    assert (args.db - HIGH, args.rows, args.rank, args.m) == (96, 7 << 12, RANK, 3 << 33)
    nf4.lora_grad(**on_device(grad_y=None, p=None, out=[out_a, None]))
    args = last.lora_grad
    assert (args.dy, args.p, args.db, args.rows) == (None, None, None, 0)
    assert (args.da - HIGH, args.cols, last.stream) == (80, 5 << 12, None)


REFUSED = {
    "out[0] is None; expected an array of device memory": {"out": None},
    "q is in host memory": {"m": 4, "q": np.zeros((4, RANK), ml_dtypes.bfloat16)},
    "out[0] is read-only": {"out": [array(80, RANK, 5 << 12, read_only=True), None]},
    "threads is 2; expected 0 for device memory": {"threads": 2},
    "stream is 'a'; expected": {"stream": "a"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message, last):
    given = on_device() | REFUSED[message]
    if given.pop("m", None):
        given |= {"x": array(16, 4, 5 << 12), "grad_y": array(32, 4, 7 << 12)}
        given["p"] = array(48, 4, RANK)
    with pytest.raises(nf4.InvalidArgument, match=re.escape(message)):
        nf4.lora_grad(**given)
    assert last.count == 0


def test_threads_are_passed_on_the_host(last, rng):
    given = matrices(rng)
    grad_a, grad_b = nf4.lora_grad(*given, threads=3)
    args = last.lora_grad
    assert (last.threads, args.m, args.da, args.db) == (
        3,
        M,
        grad_a.ctypes.data,
        grad_b.ctypes.data,
    )


class TestTensors:
    """On torch tensors of a device."""

    @pytest.fixture(autouse=True)
    def torch(self, monkeypatch):
        module = fake_torch.Torch()
        monkeypatch.setitem(sys.modules, "torch", module)
        return module

    def given(self, torch, **more):
        where = fake_torch.Device("cuda", 1)
        shapes = {"x": (2, 3, COLS), "grad_y": (2, 3, ROWS), "p": (6, RANK), "q": (6, RANK)}
        return {
            name: fake_torch.Tensor(shape, torch.bfloat16, where) for name, shape in shapes.items()
        } | more

    @pytest.mark.parametrize("stream, belongs_to", [(None, 0x1000), (0x2000, 0x2000)])
    def test_makes_tensors_on_the_stream_of_the_work(self, torch, last, stream, belongs_to):
        made = nf4.lora_grad(**self.given(torch, dtype="fp32", stream=stream))
        assert list(made) == torch.made and {each.stream for each in made} == {belongs_to}
        assert [each.shape for each in made] == [(RANK, COLS), (ROWS, RANK)]
        assert {each.dtype for each in made} == {torch.float32}
        assert (last.stream, last.lora_grad.da) == (belongs_to, made[0].address)

    def test_autograd_hears_of_what_was_written(self, torch, last):
        given = self.given(torch)
        out = fake_torch.Tensor((RANK, COLS), torch.bfloat16, given["x"].device)
        found = nf4.lora_grad(**given, out=[out, None])
        assert found[0] is out and torch.written == [out]
