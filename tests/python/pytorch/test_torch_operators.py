"""torch.ops.nf4.*: what torch asks of operators, and their results against float64."""

from __future__ import annotations

import dataclasses

import nf4
import pytest
import torch_cases
from torch_cases import ALLOWED, error, reference

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
from nf4.torch import _fast, _kernels  # noqa: E402
from nf4.torch._weight import PARTS, WeightParts  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.library import opcheck  # noqa: E402

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ROWS, COLS = 48, 80
LAYOUTS = {
    "nested": {},
    "flat": {"nested_blocksize": 0},
    "fp4": {"format": "fp4", "blocksize": 32},
    "nested by 64": {"nested_blocksize": 64, "blocksize": 128},
}


def weight_of(layout: str = "nested", shape: tuple[int, ...] = (ROWS, COLS)) -> nf4.QuantizedTensor:
    return nf4.torch.quantize(torch.randn(shape), **LAYOUTS[layout])


# ---- Results ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_against_float64(dtype, layout, with_bias, way):
    weight = weight_of(layout)
    x = torch.randn(3, 5, COLS).to(DTYPES[dtype])
    bias = torch.randn(ROWS).to(DTYPES[dtype]) if with_bias else None
    y = nf4.torch.linear(x, weight, bias)
    assert y.dtype == x.dtype and y.shape == (3, 5, ROWS)
    assert error(y, reference(x, weight, bias)) <= ALLOWED[dtype]
    assert torch.equal(y, nf4.matmul(x, weight, bias=bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dequantize_and_quantize_are_those_of_the_core(dtype, layout, way):
    dense = torch.randn(7, 11, 13).to(DTYPES[dtype])
    weight = nf4.torch.quantize(dense, **LAYOUTS[layout])
    core = nf4.quantize(dense, **LAYOUTS[layout])
    for name in PARTS:
        ours, theirs = getattr(weight, name), getattr(core, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs), name
    assert (weight.shape, weight.dtype, weight.format) == (core.shape, core.dtype, core.format)
    found = nf4.torch.dequantize(weight)
    assert found.dtype == DTYPES[dtype] and torch.equal(found, nf4.dequantize(core))
    assert nf4.torch.dequantize(weight, "bf16").dtype == torch.bfloat16


def test_a_codebook_of_ones_own(way):
    codebook = torch.linspace(-1, 1, 16)
    weight = nf4.torch.quantize(torch.randn(ROWS, COLS), codebook=codebook)
    x = torch.randn(4, COLS)
    assert error(nf4.torch.linear(x, weight), reference(x, weight)) <= ALLOWED["fp32"]


VIEWS = {
    "columns of a wider one": lambda x: torch.nn.functional.pad(x, (0, 5))[..., :COLS],
    "every other row": lambda x: x.repeat_interleave(2, dim=-2)[..., ::2, :],
    "transposed": lambda x: x.mT.contiguous().mT,
    "two leading dimensions swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "one row for all": lambda x: x[:1, :1].expand(4, 6, COLS),
    "each row several times": lambda x: x[:, :1].expand(4, 6, COLS),
    "all rows several times": lambda x: x[:1].expand(4, 6, COLS),
    "rows that overlap": lambda x: x.flatten().as_strided((6, COLS), (COLS - 8, 1)),
    "one row": lambda x: x[1, 2],
    "negated lazily": lambda x: torch._neg_view(x),
    "four dimensions": lambda x: x.reshape(2, 2, 6, COLS),
    "of no rows": lambda x: x[:0],
    "a parameter": lambda x: torch.nn.Parameter(x),
    "in inference mode": lambda x: in_inference_mode(x),
}


def test_a_bias_that_is_negated_lazily(way):
    weight, x, bias = weight_of(), torch.randn(3, COLS), torch.randn(ROWS)
    expected = nf4.matmul(x, weight, bias=-bias)
    lazily = torch.nn.Parameter(torch._neg_view(bias), requires_grad=False)
    assert torch.equal(nf4.torch.linear(x, weight, lazily), expected)
    assert torch.equal(nf4.torch.NF4Linear.from_quantized(weight, lazily)(x), expected)


@pytest.mark.parametrize("shape", [(ROWS, COLS), (2, ROWS // 2, COLS)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_way_of_fp32_on_a_gpu(shape, with_bias):
    weight, x = weight_of("nested", shape), torch.randn(2, 3, COLS)
    bias = torch.randn(ROWS) if with_bias else None
    y = _kernels.dense_linear(x, bias, WeightParts.of(weight))
    assert y.shape == (2, 3, ROWS)
    assert error(y, reference(x, weight, bias)) <= ALLOWED["fp32"]


def in_inference_mode(x):
    with torch.inference_mode():
        return x.clone()


@pytest.mark.parametrize("view", VIEWS)
def test_every_kind_of_x(view, way):
    weight, bias = weight_of(), torch.randn(ROWS)
    x = VIEWS[view](torch.randn(4, 6, COLS))
    expected = nf4.matmul(x.detach().resolve_neg().contiguous(), weight, bias=bias)
    layer = nf4.torch.NF4Linear.from_quantized(weight, torch.nn.Parameter(bias, False))
    for y in (nf4.torch.linear(x, weight, bias), layer(x)):
        assert y.is_contiguous() and torch.equal(y, expected)


@pytest.mark.parametrize("shape", [(0, COLS), (ROWS, 0), (0, 0)])
def test_weights_of_no_elements(shape, way):
    weight = weight_of("flat", shape)
    bias = torch.randn(shape[0])
    y = nf4.torch.linear(torch.randn(3, shape[1]), weight, bias)
    assert torch.equal(y, bias.expand(3, shape[0]))


def test_the_quick_way_and_the_dispatched_one_agree(way):
    weight, x = weight_of(), torch.randn(5, COLS)
    layer = nf4.torch.NF4Linear.from_quantized(weight)
    expected = torch.ops.nf4.linear.default(x, None, *WeightParts.of(weight).arguments())
    assert torch.equal(layer(x), expected)
    x.requires_grad_()
    assert torch.equal(layer(x), expected)


def test_as_many_threads_as_torch_takes(monkeypatch):
    given = []
    for original in (nf4.matmul, nf4.dequantize, nf4.quantize):

        def noted(*arguments, original=original, **options):
            given.append(options["threads"])
            return original(*arguments, **options)

        monkeypatch.setattr(nf4, original.__name__, noted)
    monkeypatch.setattr(_fast, "linear", lambda *_: None)
    monkeypatch.setattr(_fast, "dequantize", lambda *_: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    weight = weight_of()
    nf4.torch.linear(torch.randn(2, COLS), weight)
    nf4.torch.dequantize(weight)
    assert given == [3, 3, 3]


# ---- What torch asks of an operator -------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(layout, grad):
    weight = WeightParts.of(weight_of(layout)).arguments()
    x = torch.randn(3, COLS, requires_grad=grad)
    bias = torch.randn(ROWS, requires_grad=grad)
    opcheck(torch.ops.nf4.linear.default, (x, bias, *weight))
    opcheck(torch.ops.nf4.linear.default, (x[None].mT.contiguous().mT, None, *weight))
    grad_y = torch.randn(3, ROWS, requires_grad=grad)
    opcheck(torch.ops.nf4.linear_backward.default, (grad_y, *weight))
    opcheck(torch.ops.nf4.dequantize.default, (*weight, torch.float16))
    opcheck(torch.ops.nf4.quantize.default, (torch.randn(5, 33), None, *weight[7:]))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("leading", [(2, 3), (4,), (), (0,)])
def test_gradients_of_any_order(with_bias, leading, way):
    """y is linear in x: gradients are products with the dense weight, and theirs with it again."""
    weight = weight_of()
    dense = nf4.dequantize(weight).double()
    x = torch.randn(*leading, COLS, requires_grad=True)
    bias = torch.randn(ROWS, requires_grad=True) if with_bias else None
    grad_y = torch.randn(*leading, ROWS, requires_grad=True)
    inputs = [x, bias] if with_bias else [x]
    y = nf4.torch.linear(x, weight, bias)
    found = torch.autograd.grad(y, inputs, grad_y, create_graph=True)
    assert error(found[0], grad_y.double() @ dense) <= ALLOWED["fp32"]
    if with_bias:
        assert error(found[1], grad_y.reshape(-1, ROWS).sum(0)) <= ALLOWED["fp32"]
    again = torch.randn_like(x)
    (second,) = torch.autograd.grad(found[0], grad_y, again)
    assert error(second, again.double() @ dense.T) <= ALLOWED["fp32"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_passes_do_not_disturb_each_other(dtype, way, dense_gradients):
    """The memory of the dense weight is used again, by larger and by smaller ones."""
    layers, grads = [], []
    for shape in [(ROWS, COLS), (2 * ROWS, COLS), (7, COLS)]:
        weight = weight_of("nested", shape)
        layers.append((WeightParts.of(weight).arguments(), nf4.dequantize(weight, dtype)))
        grads.append(torch.randn(3, shape[0]).to(DTYPES[dtype]))
    found = [
        torch.ops.nf4.linear_backward.default(grad, *arguments)
        for grad, (arguments, _) in zip(grads, layers, strict=True)
    ]
    for grad, (_, dense), each in zip(grads, layers, found, strict=True):
        assert torch.equal(each, grad @ dense)


def test_grad_y_without_dimensions_is_named(way):
    arguments = WeightParts.of(weight_of()).arguments()
    with pytest.raises(RuntimeError, match="both arguments to matmul need to be at least 1D"):
        torch.ops.nf4.linear_backward(torch.tensor(1.0), *arguments)


def test_for_a_bias_alone_nothing_is_saved(way):
    saved = []
    bias = torch.zeros(ROWS, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        y = nf4.torch.linear(torch.randn(3, COLS), weight_of(), bias)
    y.sum().backward()
    assert not saved
    assert torch.equal(bias.grad, torch.full((ROWS,), 3.0))


def test_only_the_bias_is_trained():
    layer = nf4.torch.NF4Linear.from_linear(torch.nn.Linear(COLS, ROWS))
    layer(torch.randn(7, COLS)).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((ROWS,), 7.0))
    assert layer.weight.grad is None


def test_nothing_dense_is_saved(way):
    """The backward pass keeps the parts of the weight, and neither x nor a dense weight."""
    saved = []
    weight = weight_of()
    layer = nf4.torch.NF4Linear.from_quantized(weight)
    x = torch.randn(64, COLS, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    assert sum(t.numel() * t.element_size() for t in saved) <= weight.nbytes + 256 * 4
    y.sum().backward()
    assert x.grad is not None


def test_what_is_compiled_saves_nothing_dense():
    """Nor does the graph that a compiler makes of the forward pass."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def kept(graph, _inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    layer = nf4.torch.NF4Linear.from_quantized(weight_of())
    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=kept), fullgraph=True)
    compiled(torch.randn(3, COLS, requires_grad=True)).sum().backward()
    targets = [[str(node.target) for node in graph.graph.nodes] for graph in graphs]
    assert "nf4._linear.default" in targets[0] and "nf4._linear_grad.default" in targets[1]
    assert not any("dense" in target or "dequantize" in target for target in sum(targets, []))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint

    layer = nf4.torch.NF4Linear.from_quantized(weight_of())
    x = torch.randn(4, COLS, requires_grad=True)
    layer(x).square().sum().backward()
    expected, x.grad = x.grad, None
    checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(x.grad, expected)


# ---- Compilers, modes and transforms --------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_break(dynamic):
    layer = nf4.torch.NF4Linear.from_linear(torch.nn.Linear(COLS, ROWS))
    compiled = torch.compile(
        lambda x: torch.relu(layer(x * 2)), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    for rows in (3, 4, 7):
        x = torch.randn(rows, COLS, requires_grad=True)
        expected = torch.relu(layer(x * 2))
        (grad,) = torch.autograd.grad(expected.sum(), x)
        y = compiled(x)
        assert torch.equal(y, expected)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], grad)
        with torch.no_grad():
            assert torch.equal(compiled(x), expected)


def test_functions_are_compiled_without_a_break():
    weight = weight_of()

    def run(x, dense):
        made = nf4.torch.quantize(dense)
        return nf4.torch.linear(x, weight) @ nf4.torch.dequantize(made)

    x, dense = torch.randn(3, COLS), torch.randn(ROWS, 16)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, dense), run(x, dense))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("compute_dtype", [None, torch.float32, torch.float16])
def test_autocast_goes_first(compiled, compute_dtype):
    linear = torch.nn.Linear(COLS, ROWS)
    layer = nf4.torch.NF4Linear.from_linear(linear, compute_dtype=compute_dtype)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    x = torch.randn(3, COLS, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(x)
        expected = nf4.matmul(
            x.detach().bfloat16(), layer.quantized, bias=linear.bias.detach().bfloat16()
        )
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32 and linear.bias.grad.dtype == torch.float32


def test_autocast_of_the_operator_and_of_the_function():
    weight, x, bias = weight_of(), torch.randn(3, COLS), torch.randn(ROWS)
    expected = nf4.matmul(x.bfloat16(), weight, bias=bias.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        for call in (
            lambda: nf4.torch.linear(x, weight, bias),
            lambda: torch.ops.nf4.linear(x, bias, *WeightParts.of(weight).arguments()),
        ):
            assert torch.equal(call(), expected)
        layer = nf4.torch.NF4Linear.from_quantized(weight).to("meta")
        assert layer(x.to("meta")).dtype == torch.float32  # which autocast knows nothing of
        elsewhere = WeightParts.of(weight)._replace(packed=weight.packed.to("meta"))
        with pytest.raises(nf4.InvalidArgument, match="packed is on meta"):
            torch.ops.nf4.linear(x, bias, *elsewhere.arguments())


def test_fake_tensors_and_meta_have_the_shapes():
    weight = weight_of()
    arguments = WeightParts.of(weight).arguments()
    meta = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in arguments]
    y = torch.ops.nf4.linear.default(torch.empty(2, 3, COLS, device="meta"), None, *meta)
    assert y.shape == (2, 3, ROWS) and y.device.type == "meta"
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, COLS)
        assert nf4.torch.linear(x, weight).shape == (2, ROWS)
        assert type(nf4.torch.NF4Linear.from_quantized(weight)(x)) is not torch.Tensor


def test_a_mode_sees_the_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    layer = nf4.torch.NF4Linear.from_quantized(weight_of())
    with Mode(), torch.no_grad():
        layer(torch.randn(2, COLS))
    assert "nf4._linear.default" in seen


def test_forward_mode_is_refused_and_not_forgotten():
    layer = nf4.torch.NF4Linear.from_quantized(weight_of())
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        layer(forward_ad.make_dual(torch.randn(2, COLS), torch.randn(2, COLS)))


def test_derivatives_of_a_weight_are_refused_without_gradients_too():
    """torch.no_grad() leaves forward mode on."""
    weight = weight_of("flat")
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(weight.absmax, torch.ones_like(weight.absmax))
        with pytest.raises(nf4.InvalidArgument, match="absmax requires grad"):
            nf4.torch.dequantize(dataclasses.replace(weight, absmax=dual))
        trained = torch.nn.Parameter(torch.randn(ROWS, COLS))
        assert nf4.torch.quantize(trained).shape == trained.shape
