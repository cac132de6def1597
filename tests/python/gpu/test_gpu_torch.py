"""nf4.torch on a GPU: results, streams, graphs and devices."""

from __future__ import annotations

import copy

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
from nf4.torch import NF4Linear, _fast, _kernels  # noqa: E402
from nf4.torch._global_scales import with_global_scale  # noqa: E402
from nf4.torch._weight import WeightParts  # noqa: E402
from torch_cases import ALLOWED, error, reference  # noqa: E402
from torch_gpu_cases import (  # noqa: E402
    COLS,
    DELAY_IN_CYCLES,
    DEVICE,
    DTYPES,
    LAYOUTS,
    ROWS,
    layer_of,
    require_replays,
    settle,
    weight_of,
    x_of,
)

# ---- Results --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 5, 33, 130])
def test_linear_and_its_gradients(dtype, layout, rows):
    layer = layer_of(dtype, layout)
    x = x_of(2, rows, COLS, dtype=dtype, grad=True)
    y = layer(x)
    # Many rows of fp32 go by torch's product with the dense weight, in TF32 where that is on.
    assert y.dtype == x.dtype and y.device == x.device
    assert error(y, reference(x, layer.quantized, layer.bias)) <= max(ALLOWED[dtype], 1e-5)
    arguments = WeightParts.of(layer.quantized).arguments()
    assert torch.equal(torch.ops.nf4.linear.default(x, layer.bias, *arguments), y)
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    grad = torch.randn_like(y)
    y.backward(grad)
    dense = layer.dequantize("fp32").double()
    # The dense weight of the backward pass is rounded to the dtype.
    assert error(x.grad, grad.double() @ dense) <= 2 * max(ALLOWED[dtype], 1e-5)
    assert error(layer.bias.grad, grad.double().sum((0, 1))) <= 2 * max(ALLOWED[dtype], 1e-5)


@pytest.fixture
def many():
    """A layer and an x whose rows need a workspace; Hopper's thread blocks share tiles in it."""
    tiles = torch.cuda.get_device_properties(0).multi_processor_count // 2 + 1
    layer, x = layer_of(shape=(tiles * 128, 4096)), x_of(300, 4096)
    assert nf4.matmul_workspace_bytes(layer.quantized, 300, "bf16") > 0
    return layer, x, _kernels.linear(x, layer.bias, WeightParts.of(layer.quantized))


def test_the_workspace_is_torch_memory(many):
    layer, x, expected = many
    assert error(expected, reference(x, layer.quantized, layer.bias)) <= ALLOWED["bf16"]
    weight = WeightParts.of(layer.quantized)
    settle()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = _fast.linear(x, layer.bias.detach(), weight)
    assert torch.equal(y, expected)
    needed = nf4.matmul_workspace_bytes(layer.quantized, 300, "bf16")
    assert torch.cuda.max_memory_allocated() - before >= y.nbytes + needed
    assert torch.cuda.memory_allocated() - before < y.nbytes + needed  # it was given back


