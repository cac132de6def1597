"""Siblings: layers that share x are multiplied in one call, and no result changes by it."""

from __future__ import annotations

import copy
import gc
import pickle

import nf4
import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
from nf4.torch import Int4Linear, NF4Linear, _operators_batch  # noqa: E402
from nf4.torch._weight import WeightParts  # noqa: E402
from nf4.torch.modules import siblings  # noqa: E402

IN = 64
SIZES = {"q_proj": (32, True), "k_proj": (16, False), "v_proj": (24, True)}


class Attention(torch.nn.Module):
    def __init__(self, make=NF4Linear.from_linear):
        super().__init__()
        for name, (rows, bias) in SIZES.items():
            setattr(self, name, make(torch.nn.Linear(IN, rows, bias=bias)))

    def forward(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class Cross(Attention):
    """k and v are of something else."""

    def forward(self, x, key_value_states):
        return self.q_proj(x), self.k_proj(key_value_states), self.v_proj(key_value_states)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("gate_proj", "up_proj"):
            setattr(self, name, NF4Linear.from_linear(torch.nn.Linear(IN, 40)))

    def forward(self, x):
        return self.gate_proj(x) * self.up_proj(x)


@pytest.fixture
def captured(monkeypatch):
    """As while a CUDA graph is captured."""
    monkeypatch.setattr(siblings, "_is_captured", lambda x: True)


@pytest.fixture
def batches(monkeypatch):
    """How many products each call for all siblings had."""
    counted = []
    batch = _operators_batch.linear_batch

    def counting(x, biases, weights):
        counted.append(len(weights))
        return batch(x, biases, weights)

    monkeypatch.setattr(_operators_batch, "linear_batch", counting)
    return counted


def both(make=Attention, *arguments):
    """A model whose layers are siblings, and one whose layers are not."""
    alone = make(*arguments)
    joined = copy.deepcopy(alone)
    assert nf4.torch.convert(joined) == []
    return joined, alone


def integers(layout):
    return lambda linear: Int4Linear.from_linear(linear, layout=layout, group_size=32)


def same(found, expected):
    found, expected = ((each,) if torch.is_tensor(each) else each for each in (found, expected))
    return all(map(torch.equal, found, expected)) and [y.dtype for y in found] == [
        y.dtype for y in expected
    ]


def grads_of(model, x, run=None):
    """Of x and of what may be trained."""
    x = x.clone().requires_grad_()
    ys = (model if run is None else run)(x)
    parameters = [each for each in model.parameters() if each.requires_grad]
    for each in parameters:
        each.grad = None
    sum(y.float().sin().sum() for y in ([ys] if torch.is_tensor(ys) else ys)).backward()
    return [each.grad for each in (x, *parameters)]


def test_eager_calls_are_single(batches):
    joined, alone = both()
    for _ in range(3):
        x = torch.randn(3, IN)
        with torch.no_grad():
            assert same(joined(x), alone(x))
        assert same(grads_of(joined, x), grads_of(alone, x))
    assert batches == []


def test_the_state_dict_is_that_of_single_layers():
    joined, alone = both()
    assert joined.state_dict().keys() == alone.state_dict().keys()


def test_each_by_itself():
    joined, _ = both()
    assert all(layer._siblings is not None for layer in joined.children())
    nf4.torch.convert(joined, siblings=False)
    assert all(layer._siblings is None for layer in joined.children())


def test_those_of_several_inputs_are_no_siblings():
    joined, _ = both(Cross)
    assert all(layer._siblings is None for layer in joined.children())


# ---- Captured --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [NF4Linear.from_linear, integers("gptq"), integers("awq")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(IN,), (1, IN), (2, 9, IN), (0, IN)])
def test_the_bits_are_those_of_single_layers(captured, batches, make, dtype, shape):
    joined, alone = both(Attention, make)
    with torch.no_grad():
        x = torch.randn(shape, dtype=dtype)
        assert same(joined(x), alone(x))
        assert same(joined(x), alone(x))
    assert batches == [3, 3]


@pytest.mark.parametrize("make", [Attention, Mlp])
@pytest.mark.parametrize("on", [False, True])
def test_gradients_have_the_same_bits(captured, batches, make, on):
    joined, alone = both(make)
    x = torch.randn(5, IN)
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        assert same(grads_of(joined, x), grads_of(alone, x))
        assert len(batches) == (0 if on else 1)  # each layer's gradient is cast before the sum
        assert same(grads_of(joined, x.bfloat16()), grads_of(alone, x.bfloat16()))
    assert len(batches) == (1 if on else 2)


@pytest.mark.parametrize("compute_dtype", [None, "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_under_autocast_and_with_a_compute_dtype(captured, batches, compute_dtype, dtype):
    def make(linear):
        return NF4Linear.from_linear(linear, compute_dtype=compute_dtype)

    joined, alone = both(Attention, make)
    x = torch.randn(3, IN, dtype=dtype)
    for on in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            assert same(joined(x), alone(x))
    assert batches == [3, 3]


def test_a_gradient_for_one_of_them(captured):
    joined, alone = both()
    x = torch.randn(5, IN, requires_grad=True)
    found, expected = (torch.autograd.grad(m(x)[1].sum(), x) for m in (joined, alone))
    assert same(found, expected)


@pytest.mark.parametrize("other", ["x", "version", "mode"])
def test_products_are_taken_for_the_same_x_alone(captured, batches, other):
    joined, alone = both()
    x = torch.randn(3, IN)
    with torch.no_grad():
        joined.q_proj(x)
    with torch.set_grad_enabled(other == "mode"):
        x = x.clone() if other == "x" else x.add_(1) if other == "version" else x
        assert torch.equal(joined.k_proj(x), alone.k_proj(x))
        assert same(joined(x), alone(x))  # from here on each by itself
    assert batches == [3] and joined.q_proj._siblings[0]._ahead is None


def test_a_layer_called_twice_computes_twice(captured):
    joined, alone = both()
    x = torch.randn(3, IN)
    first, second = joined.q_proj(x), joined.q_proj(x)
    assert first is not second and same(first, second)
    assert same(joined(x), alone(x))


def test_in_inference_mode(captured, batches):
    joined, alone = both()
    with torch.inference_mode():
        x = torch.randn(3, IN)
        assert same(joined(x), alone(x))
    assert batches == [3]


def test_hooks_may_change_x(captured):
    joined, alone = both()
    called = []
    joined.k_proj.register_forward_hook(lambda *_: called.append(1))
    for model in (joined, alone):
        model.v_proj.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    for _ in range(2):
        x = torch.randn(3, IN)
        assert same(joined(x), alone(x))
    assert len(called) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_model_has_groups_of_its_own(captured, batches, copied):
    joined, alone = both()
    made = copied(joined)
    for model in (made, alone):
        for layer in model.children():
            layer.bias = None
    del joined
    x = torch.randn(3, IN)
    assert same(made(x), alone(x))
    assert batches == [3]


def test_a_copy_of_a_layer_brings_no_others(captured, batches):
    joined, alone = both()
    x = torch.randn(3, IN)
    for made in (copy.deepcopy(joined.q_proj), copy.copy(joined.q_proj)):
        assert len(pickle.dumps(made)) < 1.2 * len(pickle.dumps(alone.q_proj)) + 500
        assert torch.equal(made(x), alone.q_proj(x))
    assert batches == []
    assert same(joined(x), alone(x)) and batches == [3]


def test_a_layer_that_is_replaced_is_no_sibling(captured, batches):
    joined, alone = both()
    x = torch.randn(3, IN)
    for model in (joined, alone):
        model.k_proj = model.k_proj.to_linear()
    gc.collect()
    assert same(joined(x), alone(x))
    assert batches == []


def test_adapters_hold_the_layers_that_they_adapt(captured, batches):
    class Adapter(torch.nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer

        def forward(self, x):
            return self.base_layer(x) + x[..., :1]

    alone = Attention()
    alone.q_proj = Adapter(alone.q_proj)
    joined = copy.deepcopy(alone)
    nf4.torch.convert(joined)
    x = torch.randn(3, IN)
    assert same(joined(x), alone(x))
    assert batches == [3]


# ---- Compiled --------------------------------------------------------------------------


@pytest.fixture
def graphs():
    """A backend for torch.compile that counts operators of nf4, graph by graph."""
    torch._dynamo.reset()
    found = []

    def backend(graph, _inputs):
        names = [str(node.target) for node in graph.graph.nodes if "nf4" in str(node.target)]
        found.append(sorted(name.split(".")[1] for name in names))
        return graph

    yield found, backend
    torch._dynamo.reset()


def test_a_compiled_graph_has_one_operator(graphs):
    found, backend = graphs
    joined, alone = both()
    compiled = torch.compile(joined, backend=backend, fullgraph=True)
    for rows in (3, 3, 5):
        x = torch.randn(rows, IN)
        assert same(compiled(x), alone(x))
        assert same(grads_of(joined, x, compiled), grads_of(alone, x))
    assert found and all(graph == ["linear_batch3"] for graph in found)


@pytest.mark.parametrize("make", [Attention, Mlp])
def test_compiled_ahead_of_time(make):
    torch._dynamo.reset()
    joined, alone = both(make)
    compiled = torch.compile(joined, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, IN)
    assert same(grads_of(joined, x, compiled), grads_of(alone, x))
    with torch.no_grad():
        assert same(compiled(x), alone(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert same(compiled(x), alone(x))
        assert same(grads_of(joined, x, compiled), grads_of(alone, x))


def test_layers_that_are_alike_are_compiled_once(graphs):
    found, backend = graphs
    pairs = [both() for _ in range(4)]

    def call(model, x):
        return model(x)

    compiled = torch.compile(call, backend=backend, fullgraph=True)
    x = torch.randn(3, IN)
    for joined, alone in pairs:
        assert same(compiled(joined, x), alone(x))
    assert found == [["linear_batch3"]]


def test_a_layer_replaced_after_it_was_compiled(graphs):
    _, backend = graphs
    joined, alone = both()
    compiled = torch.compile(joined, backend=backend)
    x = torch.randn(3, IN)
    assert same(compiled(x), alone(x))
    for model in (joined, alone):
        model.k_proj = model.k_proj.to_linear()
    gc.collect()
    for _ in range(2):
        assert same(compiled(x), alone(x))


def test_a_compiler_relies_on_one_input_alone(graphs):
    found, backend = graphs
    joined, alone = both(Cross)
    compiled = torch.compile(joined, backend=backend, fullgraph=True)
    x, other = torch.randn(3, IN), torch.randn(4, IN)
    assert same(compiled(x, other), alone(x, other))
    assert found == [["linear"] * 3]


def test_a_layer_that_is_compiled_alone_is_alone_soon(graphs):
    found, backend = graphs
    joined, alone = both()
    compiled = torch.compile(joined.q_proj, backend=backend)
    for _ in range(4):
        x = torch.randn(3, IN)
        assert torch.equal(compiled(x), alone.q_proj(x))
    assert found[-1] == ["linear"] and joined.q_proj._siblings[0]._ahead is None


@pytest.mark.parametrize("count", [2, 3])
def test_the_operators_keep_their_promises(count):
    layers = list(Attention().children())[:count]
    parts = [WeightParts.of(layer.quantized) for layer in layers]
    biases = [layer.bias for layer in layers]
    x = torch.randn(2, IN, requires_grad=True)
    arguments = [each for weight in parts for each in weight.arguments()]
    numbers = [each for weight in parts for each in weight.numbers()]
    public = getattr(torch.ops.nf4, f"linear_batch{count}").default
    below = getattr(torch.ops.nf4, f"_linear_batch{count}").default
    torch.library.opcheck(public, (x, *biases, *arguments))
    plain = [None if bias is None else bias.detach() for bias in biases]
    torch.library.opcheck(below, (x.detach(), *plain, *numbers))
    expected = [layer(x) for layer in layers]
    assert same(_operators_batch.linear_batch(x, biases, parts), expected)
    with pytest.raises(nf4.InvalidArgument, match="x is of shape"):
        public(x[:, 1:], *biases, *arguments)


def test_second_derivatives_of_the_operators():
    layers = list(Attention().children())
    parts = [WeightParts.of(layer.quantized) for layer in layers]
    biases = [layer.bias for layer in layers]

    def gradients_of_gradients(ys, x):
        (first,) = torch.autograd.grad(sum(y.pow(3).sum() for y in ys), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), x)

    x = torch.randn(2, IN, requires_grad=True)
    found = gradients_of_gradients(_operators_batch.linear_batch(x, biases, parts), x)
    expected = gradients_of_gradients([layer(x) for layer in layers], x)
    assert torch_cases.error(found[0], expected[0]) < 1e-6
