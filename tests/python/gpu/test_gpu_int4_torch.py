"""Int4Linear and the operators of integer weights on a GPU: results, graphs, compilers, moves."""

from __future__ import annotations

import dataclasses

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
from int4_torch_cases import CASES, arrays_of, dense_of, weight_of  # noqa: E402
from nf4.torch import Int4Linear, _fast  # noqa: E402
from torch_cases import ALLOWED, error, reference  # noqa: E402
from torch_gpu_cases import DEVICE, DTYPES, x_of  # noqa: E402

SHAPE = {"rows": 200, "cols": 320, "group_size": 32}
ACT_ORDER = [case for case, (_, _, act_order) in CASES.items() if act_order]


def layer_of(case: str, scale_dtype: str = "fp16", **shape: int) -> Int4Linear:
    """Made on the CPU, and moved."""
    weight = weight_of(case, scale_dtype=scale_dtype, **SHAPE | shape)
    bias = torch.nn.Parameter(torch.randn(weight.shape[0]))
    return Int4Linear.from_quantized(weight, bias).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [1, 5, 33, 130])
def test_linear_and_its_gradients(dtype, case, rows):
    layer = layer_of(case).to(DTYPES[dtype])
    x = x_of(2, rows, SHAPE["cols"], dtype=dtype, grad=True)
    y = layer(x)
    allowed = max(ALLOWED[dtype], 1e-5)  # fp32 goes by torch's product with the dense weight
    assert y.dtype == x.dtype and y.device == x.device
    assert error(y, reference(x, layer.quantized, layer.bias)) <= allowed
    grad = torch.randn_like(y)
    y.backward(grad)
    dense = layer.dequantize("fp32").double()
    assert error(x.grad, grad.double() @ dense) <= 2 * allowed
    assert error(layer.bias.grad, grad.double().sum((0, 1))) <= 2 * allowed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scale_dtype", ["fp16", "bf16"])
def test_dequantize_is_bit_equal_to_the_oracle(dtype, case, scale_dtype):
    expected = dense_of(arrays_of(case, scale_dtype=scale_dtype, **SHAPE), dtype)
    assert torch.equal(layer_of(case, scale_dtype).dequantize(dtype).cpu(), expected)


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_quantize_is_that_of_the_cpu(layout, symmetric):
    dense = torch.randn(64, 256, dtype=torch.bfloat16)
    options = {"layout": layout, "symmetric": symmetric, "group_size": 64}
    here = nf4.torch.quantize_int4(dense.to(DEVICE), **options)
    there = nf4.torch.quantize_int4(dense, **options)
    for name in ("packed", "scales", "zeros"):
        ours, theirs = getattr(here, name), getattr(there, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours.cpu(), theirs), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.skipif(not _fast.registered, reason="the extension module _nf4_fast is not built")
def test_the_fast_way_does_not_leave_it_to_the_general_one(case):
    layer, x = layer_of(case).to(torch.bfloat16), x_of(3, SHAPE["cols"])
    y = _fast.linear(x, layer.bias.detach(), layer.parts())
    assert y is not None and torch.equal(y, layer(x))
    assert _fast.dequantize(torch.empty(layer.quantized.shape, device=DEVICE), layer.parts())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [1, 130])
def test_in_a_cuda_graph(case, rows):
    layer, x = layer_of(case).to(torch.bfloat16), x_of(rows, SHAPE["cols"])
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        layer(x)
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, layer(x))


@pytest.mark.parametrize("case", ["gptq", "gptq_v2, act order", "awq", "compressed-tensors"])
def test_compiled(case):
    layer, x = layer_of(case).to(torch.bfloat16), x_of(4, SHAPE["cols"], grad=True)
    y = torch.compile(layer, fullgraph=True)(x)
    assert torch.equal(y, layer(x))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert error(grad, torch.autograd.grad(layer(x).sum(), x)[0]) <= ALLOWED["bf16"]


@pytest.mark.parametrize("case", ACT_ORDER)
@pytest.mark.parametrize("rows", [1, 16, 130])
def test_reordered_once(case, rows):
    layer, x = layer_of(case).to(torch.bfloat16), x_of(rows, SHAPE["cols"])
    state = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    expected = reference(x, layer.quantized, layer.bias)
    layer.reorder_()
    assert layer.quantized.g_idx is None and layer.permutation.is_cuda
    assert error(layer(x), expected) <= ALLOWED["bf16"]
    assert all(torch.equal(tensor, state[key]) for key, tensor in layer.state_dict().items())


def test_a_g_idx_on_the_cpu():
    """Where GPTQModel may leave it."""
    layer = layer_of("gptq_v2, act order")
    weight = layer.quantized
    beside = dataclasses.replace(weight, g_idx=weight.g_idx.cpu())
    assert Int4Linear.from_quantized(beside).g_idx.is_cuda
