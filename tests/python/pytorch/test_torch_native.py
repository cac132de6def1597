"""torch.ops.nf4._linear and ._dense_like, which compiled graphs have: from C++, and without."""

from __future__ import annotations

from types import SimpleNamespace

import nf4
import pytest
import torch_cases
import warm

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
import torch_faults  # noqa: E402
from nf4.torch import _fast, _kernels, _schemas  # noqa: E402
from nf4.torch._weight import PARTS, Spec, WeightParts  # noqa: E402
from torch_faults import COLS, ROWS, M  # noqa: E402

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The exception of an operator in C++. torch 2.15 makes a RuntimeError of it, 2.13 does not.
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
REFUSED = ValueError if TORCH < (2, 14) else (ValueError, RuntimeError)
LAYOUTS = {
    "nested": {},
    "flat": {"nested_blocksize": 0},
    "fp4": {"format": "fp4", "blocksize": 32},
    "a codebook": {"codebook": torch.linspace(-1, 1, 16)},
    "of an odd size": {"blocksize": 64, "nested_blocksize": 64},
}
NAMES = (*PARTS, "rows", "cols", "format", "blocksize", "nested_blocksize")


def weight_of(layout="nested", shape=(ROWS, COLS)):
    return WeightParts.of(nf4.torch.quantize(torch.randn(shape), **LAYOUTS[layout]))


# ---- Results --------------------------------------------------------------------------


def test_they_are_of_cpp_where_the_extension_is():
    from nf4._prepared import _nf4_fast

    assert _fast.registered == (_nf4_fast is not None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_is_that_of_the_core(dtype, layout):
    weight = weight_of(layout, (5, 33) if layout == "of an odd size" else (ROWS, COLS))
    rows, cols = weight.spec.shape
    x, bias = torch.randn(2, M, cols).to(dtype), torch.randn(rows).to(dtype)
    quantized = weight.quantized()
    for given in (None, bias):
        y = _schemas.graph_linear(x, given, *weight.numbers())
        assert torch.equal(y, nf4.matmul(x, quantized, bias=given)) and y.is_contiguous()
    dense = _schemas.graph_dense_like(x, *weight.numbers())
    assert torch.equal(dense, _kernels.dequantize(weight, dtype))


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(1, 2 * M, COLS + 3)[:, ::2, :COLS],
        torch.randn(COLS),
        torch.randn(1, COLS)[:, None].expand(1, 1, COLS),
        torch.randn(0, 4, COLS),
        torch.randn(4, 0, COLS),
        torch.randn(M, COLS, device="cpu:0"),
    ],
    ids=[
        "with gaps",
        "a row",
        "of size 1",
        "of no rows",
        "of no rows inside",
        "on the CPU by number",
    ],
)
def test_x_of_any_rows(x):
    weight = weight_of()
    y = _schemas.graph_linear(x, None, *weight.numbers())
    assert torch.equal(y, _kernels.linear(x.contiguous(), None, weight))
    assert y.shape == (*x.shape[:-1], ROWS)


@pytest.mark.parametrize("shape", [(ROWS, 0), (0, COLS), (0, 0)])
def test_empty_weights(shape):
    rows, cols = shape
    numbers = weight_of(shape=shape).numbers()
    bias = torch.randn(rows)
    assert torch.equal(
        _schemas.graph_linear(torch.randn(M, cols), bias, *numbers), bias.expand(M, rows)
    )
    assert _schemas.graph_dense_like(torch.zeros(()), *numbers).shape == shape


def test_a_weight_taken_apart_and_put_together():
    weight = weight_of("fp4", (2, 3, 40))
    assert weight.numbers()[6:] == (6, 40, 1, 32, 256)
    assert weight.arguments()[6:] == ([2, 3, 40], "fp4", 32, 256)
    back = WeightParts.of_numbers(*weight.numbers())
    assert back.arguments()[6:] == ([6, 40], "fp4", 32, 256)
    assert back.spec == Spec.of((6, 40), "fp4", 32, 256)
    again = WeightParts.of_arguments(*weight.arguments())
    assert again.spec == weight.spec
    assert all(one is other for one, other in zip(again[:6], weight[:6], strict=True))


# ---- What they refuse -------------------------------------------------------------------


FAULTS = torch_faults.FAULTS | {
    "format of -1": {"format": -1},
    "blocksize of 65": {"blocksize": 65},
}


@pytest.mark.skipif(not _fast.registered, reason="not of C++ here")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_nothing_is_kept(fault):
    given = {"x": torch.randn(M, COLS), "bias": torch.randn(ROWS)}
    given |= dict(zip(NAMES, weight_of().numbers(), strict=True)) | FAULTS[fault]
    tensors = [each for each in given.values() if isinstance(each, torch.Tensor)]
    before = [each._use_count() for each in tensors]
    with pytest.raises(REFUSED, match=fault.split()[0]):
        _schemas.graph_linear(*given.values())
    assert [each._use_count() for each in tensors] == before


