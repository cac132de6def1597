"""Experts on a GPU: nf4.matmul_grouped, its operator with gradients, graph replays with other
routings, and a model of transformers."""

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

EXPERTS, ROWS, COLS, TOP_K = 8, 192, 256, 2
ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def stack_of(dtype=torch.bfloat16, **options):
    return nf4.torch.quantize(
        torch.randn(EXPERTS, ROWS, COLS, device="cuda", dtype=dtype), **options
    )


def routing(tokens, experts=EXPERTS):
    """The ends, the token of each row of y, and its expert."""
    chosen = torch.rand(tokens, experts, device="cuda").topk(TOP_K).indices.flatten()
    sorted_, order = chosen.sort(stable=True)
    numbers = torch.arange(experts, device="cuda")
    ends = torch.searchsorted(sorted_, numbers, right=True, out_int32=True)
    return ends, (order // TOP_K).int(), sorted_


def expected_of(weight, x, x_index, experts, bias=None):
    dense = nf4.torch.dequantize(weight, torch.float32).double()
    rows = x.double()[x_index.long()]
    y = torch.stack([dense[e] @ row for e, row in zip(experts.tolist(), rows, strict=True)])
    return y if bias is None else y + bias[experts]


def error(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("nested_blocksize", [0, 256])
def test_values_and_gradients(tokens, dtype, nested_blocksize):
    weight = stack_of(dtype, nested_blocksize=nested_blocksize)
    ends, x_index, experts = routing(tokens)
    x = torch.randn(tokens, COLS, device="cuda", dtype=dtype, requires_grad=True)
    bias = torch.randn(EXPERTS, ROWS, device="cuda", dtype=dtype, requires_grad=True)
    y = nf4.torch.linear_grouped(x, weight, ends, x_index=x_index, bias=bias)
    expected = expected_of(weight, x, x_index, experts, bias)
    assert y.dtype == dtype and error(y, expected) <= ALLOWED[dtype]
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, bias), grad, retain_graph=True)
    exact = torch.autograd.grad(expected, (x, bias), grad.double())
    for each, other in zip(found, exact, strict=True):
        assert each.dtype == dtype and error(each, other) <= 2 * ALLOWED[dtype]
    again = torch.autograd.grad(y, (x, bias), grad)
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("layout", ["gptq", "awq", "compressed-tensors"])
@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_integers(tokens, layout):
    dense = torch.randn(EXPERTS, ROWS, COLS, device="cuda", dtype=torch.bfloat16)
    weight = nf4.torch.quantize_int4(dense, layout=layout, group_size=64, symmetric=False)
    stored = torch.stack([nf4.dequantize(weight.expert(e), "fp32") for e in range(EXPERTS)])
    ends, x_index, experts = routing(tokens)
    x = torch.randn(tokens, COLS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = nf4.torch.linear_grouped(x, weight, ends, x_index=x_index)
    rows = x.double()[x_index.long()]
    expected = torch.einsum("mk,mnk->mn", rows, stored.double()[experts])
    assert error(y, expected) <= 1e-2
    grad = torch.randn_like(y)
    (found,), (exact,) = (
        torch.autograd.grad(y, x, grad),
        torch.autograd.grad(expected, x, grad.double()),
    )
    assert error(found, exact) <= 2e-2


def test_a_graph_of_a_gradient_is_replayed_with_other_routings():
    weight = stack_of()
    x = torch.randn(9, COLS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends, x_index, _ = routing(9)
    grad = torch.randn(len(x_index), ROWS, device="cuda", dtype=torch.bfloat16)

    def step():
        y = nf4.torch.linear_grouped(x, weight, ends, x_index=x_index)
        return torch.autograd.grad(y, x, grad)[0]

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        with torch.cuda.graph(graph, stream=stream):
            found = step()
    torch.cuda.synchronize()
    for _ in range(3):
        other = routing(9)
        ends.copy_(other[0])
        x_index.copy_(other[1])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, step())


def test_a_scale_of_each_row():
    weight = stack_of()
    ends, x_index, experts = routing(9)
    x = torch.randn(9, COLS, device="cuda", dtype=torch.bfloat16)
    scale = torch.rand(len(x_index), device="cuda")
    y = nf4.matmul_grouped(x, weight, ends, x_index=x_index, row_scale=scale)
    assert error(y, expected_of(weight, x, x_index, experts) * scale[:, None]) <= 1e-2
    assert torch.equal(y, nf4.matmul_grouped(x, weight, ends, x_index=x_index, row_scale=scale))


def test_gradients_of_wrong_ends_and_indices():
    weight = stack_of()
    x = torch.randn(6, COLS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([2, 1, 1, 5, 5, 5, 5, 5], device="cuda", dtype=torch.int32)
    x_index = torch.tensor([0, -1, 3, 99, 1, 2], device="cuda", dtype=torch.int32)
    y = nf4.torch.linear_grouped(x, weight, ends, x_index=x_index)
    (grad,) = torch.autograd.grad(y[:5].float().sum(), x)
    assert not y[[1, 3]].any() and not grad[[2, 4, 5]].any()
    dense = nf4.torch.dequantize(weight, torch.float32).sum(1)
    for row, expert in {0: 0, 3: 3, 1: 3}.items():
        assert error(grad[row], dense[expert]) <= 2e-2


def test_a_graph_is_replayed_with_other_routings():
    experts = nf4.torch.NF4Experts.from_quantized(stack_of())
    x = torch.randn(5, COLS, device="cuda", dtype=torch.bfloat16)
    ends, x_index, _ = routing(5)
    with torch.no_grad():
        experts(x, ends, x_index)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(x, ends, x_index)
        for _ in range(4):
            other = routing(5)
            x.normal_()
            ends.copy_(other[0])
            x_index.copy_(other[1])
            graph.replay()
            assert torch.equal(y, experts(x, ends, x_index))
            assert error(y, expected_of(experts.quantized, x, x_index, other[2])) <= 1e-2


def test_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=128, intermediate_size=96, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, vocab_size=100, num_experts=8,
        num_experts_per_tok=2, head_dim=64,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).to("cuda", torch.bfloat16).eval()
    nf4.torch.quantize_model(model, experts=True)
    twin = copy.deepcopy(model)
    nf4.torch.to_dense(twin)
    for module in list(twin.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nf4.torch.NF4Experts):
                delattr(module, name)
                setattr(module, name, torch.nn.Parameter(child.dequantize(), requires_grad=False))
                module.config._experts_implementation = "eager"
    tokens = torch.arange(22, device="cuda").view(2, 11)
    with torch.no_grad():
        expected = twin(tokens).logits
        assert error(model(tokens).logits, expected) <= 4e-2
        layer, x = model.model.layers[0].mlp, torch.randn(1, 3, 128, device="cuda").bfloat16()
        compiled = torch.compile(layer.experts, fullgraph=True)
        chosen = torch.tensor([[0, 3], [7, 3], [1, 0]], device="cuda")
        given = (x[0], chosen, torch.rand(3, 2, device="cuda").bfloat16())
        assert error(compiled(*given), layer.experts(*given)) <= 1e-2
