"""nf4.matmul on torch tensors in host memory."""

import nf4
import numpy as np
import oracle
import pytest
from nf4 import _torch

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")

import torch_memory as memory  # noqa: E402

ROWS, COLS = 6, 64
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((ROWS, COLS)).astype(np.float32)
X = RNG.standard_normal((2, 3, COLS)).astype(np.float32)


@pytest.fixture
def weight():
    return nf4.quantize(torch.from_numpy(WEIGHT))


@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
@pytest.mark.parametrize("of_tensors", [True, False])
def test_bits_are_those_of_arrays(dtype, of_tensors):
    q = nf4.quantize(WEIGHT)
    x, bias = (each.astype(oracle.DTYPES[dtype]) for each in (X, WEIGHT[:, 0].copy()))
    expected = memory.tensor_of(nf4.matmul(x, q, bias=bias), "cpu")
    if of_tensors:
        q = memory.weight_on(q, "cpu")
    x, bias = memory.tensor_of(x, "cpu"), memory.tensor_of(bias, "cpu")
    y = nf4.matmul(x, q, bias=bias)
    assert type(y) is torch.Tensor and (y.shape, y.dtype) == ((2, 3, ROWS), x.dtype)
    assert memory.differing(y, expected) == 0
    out = torch.zeros_like(y)
    assert nf4.matmul(x, q, bias=bias, out=out) is out
    assert memory.differing(out, expected) == 0
    assert nf4.matmul(x[0, 0], q).shape == (ROWS,)


def test_arrays_beside_tensors(weight):
    x = X.copy()
    y = nf4.matmul(x, weight)
    assert type(y) is np.ndarray
    out = torch.zeros(2, 3, ROWS)
    nf4.matmul(x, weight, out=out)
    assert oracle.differing(out.numpy(), y) == 0
    nf4.matmul(torch.from_numpy(x), weight, out=(again := np.zeros_like(y)))
    assert oracle.differing(again, y) == 0


VIEWS = {
    "columns of a wider one": lambda x: torch.nn.functional.pad(x, (0, 5))[..., :COLS],
    "every other row": lambda x: x.repeat_interleave(2, dim=-2)[..., ::2, :],
    "one row": lambda x: x[1, 2],
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "in inference mode": lambda x: in_inference_mode(x),
}


def in_inference_mode(tensor):
    with torch.inference_mode():
        return tensor.clone()


@pytest.mark.parametrize("view", VIEWS)
def test_every_kind_of_x_and_out(weight, view):
    x = VIEWS[view](torch.from_numpy(X))
    expected = nf4.matmul(x.detach().clone(), weight)
    y = nf4.matmul(x, weight)
    assert y.is_contiguous() and memory.differing(y, expected) == 0
    filled = torch.full((*y.shape[:-1], ROWS + 3), 7.0)
    nf4.matmul(x, weight, out=filled[..., :ROWS])
    assert memory.differing(filled[..., :ROWS], expected) == 0
    assert (filled[..., ROWS:] == 7).all()


def fake_tensor(*shape):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(*shape)


def test_a_mode_at_the_first_call_slows_none_after_it():
    from torch._subclasses.fake_tensor import FakeTensorMode

    device = _torch.Device(torch, torch.device("cpu"))
    with FakeTensorMode():
        assert type(device.new((3, 2), "fp32", None)) is not torch.Tensor
    assert device.maker((3, 2), "fp32").func is torch.empty_like
    for _ in range(2):
        assert type(device.new((3, 2), "fp32", None)) is torch.Tensor
    assert device._cached_maker.cache_info().hits == 1


