"""The extension's product with an adapter and its gradient, beside float64; and what they leave to
the general way."""

from __future__ import annotations

import sys
import weakref

import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "_nf4_fast")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
from nf4.torch import _fast  # noqa: E402

if not _fast.registered:
    pytest.skip("this torch has not what C++ needs", allow_module_level=True)

IN, OUT = 128, 72
# Sums may cancel: p and q are rounded, and A and B where they are fp32 beside 16 bits.
DTYPES = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SCALE = 1.5


def layer(dtype, nested=True):
    linear = torch.nn.Linear(IN, OUT, dtype=dtype).requires_grad_(False)
    return nf4.torch.NF4Linear.from_linear(linear, nested_blocksize=256 if nested else 0)


def adapter(rank, dtype):
    return torch.randn(rank, IN).to(dtype), torch.randn(OUT, rank).to(dtype)


def near(found, expected, most):
    return (found.double() - expected).norm() <= most * expected.norm()


def doubles(*tensors):
    return [each.double() for each in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("rank", [1, 8, 128])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0,)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_with_its_adapter(dtype, narrow, rank, shape, bias):
    made = layer(dtype)
    a, b = adapter(rank, dtype if narrow else torch.float32)
    x = torch.randn(*shape, IN).to(dtype)
    y, p = _fast.linear_adapted(x, made.bias if bias else None, made.parts(), a, b, SCALE)
    assert y.dtype == p.dtype == dtype
    assert y.shape == (*shape, OUT) and p.shape == (max(x.numel() // IN, 0), rank)
    x64, w, a64, b64 = doubles(x, made.dequantize(dtype), a, b)
    of_p = x64.reshape(-1, IN) @ a64.t()
    expected = x64 @ w.t() + SCALE * (of_p @ b64.t()).view(y.shape)
    expected = expected + made.bias.double() if bias else expected
    assert near(y, expected, DTYPES[dtype]) and near(p, of_p, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [None, 1, 8, 128])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0,)])
@pytest.mark.parametrize("nested", [False, True])
def test_the_gradient(dtype, rank, shape, nested):
    made = layer(dtype, nested)
    grad_y = torch.randn(*shape, OUT).to(dtype)
    grad, w = doubles(grad_y, made.dequantize(dtype))
    expected = grad @ w
    if rank is None:
        grad_x = _fast.linear_grad(grad_y, made.parts())
    else:
        a, b = adapter(rank, torch.float32)
        grad_x, q = _fast.linear_grad(grad_y, made.parts(), a, b, SCALE)
        of_q = grad.reshape(-1, OUT) @ b.double()
        assert q.shape == of_q.shape and near(q, of_q, DTYPES[dtype])
        expected = expected + SCALE * (of_q @ a.double()).view(expected.shape)
    assert grad_x.shape == (*shape, IN) and grad_x.dtype == dtype
    assert near(grad_x, expected, DTYPES[dtype])


def test_rows_one_distance_apart():
    made = layer(torch.float32)
    a, b = torch.randn(8, 2 * IN)[:, :IN], torch.randn(OUT, 16)[:, :8]
    x = torch.randn(6, IN + 8)[:, :IN]
    found = _fast.linear_adapted(x, None, made.parts(), a, b, SCALE)
    expected = _fast.linear_adapted(
        x.contiguous(), None, made.parts(), a.contiguous(), b.contiguous(), SCALE
    )
    assert all(map(torch.equal, found, expected))


