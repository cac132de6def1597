"""Siblings on a GPU: the bits of single products, in graphs, on streams, and with gradients."""

from __future__ import annotations

import copy

import nf4
import pytest
from gpu_cases import NEEDS_GPU

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded"), NEEDS_GPU]
torch = pytest.importorskip("torch")

import nf4.torch  # noqa: E402
from nf4.torch import Int4Linear, _operators_batch  # noqa: E402
from torch_gpu_cases import COLS, DTYPES, layer_of, x_of  # noqa: E402


class Attention(torch.nn.Module):
    """Returns the products, in the dtype of x."""

    def __init__(self, dtype, integers=False):
        super().__init__()
        for name, rows in (("q_proj", 256), ("k_proj", 64), ("v_proj", 200)):
            layer = layer_of(dtype, bias=name != "k_proj", shape=(rows, COLS))
            if integers:
                dense = layer.to_linear(dtype)
                layer = Int4Linear.from_linear(dense, layout="gptq", group_size=64)
            setattr(self, name, layer)

    def forward(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def both(*arguments):
    """A model whose layers are siblings, and one whose layers are not."""
    joined = Attention(*arguments)
    alone = copy.deepcopy(joined)
    nf4.torch.convert(joined, siblings="all")
    return joined, alone


@pytest.fixture
def batches(monkeypatch):
    """How many calls there were for all siblings together."""
    counted = []
    batch = _operators_batch.linear_batch
    monkeypatch.setattr(_operators_batch, "linear_batch", lambda *a: counted.append(1) or batch(*a))
    return counted


def same(found, expected):
    return all(map(torch.equal, found, expected))


def captured(model, x):
    """A graph of a model on x, and what its replays write to."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = model(x)
    return graph, found


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 130])
def test_a_graph_holds_the_products_of_all(batches, rows, dtype, integers):
    if dtype == "fp32" and integers:
        pytest.skip("scales have 16 bits")
    joined, alone = both(dtype, integers)
    x, other = x_of(rows, COLS, dtype=dtype), x_of(rows, COLS, dtype=dtype)
    with torch.no_grad():
        assert same(joined(x), alone(x))
        assert batches == []
        graph, found = captured(joined, x)
        assert batches == [1]
        x.copy_(other)
        graph.replay()
        assert same(found, alone(other))


def test_a_product_is_not_taken_on_another_stream():
    joined, alone = both("bf16")
    x, side = x_of(1, COLS), torch.cuda.Stream()

    def forked(x):
        side.wait_stream(torch.cuda.current_stream())
        q = joined.q_proj(x)
        with torch.cuda.stream(side):
            k = joined.k_proj(x) + 0  # of the side's stream alone
        torch.cuda.current_stream().wait_stream(side)
        return q, k, joined.v_proj(x)

    with torch.no_grad():
        joined(x)
        graph, found = captured(forked, x)
        graph.replay()
        assert same(found, alone(x))
    assert joined.q_proj._siblings[0]._ahead is None


def test_a_product_is_not_taken_in_another_capture():
    joined, alone = both("bf16")
    x = x_of(1, COLS)
    with torch.no_grad():
        joined(x)
        captured(joined.q_proj, x)
        graph, found = captured(lambda x: (joined.k_proj(x), joined.v_proj(x)), x)
        graph.replay()
        assert same(found, alone(x)[1:])
    assert joined.q_proj._siblings[0]._ahead is None


@pytest.mark.parametrize("rows", [1, 40])
def test_a_compiled_graph_has_one_operator(rows):
    joined, alone = both("bf16")
    x = x_of(rows, COLS, grad=True)
    compiled = torch.compile(joined, fullgraph=True)
    with torch.no_grad():
        assert same(compiled(x), alone(x))
    grads = [torch.autograd.grad([y.sum() for y in m(x)], x)[0] for m in (compiled, alone)]
    error = (grads[0] - grads[1]).double().norm() / grads[1].double().norm()
    assert error < 8e-3
