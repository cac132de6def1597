"""The gradient of x by libnf4, without a dense weight: nf4.torch's backward passes on the CPU."""

import pytest
from torch_cases import ALLOWED, error, require

require("torch", "numpy")

import nf4  # noqa: E402
import nf4.torch  # noqa: E402
import torch  # noqa: E402
from nf4.torch import _fast, _kernels, _schemas  # noqa: E402
from nf4.torch._weight import PARTS, WeightParts  # noqa: E402
from torch.library import opcheck  # noqa: E402

ROWS, COLS, M = 48, 128, 6
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def nothing_dense(monkeypatch, seeded):
    """A dense weight may not be made."""
    monkeypatch.setattr(_kernels, "new_dense", None)


def weight_of(format="nf4", nested_blocksize=256, shape=(ROWS, COLS)):
    return nf4.torch.quantize(torch.randn(shape), format=format, nested_blocksize=nested_blocksize)


def dense_of(weight):
    return nf4.dequantize(weight, "fp32").double().reshape(-1, weight.shape[-1])


@pytest.mark.parametrize("nested_blocksize", [0, 256])
@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_x(dtype, format, nested_blocksize, way):
    weight = weight_of(format, nested_blocksize)
    x = torch.randn(2, M, COLS).to(DTYPES[dtype]).requires_grad_()
    bias = torch.randn(ROWS).to(x.dtype).requires_grad_()
    grad_y = torch.randn(2, M, ROWS).to(x.dtype)
    nf4.torch.linear(x, weight, bias).backward(grad_y)
    assert x.grad.dtype == x.dtype
    assert error(x.grad, grad_y.double() @ dense_of(weight)) <= 2 * ALLOWED[dtype]
    assert torch.equal(bias.grad, grad_y.sum((0, 1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ways_have_the_same_bits(dtype):
    weight = WeightParts.of(weight_of())
    grad_y = torch.randn(M, ROWS).to(DTYPES[dtype])
    expected = nf4.matmul_grad(grad_y, weight.quantized())
    found = [
        _kernels.linear_grad(grad_y, weight),
        torch.ops.nf4.linear_backward(grad_y, *weight.arguments()),
        _schemas.graph_linear_grad(grad_y, *weight.numbers()),
        torch.compile(torch.ops.nf4.linear_backward, backend="aot_eager")(
            grad_y, *weight.arguments()
        ),
    ]
    if _fast.registered:
        found.append(_fast.linear_grad(grad_y, weight))
    assert all(torch.equal(each, expected) for each in found)


OWN = {"codebook": torch.linspace(-1, 1, 16)}


@pytest.mark.parametrize("name", PARTS)
def test_a_weight_that_was_written_to_has_no_gradient(name, way):
    weight = nf4.torch.quantize(torch.randn(ROWS, COLS), **OWN)
    y = nf4.torch.linear(torch.randn(3, COLS, requires_grad=True), weight)
    getattr(weight, name).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradcheck(way):
    """In float32, with steps and bounds that suit it: y is linear in x."""
    weight = weight_of()
    x = torch.randn(3, COLS, requires_grad=True)
    bias = torch.randn(ROWS, requires_grad=True)

    def call(x, bias):
        return nf4.torch.linear(x, weight, bias)

    given = {"eps": 0.5, "atol": 1e-3, "rtol": 1e-3, "nondet_tol": 0.0}
    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradcheck(call, (x, bias), **given)
    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradgradcheck(call, (x, bias), **given)


def test_the_gradient_of_the_gradient(way):
    weight = weight_of()
    x = torch.randn(M, COLS, requires_grad=True)
    grad_y = torch.randn(M, ROWS, requires_grad=True)
    (grad_x,) = torch.autograd.grad(nf4.torch.linear(x, weight), x, grad_y, create_graph=True)
    (twice,) = torch.autograd.grad(grad_x, grad_y, torch.ones_like(grad_x))
    assert error(twice, torch.ones(M, COLS).double() @ dense_of(weight).T) <= 1e-6


def test_the_operator_is_one_of_torchs():
    grad_y = torch.randn(M, ROWS)
    opcheck(_schemas.graph_linear_grad, (grad_y, *WeightParts.of(weight_of()).numbers()))


@pytest.mark.parametrize(
    "grad_y",
    [
        torch.randn(COLS, ROWS).t()[:ROWS, :ROWS],
        torch.randn(2 * M, ROWS + 3)[::2, :ROWS],
        torch.ones(()).expand(M, ROWS),
        torch.randn(ROWS),
        torch.randn(0, ROWS),
        torch.randn(1, M, 1, ROWS),
    ],
    ids=["transposed", "with gaps", "one number", "a row", "of no rows", "of four dimensions"],
)
def test_grad_y_of_any_strides(grad_y, way):
    weight = WeightParts.of(weight_of())
    found = torch.ops.nf4.linear_backward(grad_y, *weight.arguments())
    expected = torch.ops.nf4.linear_backward(grad_y.clone().contiguous(), *weight.arguments())
    assert torch.equal(found, expected)
    assert found.shape == (*grad_y.shape[:-1], COLS)


@pytest.mark.parametrize("shape", [(0, COLS), (ROWS, 0)])
def test_empty_weights(shape, way):
    weight = weight_of(shape=shape)
    x = torch.randn(M, shape[1], requires_grad=True)
    nf4.torch.linear(x, weight).sum().backward()
    assert x.grad.shape == x.shape and not x.grad.any()


def test_weights_of_more_dimensions(way):
    weight = weight_of(shape=(2, 3, COLS))
    grad_y = torch.randn(M, 6)
    found = torch.ops.nf4.linear_backward(grad_y, *WeightParts.of(weight).arguments())
    assert error(found, grad_y.double() @ dense_of(weight)) <= 1e-6


# ---- Which way ---------------------------------------------------------------------------


def test_a_dense_weight_is_used_where_the_library_says_so(monkeypatch):
    """What it says is in tests/standin_cuda/check_paths.cpp."""
    weight, asked = WeightParts.of(weight_of()), []

    def answer(grad_y, weight, rank):
        asked.append(rank)
        return rank == 8

    monkeypatch.setattr(_kernels._paths, "grad_prefers_dense", answer)
    grad_y = torch.empty(M, ROWS)
    assert _kernels.uses_fused_grad(grad_y, weight)
    assert not _kernels.uses_fused_grad(grad_y, weight, 8)
    assert asked == [0, 8]


def test_the_answers_of_the_library_on_a_cpu():
    weight = WeightParts.of(weight_of())
    for m, fused in ((16, True), (257, False)):
        assert _kernels.uses_fused_grad(torch.empty(m, ROWS, dtype=torch.bfloat16), weight) == fused
    for dtype in (torch.float16, torch.float32):
        assert _kernels.uses_fused_grad(torch.empty(4096, ROWS, dtype=dtype), weight)