A, B = adapter(8, torch.float32)
LEFT = {
    "no tensor": (A.numpy(), B),
    "another length": (A[:, 1:], B),
    "another rank": (A, B[:, 1:]),
    "another number of rows": (A, B[1:]),
    "a stride of columns": (A.t().contiguous().t(), B),
    "float64": (A.double(), B.double()),
    "two dtypes": (A.bfloat16(), B),
    "narrower than x": (A.bfloat16(), B.bfloat16()),
    "a rank of 0": (A[:0], B[:, :0]),
    "a rank of 129": (torch.randn(129, IN), torch.randn(OUT, 129)),
    "on meta": (A.to("meta"), B.to("meta")),
    "negative": (torch._neg_view(A), B),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_to_the_general_way(case):
    parts = layer(torch.float32).parts()
    assert _fast.linear_adapted(torch.randn(2, IN), None, parts, *LEFT[case], SCALE) is None
    assert _fast.linear_grad(torch.randn(2, OUT), parts, *LEFT[case], SCALE) is None


def test_other_faults_are_left_too():
    parts = layer(torch.float32).parts()
    x = torch.randn(2, IN)
    assert _fast.linear_adapted(x[:, 1:], None, parts, A, B, SCALE) is None
    assert _fast.linear_adapted(x, torch.zeros(3), parts, A, B, SCALE) is None
    assert _fast.linear_adapted(x, None, parts, A, B, float("nan")) is None
    assert _fast.linear_adapted(x, None, parts, A, B, "1") is None
    assert _fast.linear_grad(x, parts) is None
    of_integers = nf4.torch.quantize_int4(torch.randn(OUT, IN), group_size=64)
    layer_of_integers = nf4.torch.Int4Linear.from_quantized(of_integers)
    grad_y = torch.randn(2, OUT).bfloat16()
    assert _fast.linear_grad(grad_y, layer_of_integers.parts()) is None


@pytest.mark.parametrize("arguments", [(), (1, 2, 3)])
def test_a_wrong_number_of_arguments(arguments):
    with pytest.raises(TypeError, match="arguments; expected"):
        _fast.linear_adapted(*arguments)
    with pytest.raises(TypeError, match="arguments; expected"):
        _fast.linear_grad(*arguments)
    with pytest.raises(TypeError, match="arguments; expected"):
        _fast.lora_grads(*arguments)
    with pytest.raises(TypeError, match="arguments; expected"):
        _fast.adapted_grads(*arguments)


def test_gradients_of_an_adapter_are_left_to_torch_on_a_cpu():
    """And where an argument is of another kind; test_gpu_peft.py has what it does on a GPU."""
    p, q, x, grad_y = (torch.randn(4, columns).bfloat16() for columns in (8, 8, IN, OUT))
    for arguments in (
        (grad_y, x, p, q, A, B, SCALE),
        (grad_y, x, p, q, A, B, "1"),
        (grad_y, x, p, None, A, B, SCALE),
        (grad_y, x, p, q, A, None, SCALE),
    ):
        assert _fast.lora_grads(*arguments) is None
    weight = layer(torch.bfloat16).parts()
    for fused in (False, True):
        assert _fast.adapted_grads(grad_y, x, p, weight, A, B, SCALE, fused) is None


@pytest.mark.parametrize("call", range(3))
def test_no_memory_is_an_error(call, monkeypatch):
    """Of y, of p, and of dX."""
    parts, new_empty, left = layer(torch.float32).parts(), torch.Tensor.new_empty, [call]

    def failing(*arguments):
        left[0] -= 1
        if left[0] < 0 or call == 2:
            raise torch.OutOfMemoryError("no memory")
        return new_empty(*arguments)

    monkeypatch.setattr(torch.Tensor, "new_empty", failing)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        if call == 2:
            _fast.linear_grad(torch.randn(2, OUT), parts)
        else:
            _fast.linear_adapted(torch.randn(2, IN), None, parts, A, B, SCALE)


def test_nothing_is_leaked():
    made = layer(torch.float32)
    x, grad_y = torch.randn(2, IN), torch.randn(2, OUT)
    tensors = [x, grad_y, A, B]
    before = [sys.getrefcount(each) for each in tensors]
    for _ in range(20):
        y, p = _fast.linear_adapted(x, None, made.parts(), A, B, SCALE)
        grad_x, q = _fast.linear_grad(grad_y, made.parts(), A, B, SCALE)
        _fast.linear_adapted(x, None, made.parts(), A[:, 1:], B, SCALE)
    assert [sys.getrefcount(each) for each in tensors] == before
    made = [weakref.ref(each) for each in (y, p, grad_x, q)]
    del y, p, grad_x, q
    assert [each() for each in made] == [None] * 4
