"""bitsandbytes' layers where torch.compile traces them: libnf4's operators, with the bits of eager
calls; what is left to bitsandbytes; and what a compiled layer notices."""

from __future__ import annotations

import copy

import pytest
import torch_cases
from torch_cases import IN, OUT

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "bitsandbytes", "_nf4_fast")

import bitsandbytes as bnb  # noqa: E402
import torch  # noqa: E402
from bitsandbytes_cases import DTYPES, layer, packed_of, with_gradients  # noqa: E402
from nf4.torch import _fast  # noqa: E402
from nf4.torch import bitsandbytes as backend  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402

if not _fast.registered:
    pytest.skip("this torch has not what C++ needs", allow_module_level=True)

FORWARD, BACKWARD = ["_linear"], ["_linear_grad"]


@pytest.fixture
def graphs(served):
    """A backend for torch.compile, and the names of the operators for 4 bits that it got, graph by
    graph, below autograd."""
    torch._dynamo.reset()
    found = []

    def kept(graph, _inputs):
        names = (str(node.target).split(".") for node in graph.graph.nodes)
        found.append([name[1] for name in names if name[0] in ("nf4", "bitsandbytes")])
        return graph.forward

    yield found, aot_autograd(fw_compiler=kept, bw_compiler=kept)
    torch._dynamo.reset()


def compiled(made, graphs):
    return torch.compile(made, backend=graphs[1], fullgraph=True)


