"""nf4.torch's operators from C++ on a GPU, and what torch.compile makes of layers with them."""

from __future__ import annotations

import nf4
import pytest
from gpu_cases import NEEDS_GPU

pytestmark = [
    pytest.mark.interop,
    pytest.mark.usefixtures("seeded"),
    NEEDS_GPU,
]
torch = pytest.importorskip("torch")

import nf4.torch  # noqa: E402
from nf4.torch import _kernels, _schemas  # noqa: E402
from nf4.torch._weight import WeightParts  # noqa: E402
from torch_cases import ALLOWED, error, reference  # noqa: E402
from torch_gpu_cases import (  # noqa: E402
    COLS,
    DELAY_IN_CYCLES,
    DTYPES,
    LAYOUTS,
    ROWS,
    layer_of,
    settle,
    weight_of,
    x_of,
)


def numbers_of(weight):
    return WeightParts.of(weight).numbers()


# ---- The operators ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [0, 1, 12, 64, 300])
def test_linear_is_that_of_the_core(dtype, layout, rows):
    weight, x, bias = weight_of(layout), x_of(rows, COLS, dtype=dtype), x_of(ROWS, dtype=dtype)
    for given in (None, bias):
        y = _schemas.graph_linear(x, given, *numbers_of(weight))
        assert torch.equal(y, nf4.matmul(x, weight, bias=given))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_like_is_dequantize(dtype):
    weight = weight_of()
    dense = _schemas.graph_dense_like(x_of(1, dtype=dtype), *numbers_of(weight))
    assert torch.equal(dense, nf4.dequantize(weight, dtype))


@pytest.mark.parametrize("rows", [1, 16, 17, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_grad_is_matmul_grad(dtype, rows):
    weight, grad_y = weight_of(), x_of(rows, ROWS, dtype=dtype)
    grad_x = _schemas.graph_linear_grad(grad_y, *numbers_of(weight))
    assert torch.equal(grad_x, nf4.matmul_grad(grad_y, weight))
    dense = nf4.dequantize(weight, "fp32").double()
    assert error(grad_x, grad_y.double() @ dense) <= 2 * max(ALLOWED[dtype], 1e-5)


def test_rows_that_need_a_workspace():
    """Hopper's thread blocks share tiles in it."""
    tiles = torch.cuda.get_device_properties(0).multi_processor_count // 2 + 1
    weight, x = weight_of(shape=(tiles * 128, 4096)), x_of(300, 4096)
    assert nf4.matmul_workspace_bytes(weight, 300, "bf16") > 0
    y = _schemas.graph_linear(x, None, *numbers_of(weight))
    assert torch.equal(y, nf4.matmul(x, weight))
    assert error(y, reference(x, weight)) <= ALLOWED["bf16"]


def test_the_work_goes_to_the_current_stream():
    weight, x = weight_of(), x_of(3, COLS)
    expected, late = nf4.matmul(x, weight), torch.zeros_like(x)
    packed = weight.packed.clone()
    numbers = (packed, *numbers_of(weight)[1:])
    stream = torch.cuda.Stream()
    packed.zero_()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_IN_CYCLES)
        late.copy_(x)
        packed.copy_(weight.packed)
        y = _schemas.graph_linear(late, None, *numbers)
        dense = _schemas.graph_dense_like(late, *numbers)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(y, expected)
    assert torch.equal(dense, nf4.dequantize(weight, "bf16"))


def test_what_it_took_is_given_back():
    weight, x = weight_of(), x_of(300, COLS)
    numbers = numbers_of(weight)
    _schemas.graph_linear(x, None, *numbers)
    settle()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        _schemas.graph_linear(x, None, *numbers)
        _schemas.graph_dense_like(x, *numbers)
        with pytest.raises(ValueError, match="x"):
            _schemas.graph_linear(x[:, 1:], None, *numbers)
    assert torch.cuda.memory_allocated() == before


def test_parts_on_several_devices_are_refused():
    absmax = weight_of().absmax.cpu()
    packed, _, *rest = numbers_of(weight_of())
    with pytest.raises(ValueError, match="absmax"):
        _schemas.graph_linear(x_of(3, COLS), None, packed, absmax, *rest)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_device_than_the_current_one():
    weight = nf4.torch.quantize(torch.randn(ROWS, COLS, device="cuda:1"))
    x = torch.randn(5, COLS, device="cuda:1", dtype=torch.bfloat16)
    with torch.cuda.device(0):
        y = _schemas.graph_linear(x, None, *numbers_of(weight))
    assert y.device == x.device and torch.equal(y, nf4.matmul(x, weight))


# ---- Compiled -------------------------------------------------------------------------------


def require_alike(compiled, run, x, dtype="bf16"):
    """A compiler may round otherwise between operators."""
    expected = run(x)
    (grad,) = torch.autograd.grad(expected.sum(), x)
    y = compiled(x)
    assert error(y, expected) <= max(ALLOWED[dtype], 1e-5)
    assert error(torch.autograd.grad(y.sum(), x)[0], grad) <= 2 * max(ALLOWED[dtype], 1e-5)


@pytest.mark.parametrize("options", [{}, {"backend": "aot_eager"}, {"mode": "reduce-overhead"}])
def test_compiled_without_a_break(options):
    layer = layer_of()

    def run(x):
        return torch.nn.functional.silu(layer(x))

    compiled = torch.compile(run, fullgraph=True, **options)
    for _ in range(3):
        require_alike(compiled, run, x_of(5, COLS, grad=True))


@pytest.mark.parametrize("rows", [5, 17])
def test_compiled_in_fp32(rows):
    """Many rows of x go by a dense weight."""
    layer = layer_of(dtype="fp32")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    require_alike(compiled, layer, x_of(rows, COLS, dtype="fp32", grad=True), "fp32")


def test_compiled_with_x_in_columns():
    layer = layer_of()
    compiled = torch.compile(lambda x: layer(x.mT), fullgraph=True)
    require_alike(compiled, lambda x: layer(x.mT), x_of(COLS, 70, grad=True))


def test_compiled_twice_over_the_same_weights():
    """One graph for all layers of a shape, with each one's own weights."""
    layers = [layer_of() for _ in range(3)]

    def run(layer, x):
        return layer(x)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    x = x_of(4, COLS)
    with torch.no_grad():
        for layer in layers:
            expected = _kernels.linear(x, layer.bias, WeightParts.of(layer.quantized))
            assert torch.equal(compiled(layer, x), expected)