def test_no_memory_is_an_error(many):
    layer, x, expected = many
    settle()
    torch.cuda.set_per_process_memory_fraction(1e-9)
    kept = []  # what torch has reserved, for whichever tensors, serves the first of them
    try:
        with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
            for _ in range(1 + torch.cuda.memory_reserved() // expected.nbytes):
                kept.append(layer(x))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    del kept
    with torch.no_grad():
        assert torch.equal(layer(x), expected)


def test_many_rows_in_a_graph(many):
    layer, x, expected = many
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.graph(graph):
            y = layer(x)
        for _ in range(3):
            y.zero_()
            graph.replay()
            assert torch.equal(y, expected)


VIEWS = {
    "columns of a wider one": lambda x: torch.nn.functional.pad(x, (0, 8))[..., :COLS],
    "transposed": lambda x: x.mT.contiguous().mT,
    "one row for all": lambda x: x[:1, :1].expand(4, 6, COLS),
    "each row several times": lambda x: x[:, :1].expand(4, 6, COLS),
    "of no rows": lambda x: x[:0],
}


@pytest.mark.parametrize("view", VIEWS)
def test_every_kind_of_x(view):
    layer, x = layer_of(), VIEWS[view](x_of(4, 6, COLS))
    expected = nf4.matmul(x.contiguous(), layer.quantized, bias=layer.bias.detach())
    assert torch.equal(layer(x), expected)
    assert torch.equal(nf4.torch.linear(x, layer.quantized, layer.bias), expected)


def test_quantized_and_moved_the_bytes_are_the_same():
    linear = torch.nn.Linear(COLS, ROWS)
    here = NF4Linear.from_linear(linear).to(DEVICE)
    there = NF4Linear.from_linear(linear.to(DEVICE))
    for name, part in here.state_dict().items():
        assert part.is_cuda or "quant_state" in name
        assert torch.equal(part, there.state_dict()[name]), name
    assert torch.equal(here.cpu().weight, there.weight.cpu())


def test_opcheck(dense_gradients):
    arguments = WeightParts.of(weight_of()).arguments()
    bias = x_of(ROWS, grad=True)
    torch.library.opcheck(
        torch.ops.nf4.linear.default, (x_of(3, COLS, grad=True), bias, *arguments)
    )
    torch.library.opcheck(
        torch.ops.nf4.linear_backward.default, (x_of(3, ROWS, grad=True), *arguments)
    )
    torch.library.opcheck(torch.ops.nf4.dequantize.default, (*arguments, torch.bfloat16))


def test_autocast():
    layer, x = layer_of("fp32"), x_of(3, COLS, dtype="fp32", grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert error(y, reference(x, layer.quantized, layer.bias)) <= 2 * ALLOWED["bf16"]
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("rule", ["factor", "divisor"])
def test_nvfp4_is_quantized_again_as_on_the_cpu(rule):
    linear = torch.nn.Linear(COLS, ROWS, bias=False)
    dense = linear.weight.detach().clone()
    options = {"format": "nvfp4", "scale_rule": rule}
    host = NF4Linear.from_linear(linear, **options)
    layer = NF4Linear.from_linear(linear.to(DEVICE), **options)
    for factor in (1.0, 3.0, 2.0**-9):
        host.requantize(factor * dense)
        layer.requantize(factor * dense.to(DEVICE))
        scale = (0.5 if rule == "divisor" else 2.0) * host.nested_absmax
        shared = [with_global_scale(each.quantized, scale) for each in (host, layer)]
        for mine, theirs in ((host.quantized, layer.quantized), shared):
            for part in ("packed", "absmax", "nested_absmax"):
                assert torch.equal(getattr(mine, part), getattr(theirs, part).cpu())
        assert torch.equal(nf4.torch.dequantize(shared[1]), layer.dequantize())


# ---- Streams, graphs, compilers, devices ------------------------------------------------


def test_the_work_goes_to_the_current_stream():
    layer, x = layer_of(), x_of(3, COLS)
    expected, late = layer(x), torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(DELAY_IN_CYCLES)
        late.copy_(x)
        found = [layer(late), torch.ops.nf4.linear.default(
            late, layer.bias, *WeightParts.of(layer.quantized).arguments()
        )]  # fmt: skip
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(each, expected) for each in found)


@pytest.mark.parametrize("rows", [1, 64])
def test_forward_and_backward_in_a_graph(rows):
    layer = layer_of()
    step = torch.cuda.make_graphed_callables(copy.deepcopy(layer), (x_of(rows, COLS, grad=True),))
    for _ in range(3):
        x = x_of(rows, COLS, grad=True)
        expected = layer(x)
        (grad,) = torch.autograd.grad(expected.sum(), x)
        y = step(x)
        assert torch.equal(y, expected)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], grad)


def test_inference_in_a_graph():
    require_replays(layer_of())


def test_tensors_on_several_devices_are_refused():
    layer = NF4Linear.from_quantized(weight_of(device="cpu"))
    with pytest.raises(nf4.InvalidArgument, match="packed is on cpu; expected cuda:0, where x is"):
        layer(x_of(3, COLS))
    with pytest.raises(nf4.InvalidArgument, match="packed is on cuda:0; expected cpu, where x is"):
        nf4.torch.linear(torch.randn(3, COLS), weight_of())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_device_than_the_current_one():
    layer = layer_of(device="cuda:1")
    x = x_of(5, COLS, device="cuda:1", grad=True)
    with torch.cuda.device(0):
        y = layer(x)
        y.sum().backward()
    assert y.device == x.grad.device == torch.device("cuda:1")
    assert error(y, reference(x, layer.quantized, layer.bias)) <= ALLOWED["bf16"]
    with pytest.raises(nf4.InvalidArgument, match="bias is on cuda:1; expected cuda:0"):
        layer(x_of(5, COLS, device="cuda:0"))