FAULTS = {
    "x requires grad; expected a detached tensor": lambda x, _: {"x": x.requires_grad_()},
    "x is of type torch._subclasses.fake_tensor.FakeTensor": lambda _x, _: {
        "x": fake_tensor(3, COLS)
    },
    "x is on meta; expected the CPU or CUDA": lambda x, _: {"x": x.to("meta")},
    "x is of layout torch.sparse_coo": lambda x, _: {"x": x.to_sparse()},
    "x has its negative bit set": lambda x, _: {"x": torch._neg_view(x)},
    "x is of float64; expected fp32, fp16 or bf16": lambda x, _: {"x": x.double()},
    "x is of shape (3, 32); expected [..., 64]": lambda x, _: {"x": x[:, ::2]},
    "x is of shape (3, 64) and strides (1, 3); expected": lambda x, _: {
        "x": x.t().contiguous().t()
    },
    "x is of shape (3, 64) and strides (0, 1); expected": lambda x, _: {"x": x[0].expand(3, COLS)},
    "bias requires grad": lambda _x, _: {"bias": torch.nn.Parameter(torch.zeros(ROWS))},
    "bias is of fp16; expected fp32": lambda _x, _: {"bias": torch.zeros(ROWS).half()},
    "bias has 1 elements; expected 6": lambda _x, _: {"bias": torch.zeros(1)},
    "out is of bf16; expected fp32, as x is": lambda _x, out: {"out": out.bfloat16()},
    "out is of shape (3, 5); expected [..., 6]": lambda _x, out: {"out": out[:, 1:]},
    "out is of shape (2, 6); expected (3, 6)": lambda _x, out: {"out": out[:2]},
    "out is of shape (3, 6) and strides (1, 3)": lambda _x, out: {"out": out.t().contiguous().t()},
    "out requires grad": lambda _x, out: {"out": out.requires_grad_()},
    "out is of type torch._subclasses.fake_tensor.FakeTensor": lambda _x, _: {
        "out": fake_tensor(3, ROWS)
    },
    "workspace is given; expected None for host memory": lambda _x, _: {
        "workspace": torch.zeros(64, dtype=torch.uint8)
    },
}


@pytest.mark.parametrize("message", FAULTS)
def test_what_is_refused(weight, message):
    x, out = torch.from_numpy(X[0].copy()), torch.zeros(3, ROWS)
    arguments = {"x": x, "out": out} | FAULTS[message](x, out)
    with pytest.raises(nf4.InvalidArgument) as caught:
        nf4.matmul(arguments.pop("x"), weight, **arguments)
    assert message in str(caught.value)
    assert not out.detach().any()


def test_autograd_hears_of_a_written_out(weight):
    x, out = torch.from_numpy(X), torch.zeros(2, 3, ROWS)
    before = out._version, x._version
    with pytest.raises(nf4.InvalidArgument, match="threads is -1"):
        nf4.matmul(x, weight, out=out, threads=-1)
    assert (out._version, x._version) == before
    nf4.matmul(x, weight, out=out)
    assert out._version > before[0] and x._version == before[1]


def test_a_weight_that_moved_is_looked_at_again(weight):
    x = torch.from_numpy(X)
    before = nf4.matmul(x, weight)
    weight.packed.data = torch.full_like(weight.packed, 0x77)
    assert not nf4.matmul(x, weight).any() and before.any()


# ---- Outputs that torch makes otherwise than asked -----------------------------------------


def _short(function, made):
    return made.new_zeros(8) if function in (torch.empty, torch.empty_like) else made


def _half(function, made):
    of_fp32 = function in (torch.empty, torch.empty_like) and made.dtype == torch.float32
    return made.half() if of_fp32 else made


CALLS = {
    "matmul": lambda q, x, ends: nf4.matmul(x, q),
    "dequantize": lambda q, x, ends: nf4.dequantize(q, "fp32"),
    "matmul_grouped": lambda q, x, ends: nf4.matmul_grouped(x, q, ends),
    "lora_grad": lambda q, x, ends: nf4.lora_grad(x, None, None, x[:, :4].contiguous(), 1.0),
}


@pytest.mark.parametrize("change", [_short, _half])
@pytest.mark.parametrize("call", CALLS)
def test_an_output_that_a_mode_makes_is_checked(call, change):
    """A mode of torch may make a smaller tensor than it is asked for: nothing is written past it,
    in the mode or after it."""
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return change(function, function(*args, **(kwargs or {})))

    stack = torch.from_numpy(np.repeat(WEIGHT[None], 2, 0).copy())
    q = nf4.quantize(stack if call == "matmul_grouped" else stack[0])
    x, ends = torch.from_numpy(X[0].copy()), torch.tensor([1, 3], dtype=torch.int32)
    _torch._device.cache_clear()
    with Mode(), pytest.raises((nf4.InvalidArgument, RuntimeError)):
        CALLS[call](q, x, ends)
    expected = CALLS[call](q, x, ends)
    for made in expected if isinstance(expected, tuple) else [expected]:
        assert made is None or made.dtype == torch.float32
    with Mode(), pytest.raises((nf4.InvalidArgument, RuntimeError)):
        CALLS[call](q, x, ends)