@pytest.mark.skipif(not _fast.registered, reason="not of C++ here")
def test_a_weight_is_not_made_of_integers():
    with pytest.raises(REFUSED, match="like"):
        like = torch.zeros(3, dtype=torch.int32)
        _schemas.graph_dense_like(like, *weight_of().numbers())


@pytest.mark.skipif(not _fast.registered, reason="not of C++ here")
@pytest.mark.parametrize(
    ("lines", "rows", "count"), [(1 << 30, 1 << 20, str(1 << 50)), (1 << 44, 1 << 20, "2\\^63")]
)
def test_a_result_that_no_memory_holds(lines, rows, count):
    """Without columns neither x nor the weight has memory, and yet y needs it."""
    weight = weight_of(shape=(rows, 0)).numbers()
    with pytest.raises(RuntimeError, match=f"no memory for {count} elements"):
        _schemas.graph_linear(torch.empty(lines, 0), None, *weight)


def test_a_format_that_is_none_is_named_without_the_extension():
    given = dict(zip(NAMES, weight_of().numbers(), strict=True)) | {"format": 5}
    with pytest.raises(nf4.InvalidArgument, match="format is 5"):
        WeightParts.of_numbers(*given.values())


@pytest.mark.parametrize(("cuda", "taken"), [("13.0", False), (None, True)])
def test_python_stands_in_for_all_devices_or_for_none(cuda, taken, monkeypatch):
    """Where torch has CUDA but not the name of its stream, C++ would have left CUDA without."""
    extension = SimpleNamespace(
        operator_functions=lambda: (("sizes", "stream"), ("matmul",), ()),
        register_operators=lambda *_: None,
    )
    monkeypatch.setattr(_fast._prepared, "_nf4_fast", extension)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(_fast, "_address", lambda _, name: int(name != "stream"))
    assert _fast._register() == taken


def test_nothing_is_kept():
    given = [torch.randn(M, COLS), torch.randn(ROWS), *weight_of("a codebook").numbers()]
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    before = [each._use_count() for each in tensors]
    for _ in range(3):
        _schemas.graph_linear(*given)
        _schemas.graph_dense_like(given[0], *given[2:])
    assert [each._use_count() for each in tensors] == before


# ---- In graphs -----------------------------------------------------------------------------


def _targets(graphs):
    return [[str(node.target) for node in graph.graph.nodes] for graph in graphs]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_compiled_for_inference_has_them(mode):
    graphs = []

    def kept(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    layer = nf4.torch.NF4Linear.from_linear(torch.nn.Linear(COLS, ROWS))
    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=kept), fullgraph=True)
    x = torch.randn(M, COLS)
    with mode():
        assert torch.equal(compiled(x), layer(x))
    assert "nf4._linear.default" in _targets(graphs)[0]


@pytest.mark.parametrize(
    "x",
    [torch.randn(COLS, M).t(), torch.randn(1, COLS).expand(M, COLS), torch.randn(M, 1, 2 * COLS)],
    ids=["in columns", "one row for all", "the half of longer rows"],
)
def test_compiled_with_x_of_other_strides(x):
    layer = nf4.torch.NF4Linear.from_linear(torch.nn.Linear(COLS, ROWS))
    compiled = torch.compile(
        lambda x: layer(x[..., :COLS]), fullgraph=True, backend="aot_eager", dynamic=False
    )
    x = x.detach().requires_grad_()
    expected = layer(x[..., :COLS])
    (grad,) = torch.autograd.grad(expected.sum(), x)
    y = compiled(x)
    assert torch.equal(y, expected)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], grad)


def test_a_fault_is_found_when_a_graph_is_made():
    layer = nf4.torch.NF4Linear.from_linear(torch.nn.Linear(COLS, ROWS))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=rf"x is of shape .*; expected \[\.\.\., {COLS}\]"):
        compiled(torch.randn(M, COLS + 1))
    layer.bias = torch.nn.Parameter(torch.zeros(ROWS - 1))
    with pytest.raises(Exception, match=rf"bias is torch.float32 .*; expected .* of \({ROWS},\)"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.randn(M, COLS))


WITHOUT = """
import sys
from types import SimpleNamespace
sys.modules["_nf4_fast"] = None
import torch, nf4.torch
from nf4.torch import _fast
assert not _fast.registered
torch.manual_seed(0)
layer = nf4.torch.NF4Linear.from_linear(torch.nn.Linear(80, 6), format="fp4")
run = torch.compile(layer, fullgraph=True, backend="aot_eager")
x = torch.randn(3, 80, requires_grad=True)
expected = layer(x)
(grad,) = torch.autograd.grad(expected.sum(), x)
y = run(x)
assert torch.equal(y, expected) and torch.equal(torch.autograd.grad(y.sum(), x)[0], grad)
print("as without a compiler")
"""


def test_the_same_without_the_extension():
    done = warm.run(WITHOUT)
    assert done.stdout.strip() == "as without a compiler", done.stderr
