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


class Gpu:
    """What uses_fused_grad asks of a gradient on a GPU."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, m, rows, dtype):
        self.elements, self.dtype = m * rows, DTYPES[dtype]

    def numel(self):
        return self.elements

    def dim(self):
        return 2


WIDE = {"shape": (ROWS, 256)}


@pytest.mark.parametrize(
    ("m", "dtype", "capability", "options", "fused"),
    [
        (16, "bf16", 8, WIDE, False),
        (16, "bf16", 9, WIDE, True),
        (16, "fp16", 10, WIDE, True),
        (17, "bf16", 10, WIDE, False),
        (16, "bf16", 10, {}, False),
        (16, "bf16", 9, {}, True),
        (16, "bf16", 10, WIDE | OWN, False),
        (16, "bf16", 10, WIDE | {"blocksize": 128}, False),
        (16, "fp32", 9, WIDE, False),
        (1024, "fp16", 9, {}, True),
        (1025, "fp16", 9, {}, False),
        (17, "bf16", 8, {}, False),
        (17, "bf16", 9, {"shape": (ROWS, COLS + 1)}, False),
        (17, "bf16", 9, {"shape": (ROWS + 1, COLS)}, False),
        (17, "bf16", 9, {"blocksize": 32}, False),
        (17, "bf16", 9, OWN, False),
        (17, "fp16", 9, OWN, False),
        (17, "fp16", 9, OWN | {"shape": (128, COLS)}, True),
    ],
)
def test_which_way_a_gpu_takes(m, dtype, capability, options, fused, monkeypatch):
    monkeypatch.setattr(_kernels, "_capability", lambda _: capability)
    given = dict(options)
    weight = nf4.torch.quantize(torch.randn(given.pop("shape", (ROWS, COLS))), **given)
    grad_y = Gpu(m, weight.shape[0], dtype)
    assert _kernels.uses_fused_grad(grad_y, WeightParts.of(weight)) == fused


@pytest.mark.parametrize(
    ("m", "cols", "rank", "fused"),
    [
        (2048, 4096, 16, True),  # 1.94 waves
        (2048, 4096, 17, False),
        (2048, 4096, 0, False),
        (1536, 4096, 16, False),  # 1.45
        (1536, 1024, 8, True),  # 0.36
        (2560, 4096, 16, False),  # 2.42
        (4096, 4096, 8, True),  # 3.88
        (4096, 4096, 4, False),  # whose p libnf4 makes before dY W
        (1536, 14336, 16, True),  # 5.09
        (4097, 14336, 16, False),
    ],
)
def test_which_way_a_gpu_takes_with_an_adapter(m, cols, rank, fused, monkeypatch):
    monkeypatch.setattr(_kernels, "_capability", lambda _: 9)
    monkeypatch.setattr(_kernels, "_multiprocessors", lambda _: 132)
    weight = WeightParts.of(nf4.torch.quantize(torch.zeros(ROWS, cols)))
    assert _kernels.uses_fused_grad(Gpu(m, ROWS, "bf16"), weight, rank) == fused


@pytest.mark.parametrize(
    ("rank", "capability", "takes"), [(64, 8, True), (65, 9, False), (8, 7, False), (1, 12, True)]
)
def test_which_way_an_adapters_gradients_take(rank, capability, takes, monkeypatch):
    monkeypatch.setattr(_kernels, "_capability", lambda _: capability)
    assert _kernels.uses_lora_grad(rank, Gpu.device) == takes


@pytest.mark.parametrize("amx", [False, True])
def test_which_way_a_cpu_takes(amx, monkeypatch):
    monkeypatch.setattr(_kernels, "_has_amx", lambda: amx)
    weight, most = WeightParts.of(weight_of()), 16 if amx else 256
    assert _kernels.uses_fused_grad(torch.empty(most, ROWS, dtype=torch.bfloat16), weight)
    assert not _kernels.uses_fused_grad(torch.empty(most + 1, ROWS, dtype=torch.bfloat16), weight)
    for dtype in (torch.float16, torch.float32):
        assert _kernels.uses_fused_grad(torch.empty(4096, ROWS, dtype=dtype), weight)
