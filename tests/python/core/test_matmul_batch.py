"""nf4.matmul_batch: the bits of matmul on host memory, what is passed to the C library for device
memory, to which stream, and what is refused."""

import ctypes
import sys

import fake_torch
import nf4
import numpy as np
import oracle
import pytest
from cases import numbers
from fakes import CudaArray
from hypothesis import given, settings
from hypothesis import strategies as st
from nf4 import _abi
from strategies import any_case

HIGH = 0x7F12_0000_0000_0000
COLS = 64
DTYPES = list(oracle.DTYPES)


def same(ys, expected):
    assert len(ys) == len(expected)
    for y, wanted in zip(ys, expected, strict=True):
        assert (y.dtype, y.shape) == (wanted.dtype, wanted.shape)
        assert oracle.differing(y, wanted) == 0


@given(
    st.lists(
        any_case(awkward=False, shape=st.tuples(st.integers(0, 30), st.integers(0, 150))),
        max_size=5,
    ),
    st.lists(st.integers(0, 4), max_size=2),
    st.sampled_from([0, 1, 3]),
)
@settings(max_examples=100)
def test_products_have_the_bits_of_matmul(cases, leading, threads):
    weights = [case.quantized() for case in cases]
    xs = [numbers(i, (*leading, case.shape[1]), case.dtype) for i, case in enumerate(cases)]
    biases = [
        numbers(i, case.shape[0], case.dtype) if i % 2 else None for i, case in enumerate(cases)
    ]
    expected = [nf4.matmul(x, q, bias=bias) for x, q, bias in zip(xs, weights, biases, strict=True)]
    same(nf4.matmul_batch(xs, weights, bias=biases, threads=threads), expected)
    outs = [np.full_like(y, 7) for y in expected]
    given_back = nf4.matmul_batch(tuple(xs), weights, bias=tuple(biases), out=tuple(outs))
    assert all(ours is theirs for ours, theirs in zip(given_back, outs, strict=True))
    same(outs, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_share_an_x(dtype):
    weights = [nf4.quantize(numbers(rows, (rows, COLS))) for rows in (6, 17, 6)]
    x = numbers(1, (2, 3, COLS), dtype)
    expected = [nf4.matmul(x, q) for q in weights]
    same(nf4.matmul_batch(x, weights), expected)
    same(nf4.matmul_batch(x, iter(weights), out=[None, expected[1], None]), expected)
    same(nf4.matmul_batch(x, []), [])
    same(nf4.matmul_batch([], []), [])


def test_columns_of_one_matrix():
    weights = [nf4.quantize(numbers(rows, (rows, COLS))) for rows in (6, 17, 8)]
    x, y = numbers(2, (5, COLS)), np.full((5, 33), 7, np.float32)
    columns = np.split(y, [6, 23, 31], axis=1)
    nf4.matmul_batch(x, weights, out=columns[:-1])
    same([y[:, :31]], [np.concatenate([nf4.matmul(x, q) for q in weights], axis=1)])
    assert (y[:, 31:] == 7).all()


X, WEIGHT = numbers(3, (3, COLS)), numbers(4, (6, COLS))
FAULTS = {
    "bias has 1 elements; expected 2, one for each weight": {"bias": [None]},
    "bias is of type numpy.ndarray; expected a list of 2, one for each weight": {
        "bias": np.zeros(6)
    },
    "out has 3 elements; expected 2, one for each weight": {"out": [None] * 3},
    "x has 1 elements; expected 2, one for each weight": {"x": [X]},
    "product 1: x is of shape (3, 63); expected [..., 64]": {"x": [X, X[:, 1:]]},
    "product 0: x is of float64; expected fp32, fp16 or bf16": {"x": X.astype(np.float64)},
    "product 1: bias has 5 elements; expected 6": {"bias": [None, np.zeros(5, np.float32)]},
    "product 1: out is of shape (3, 5); expected [..., 6]": {
        "out": [None, np.zeros((3, 5), np.float32)]
    },
    "product 1: in device memory, but product 0 is in host memory": {
        "weights": [
            nf4.quantize(WEIGHT),
            nf4.QuantizedTensor(packed=HIGH, absmax=HIGH + 16, shape=(6, COLS)),
        ],
        "x": [X, CudaArray(4096, "fp16", COLS)],
        "out": [None, HIGH],
    },
    "product 1: weight is of type int; expected a QuantizedTensor": {
        "weights": [nf4.quantize(WEIGHT), 5]
    },
    "weights is of type nf4.tensor.QuantizedTensor; expected a list of QuantizedTensor": {
        "weights": nf4.quantize(WEIGHT)
    },
    "weights has 65 elements; expected at most 64": {
        "weights": [nf4.quantize(WEIGHT)] * 65,
        "out": None,
    },
    "workspace is given; expected None for host memory": {"workspace": np.zeros(64, np.uint8)},
    "threads is -1; expected 0 or more": {"threads": -1},
    "threads is 0.0; expected an integer": {"threads": 0.0},
    "stream is 0; expected None for host memory": {"stream": 0},
}


@pytest.mark.parametrize("message", FAULTS)
def test_what_is_refused(message):
    outs = [np.zeros((3, 6), np.float32) for _ in range(2)]
    arguments = {"x": X, "weights": [nf4.quantize(WEIGHT)] * 2, "out": outs} | FAULTS[message]
    with pytest.raises(nf4.InvalidArgument) as caught:
        nf4.matmul_batch(arguments.pop("x"), arguments.pop("weights"), **arguments)
    assert message in str(caught.value)
    assert not np.any(outs)


def test_outs_that_overlap():
    q, y = nf4.quantize(WEIGHT), np.zeros((3, 12), np.float32)
    for outs in ([y[:, :6], y[:, :6]], [y[:, :6], y[:, 5:11]]):
        with pytest.raises(nf4.InvalidArgument, match="out of product 0 overlaps out of product 1"):
            nf4.matmul_batch(X, [q, q], out=outs)
    square = nf4.quantize(numbers(5, (COLS, COLS)))
    shared = X.copy()
    with pytest.raises(nf4.InvalidArgument, match="out of product 1 overlaps x of product 0"):
        nf4.matmul_batch([shared, X], [square, square], out=[None, shared])
    assert not y.any() and (shared == X).all()


def test_workspace_bytes():
    weights = [nf4.quantize(numbers(rows, (rows, COLS))) for rows in (6, 17)]
    for dtype in ("bf16", np.float16):
        most = max(nf4.matmul_workspace_bytes(q, 3, dtype) for q in weights)
        assert nf4.matmul_batch_workspace_bytes(weights, 3, dtype) == most
    assert nf4.matmul_batch_workspace_bytes([], 3, "bf16") == 0
    with pytest.raises(nf4.InvalidArgument, match="weights is of type nf4.tensor.Quant"):
        nf4.matmul_batch_workspace_bytes(weights[0], 3, "bf16")
    with pytest.raises(nf4.InvalidArgument, match="^m is -1; expected 0 or more"):
        nf4.matmul_batch_workspace_bytes(weights, -1, "bf16")


class TestLaunches:
    """On device memory of a fake library."""

    ROWS = (48, 16)

    @pytest.fixture
    def weights(self, last):
        return [
            nf4.QuantizedTensor(packed=HIGH + i, absmax=HIGH + 16, shape=(rows, COLS))
            for i, rows in enumerate(self.ROWS)
        ]

    @pytest.fixture
    def workspace_needed(self, fake):
        needed = ctypes.c_size_t.in_dll(fake, "fake_workspace_per_row")
        needed.value = 256
        yield
        needed.value = 0

    def test_everything_is_passed(self, last, weights):
        x = CudaArray(HIGH + 32, "bf16", 2, COLS, strides=(256, 2))
        outs = [HIGH + 48, CudaArray(HIGH + 64, "bf16", 2, 16)]
        bias = [CudaArray(HIGH + 80, "bf16", 48), None]
        assert nf4.matmul_batch(x, weights, bias=bias, out=outs, stream=HIGH) == outs
        assert (last.count, last.products, last.stream) == (1, 2, HIGH)
        assert (last.workspace, last.workspace_bytes) == (None, 0)
        for i, rows in enumerate(self.ROWS):
            args, weight = last.matmuls[i], last.weights[i]
            assert (args.struct_size, args.reserved) == (ctypes.sizeof(_abi.MatmulArgs), 0)
            assert (args.dtype, args.m, args.x, args.x_stride) == (3, 2, HIGH + 32, 128)
            assert (args.y, args.y_stride) == (HIGH + 48 + 16 * i, rows)
            assert args.bias == (HIGH + 80 if i == 0 else None)
            assert (weight.packed, weight.rows, weight.cols) == (HIGH + i, rows, COLS)

    def test_a_workspace_is_asked_for(self, last, weights, workspace_needed):
        x, outs = CudaArray(HIGH, "fp16", 3, COLS), [HIGH + 48, HIGH + 64]
        assert nf4.matmul_batch_workspace_bytes(weights, 3, "fp16") == 1536
        with pytest.raises(nf4.InvalidArgument, match="workspace is None; expected 1536 bytes"):
            nf4.matmul_batch(x, weights, out=outs)
        with pytest.raises(nf4.InvalidArgument, match="workspace is in host memory"):
            nf4.matmul_batch(x, weights, out=outs, workspace=np.zeros(1536, np.uint8))
        assert last.count == 0
        nf4.matmul_batch(x, weights, out=outs, workspace=HIGH + 80)
        assert (last.workspace, last.workspace_bytes) == (HIGH + 80, 1536)

    def test_what_is_refused(self, last, weights):
        x = CudaArray(HIGH, "fp16", COLS)
        for message, arguments in {
            "product 1: out is None; expected an array of device memory": {"out": [HIGH, None]},
            "threads is 2; expected 0 for device memory": {"threads": 2},
        }.items():
            arguments = {"x": x, "out": [HIGH, HIGH]} | arguments
            with pytest.raises(nf4.InvalidArgument, match=message):
                nf4.matmul_batch(arguments.pop("x"), weights, **arguments)
        assert last.count == 0

    def test_a_status_is_an_exception(self, fake, weights):
        ctypes.c_int32.in_dll(fake, "fake_status").value = 5
        with pytest.raises(nf4.CudaError, match="^what the fake says is wrong$"):
            nf4.matmul_batch(CudaArray(HIGH, "fp16", COLS), weights, out=[HIGH, HIGH])

    def test_threads_are_passed_on_the_host(self, last):
        sizes = nf4.sizes((16, COLS), nested_blocksize=0)
        q = nf4.QuantizedTensor(
            packed=np.zeros(sizes.packed_bytes, np.uint8),
            absmax=np.zeros(sizes.blocks, np.float32),
            shape=(16, COLS),
        )
        nf4.matmul_batch(np.zeros((2, COLS), np.float32), [q, q], threads=3)
        assert (last.threads, last.products, last.matmuls[1].m) == (3, 2, 2)

    def test_tensors(self, last, monkeypatch, workspace_needed):
        torch = fake_torch.Torch()
        monkeypatch.setitem(sys.modules, "torch", torch)
        device = fake_torch.Device("cuda", 1)
        weights = []
        for rows in self.ROWS:
            sizes = nf4.sizes((rows, COLS), nested_blocksize=0)
            packed = fake_torch.Tensor((sizes.packed_bytes,), torch.uint8, device)
            absmax = fake_torch.Tensor((sizes.blocks,), torch.float32, device)
            weights.append(nf4.QuantizedTensor(packed=packed, absmax=absmax, shape=(rows, COLS)))
        x = fake_torch.Tensor((2, COLS), torch.bfloat16, device)
        ys = nf4.matmul_batch(x, weights)
        assert torch.made[:2] == ys and torch.written == []
        workspace = torch.made[2]
        assert (last.workspace, last.workspace_bytes) == (workspace.address, 1024)
        assert [y.shape for y in ys] == [(2, 48), (2, 16)]
        assert [last.matmuls[i].y for i in (0, 1)] == [y.address for y in ys]
        assert last.stream == 0x1000 and {each.stream for each in torch.made} == {0x1000}
        out = fake_torch.Tensor((2, 16), torch.bfloat16, device)
        assert nf4.matmul_batch(x, weights, out=[None, out], stream=0x2000)[1] is out
        assert last.stream == 0x2000 and torch.written == [out]