def same(found, expected):
    return all(a is b or torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("format", "nested", "storage", "bias"),
    [
        ("nf4", True, torch.uint8, False),
        ("nf4", False, torch.bfloat16, True),
        ("fp4", True, torch.bfloat16, True),
        ("fp4", False, torch.uint8, False),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_operators_of_libnf4_with_the_bits_of_eager_calls(
    format, nested, storage, bias, dtype, graphs
):
    made = layer(dtype, bias, nested=nested, quant_type=format, quant_storage=storage)
    x, grad_y = (torch.randn(7, n).to(DTYPES[dtype]) for n in (IN, OUT))
    call = compiled(made, graphs)
    with torch.no_grad():
        assert torch.equal(call(x), made(x))
    assert graphs[0] == [FORWARD]
    found = with_gradients(call, x, made, grad_y)
    assert graphs[0] == [FORWARD, FORWARD, BACKWARD]
    assert same(found, with_gradients(made, x, made, grad_y))


def test_matmul_4bit_as_others_call_it(graphs):
    made = layer()
    packed, state = packed_of(made)
    call = compiled(lambda x: bnb.matmul_4bit(x, packed, state, bias=made.bias), graphs)
    x = torch.randn(2, 5, IN)
    y, grad_x, grad_bias = with_gradients(call, x, made, torch.ones(2, 5, OUT))
    assert graphs[0] == [FORWARD, BACKWARD]
    expected = with_gradients(made, x, made, torch.ones(2, 5, OUT))
    assert same((y, grad_x), expected[:2])
    torch.testing.assert_close(grad_bias, expected[2])  # the sums are made in another order


def test_autocast_changes_nothing(graphs):
    made = layer()
    x = torch.randn(3, IN)
    call = compiled(made, graphs)
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(call, x, made, torch.ones(3, OUT))
    assert graphs[0] == [FORWARD, BACKWARD]
    assert same(found, with_gradients(made, x, made, torch.ones(3, OUT)))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_under_a_mode_for_functions(grad, storage, graphs):
    """As torch.set_default_device is one. Dynamo can trace no attribute of a Params4bit there."""
    made = layer(quant_storage=storage)
    call = compiled(made, graphs)
    with torch.device("cpu"), torch.set_grad_enabled(grad):
        x = torch.randn(3, IN)
        assert torch.equal(call(x), made(x))
    assert graphs[0][0] == FORWARD


def test_in_eval_mode_with_inductor(served):
    torch._dynamo.reset()
    made = layer("fp16").eval()
    x = torch.randn(3, IN).half()
    with torch.no_grad():
        assert torch.equal(torch.compile(made, fullgraph=True)(x), made(x))


def test_scales_in_16_bits_are_cast(graphs):
    made = layer(nested=False)
    state = made.weight.quant_state
    state.absmax = state.absmax.bfloat16()
    x = torch.randn(3, IN)
    assert torch.equal(compiled(made, graphs)(x), made(x))
    assert graphs[0][0] == FORWARD


# ---- Left to bitsandbytes ----------------------------------------------------------------


def test_a_weight_of_other_16_bits_has_bitsandbytes_gradient(graphs, dense_gradients):
    made = layer("bf16", weights=torch.float16)
    x = torch.randn(3, IN).bfloat16()
    grad_y = torch.ones(3, OUT).bfloat16()
    call = compiled(made, graphs)
    found = with_gradients(call, x, made, grad_y)
    assert graphs[0][0] == ["gemm_4bit"]
    assert same(found, with_gradients(made, x, made, grad_y))
    with torch.no_grad():
        assert torch.equal(call(x), made(x))
    assert graphs[0][-1] == FORWARD


def test_a_weight_of_columns_by_rows(graphs):
    packed, state = bnb.functional.quantize_4bit(torch.randn(IN, OUT), quant_type="nf4")
    x = torch.randn(3, IN)
    found = compiled(lambda x: bnb.matmul_4bit(x, packed, state), graphs)(x)
    assert len(graphs[0]) == 1 and set(graphs[0][0]) <= {"dequantize_4bit", "dequantize_blockwise"}
    with pytest.warns(DeprecationWarning, match="quantized from a"):
        expected = bnb.matmul_4bit(x, packed, state)
    assert torch.equal(found, expected)


def test_a_bias_of_another_dtype(graphs):
    packed, state = packed_of(layer())
    x, bias = torch.randn(3, IN), torch.randn(OUT).bfloat16()
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="bias"):
        compiled(lambda x: bnb.matmul_4bit(x, packed, state, bias=bias), graphs)(x)
    assert graphs[0] == []


@pytest.mark.parametrize("grad", [False, True])
def test_x_of_other_strides(grad, graphs):
    """libnf4's operator would copy it."""
    made = layer()
    x = torch.randn(IN, 3).t().requires_grad_(grad)
    assert torch.equal(compiled(made, graphs)(x), made(x))
    assert graphs[0][0] == ["gemm_4bit"]


def test_a_weight_that_requires_grad(graphs):
    packed, state = packed_of(layer(quant_storage=torch.float32))
    packed = packed.clone().requires_grad_()
    compiled(lambda x: bnb.matmul_4bit(x, packed, state), graphs)(torch.randn(3, IN))
    assert graphs[0][0] == ["gemm_4bit"]


def test_transforms(graphs):
    made = layer(bias=False)
    x, v = torch.randn(3, IN), torch.randn(3, IN)
    call = compiled(lambda x, v: torch.func.jvp(made, (x,), (v,))[0], graphs)
    assert torch.equal(call(x, v), made(x))
    assert graphs[0] == [["gemm_4bit"]]


def test_an_exported_program_needs_no_libnf4(served):
    torch._dynamo.reset()
    made = layer()
    x = torch.randn(3, IN)
    with torch.no_grad():
        exported = torch.export.export(made, (x,), strict=True)
        targets = [str(node.target) for node in exported.graph.nodes]
        assert any("bitsandbytes" in each for each in targets)
        assert not any("nf4." in each for each in targets)
        assert torch.equal(exported.module()(x), made(x))


def test_compiled_anew_without_libnf4(graphs):
    made = layer()
    x = torch.randn(3, IN)
    call = compiled(made, graphs)
    with torch.no_grad():
        expected = call(x)
        backend.unregister()
        torch.testing.assert_close(call(x), expected)
    assert graphs[0] == [FORWARD, ["gemm_4bit"]]


# ---- What a compiled layer notices -------------------------------------------------------


@pytest.mark.parametrize("part", ["absmax", "offset", "state2.absmax", "weight", "quant_state"])
def test_a_part_that_is_replaced_is_the_one_used(part, graphs):
    made, other = layer(), layer()
    other.bias = made.bias
    x = torch.randn(3, IN)
    call = compiled(made, graphs)
    with torch.no_grad():
        assert torch.equal(call(x), made(x))
        state, of_other = made.weight.quant_state, other.weight.quant_state
        if part == "weight":
            made.weight = other.weight
        elif part == "quant_state":
            made.weight.quant_state = of_other
        elif part == "state2.absmax":
            state.state2.absmax = of_other.state2.absmax * 2
        else:
            setattr(state, part, getattr(of_other, part).clone())
        assert torch.equal(call(x), made(x))
    assert graphs[0] == [FORWARD]


def test_layers_that_are_alike_are_compiled_once(graphs):
    layers = [layer(bias=False) for _ in range(3)]
    for each in layers:
        each.compile(backend=graphs[1], fullgraph=True)
    x = torch.randn(3, IN)
    with torch.no_grad():
        for each in layers:
            assert torch.equal(each(x), copy.deepcopy(each)(x))
    assert graphs[0] == [FORWARD]


def test_any_number_of_rows(graphs):
    made = layer()
    call = torch.compile(made, backend=graphs[1], fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (2, 3, 17, 0, 1):
            x = torch.randn(rows, IN)
            assert torch.equal(call(x), made(x))
    # torch compiles 0 and 1 rows apart.
    assert graphs[0] == [FORWARD] * len(graphs[0]) and len(graphs[0]) <= 3
