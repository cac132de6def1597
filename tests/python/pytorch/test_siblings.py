"""Siblings: layers that share x are multiplied in one call, and no result changes by it."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import nf4
import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
from nf4.torch import Int4Linear, NF4Linear, _fast, _operators  # noqa: E402
from nf4.torch._weight import WeightParts  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

IN = 64
SIZES = {"q_proj": (32, True), "k_proj": (16, False), "v_proj": (24, True)}

needs_extension = pytest.mark.skipif(not _fast.registered, reason="the extension is not built")


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
def batches(monkeypatch):
    """How many calls there were for all siblings together."""
    counted = []
    batch = _fast.linear_batch

    def counting(x, biases, weights):
        counted.append(len(weights))
        return batch(x, biases, weights)

    monkeypatch.setattr(_fast, "linear_batch", counting)
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


@needs_extension
@pytest.mark.parametrize("make", [NF4Linear.from_linear, integers("gptq"), integers("awq")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(IN,), (1, IN), (2, 9, IN), (0, IN)])
def test_the_bits_are_those_of_single_layers(batches, make, dtype, shape):
    joined, alone = both(Attention, make)
    with torch.no_grad():
        for turn in range(3):
            x = torch.randn(shape, dtype=dtype)
            assert same(joined(x), alone(x))
            assert batches == [3] * turn


@needs_extension
def test_gate_and_up_are_a_pair(batches):
    joined, alone = both(Mlp)
    joined.requires_grad_(False)  # then nothing is recorded, whatever the mode
    for _ in range(2):
        x = torch.randn(3, IN)
        assert same(joined(x), alone(x))
    assert batches == [2]


def grads_of(model, x, run=None):
    x = x.clone().requires_grad_()
    ys = (model if run is None else run)(x)
    parameters = [each for each in model.parameters() if each.requires_grad]
    loss = sum(y.float().sin().sum() for y in ([ys] if torch.is_tensor(ys) else ys))
    for each in parameters:
        each.grad = None
    loss.backward()
    return [each.grad for each in (x, *parameters)]


@needs_extension
@pytest.mark.parametrize("make", [Attention, Mlp])
def test_gradients_have_the_same_bits(batches, make):
    joined, alone = both(make)
    for _ in range(3):
        x = torch.randn(5, IN)
        assert same(grads_of(joined, x), grads_of(alone, x))
    assert batches == []  # where one is recorded, each is by itself


@needs_extension
def test_a_gradient_for_some_of_them(batches):
    joined, alone = both()
    for _ in range(3):
        x = torch.randn(5, IN, requires_grad=True)
        found, expected = (torch.autograd.grad(m(x)[1].sum(), x) for m in (joined, alone))
        assert same(found, expected)
        with torch.no_grad():
            assert same(joined(x), alone(x))
    assert len(batches) == 2


@needs_extension
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_in_the_backward_pass(batches, reentrant):
    joined, alone = both()
    for _ in range(3):
        x = torch.randn(5, IN)
        results = [
            grads_of(m, x, lambda x, m=m: checkpoint(m, x, use_reentrant=reentrant))
            for m in (joined, alone)
        ]
        assert same(*results)


@needs_extension
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("compute_dtype", [None, "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_under_autocast_and_with_a_compute_dtype(batches, grad, compute_dtype, dtype):
    def make(linear):
        return NF4Linear.from_linear(linear, compute_dtype=compute_dtype)

    joined, alone = both(Attention, make)
    for on in (True, False, False, True, False):
        x = torch.randn(3, IN, dtype=dtype, requires_grad=grad)
        with torch.autocast("cpu", torch.bfloat16, enabled=on), torch.set_grad_enabled(grad):
            assert same(joined(x), alone(x))
    assert batches == ([] if grad else [3, 3])


@needs_extension
def test_in_inference_mode_and_out_of_it(batches):
    joined, alone = both()
    x = torch.randn(3, IN)
    for _ in range(2):
        with torch.inference_mode():
            joined(y := torch.randn(3, IN))
            q = joined.q_proj(x)
            assert torch.equal(q, alone.q_proj(x)) and q.is_inference()
            assert same(joined(y), alone(y))
        k = joined.k_proj(x)
        assert not k.is_inference()
        joined(x)
    assert batches


@needs_extension
def test_of_different_x_nothing_is_computed_ahead(batches):
    joined, alone = both(Cross)
    with torch.no_grad():
        for _ in range(3):
            x, other = torch.randn(3, IN), torch.randn(4, IN)
            assert same(joined(x, other), alone(x, other))
    assert batches == []


@needs_extension
def test_what_was_computed_ahead_is_of_the_same_x(batches):
    joined, alone = both()
    x = torch.randn(3, IN)
    with torch.no_grad():
        joined(x)
        joined.q_proj(x)
        x.add_(1)  # another version
        assert torch.equal(joined.k_proj(x), alone.k_proj(x))
        assert torch.equal(joined.v_proj(x.clone()), alone.v_proj(x))
        assert batches == [3]
        for _ in range(2):  # first it is seen again that all are asked for
            assert same(joined(x), alone(x))
        assert batches == [3, 3]


@needs_extension
def test_a_layer_called_twice_computes_twice(batches):
    joined, alone = both()
    x = torch.randn(3, IN)
    with torch.no_grad():
        joined(x)
        first, second = joined.q_proj(x), joined.q_proj(x)
        assert first is not second and torch.equal(first, second)
        first.zero_()
        assert same(joined(x), alone(x))


@needs_extension
def test_nothing_is_kept_of_an_x_that_is_gone(batches):
    joined, _ = both()
    with torch.no_grad():
        joined(torch.randn(3, IN))
        x = torch.randn(3, IN)
        joined.q_proj(x)  # such as where an exception comes before k_proj
        group = joined.q_proj._siblings[0]
        assert len(group._ahead.ys) == 2
        del x
        gc.collect()
        assert group._ahead is None
        joined(torch.randn(3, IN))
        assert batches == [3]


@needs_extension
def test_hooks_are_called_and_may_change_x(batches):
    joined, alone = both()
    called = []
    joined.k_proj.register_forward_hook(lambda *_: called.append(1))
    for model in (joined, alone):
        model.v_proj.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, IN)
            assert same(joined(x), alone(x))
    assert len(called) == 3 and batches == []


def test_the_state_dict_is_that_of_single_layers():
    joined, alone = both()
    assert joined.state_dict().keys() == alone.state_dict().keys()
    joined(torch.randn(1, IN))
    alone.q_proj.bias.data.add_(1)
    joined.load_state_dict(alone.state_dict())
    x = torch.randn(3, IN)
    for _ in range(2):
        assert same(joined(x), alone(x))


@needs_extension
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_model_has_groups_of_its_own(batches, copied):
    joined, alone = both()
    x = torch.randn(3, IN)
    joined(x)
    made = copied(joined)
    for layer in made.children():
        layer.bias = None
    alone_too = copy.deepcopy(alone)
    for layer in alone_too.children():
        layer.bias = None
    del joined
    for turn in range(3):
        assert same(made(x), alone_too(x))
        assert len(batches) == turn


def test_a_copy_of_a_layer_brings_no_others():
    joined, alone = both()
    x = torch.randn(3, IN)
    joined(x)
    for made in (copy.deepcopy(joined.q_proj), copy.copy(joined.q_proj)):
        assert len(pickle.dumps(made)) < 1.2 * len(pickle.dumps(alone.q_proj)) + 500
        for _ in range(2):
            assert torch.equal(made(x), alone.q_proj(x))
    assert same(joined(x), alone(x))


@needs_extension
def test_a_layer_that_is_replaced_is_no_sibling(batches):
    joined, alone = both()
    x = torch.randn(3, IN)
    joined(x)
    for model in (joined, alone):
        model.k_proj = model.k_proj.to_linear()
    gc.collect()
    with torch.no_grad():
        for _ in range(3):
            assert same(joined(x), alone(x))
    assert batches == []


def test_each_by_itself():
    joined, _ = both()
    assert all(layer._siblings is not None for layer in joined.children())
    nf4.torch.convert(joined, siblings=False)
    assert all(layer._siblings is None for layer in joined.children())


def test_threads_of_one_model():
    joined, alone = both()
    inputs = [torch.randn(2, IN) for _ in range(4)]
    expected = [alone(x) for x in inputs]
    wrong = []

    @torch.no_grad()
    def work(i):
        for _ in range(100):
            x = inputs[i].clone() if i % 2 else inputs[0]
            if not same(joined(x), expected[i if i % 2 else 0]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


@needs_extension
def test_adapters_hold_the_layers_that_they_adapt(batches):
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
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(3, IN)
            assert same(joined(x), alone(x))
    assert batches == [3]


def test_without_the_extension(monkeypatch):
    monkeypatch.setattr(_fast, "linear_batch", lambda *_: None)
    monkeypatch.setattr(_fast, "linear", lambda *_: None)
    joined, alone = both()
    for _ in range(4):
        x = torch.randn(3, IN)
        with torch.no_grad():
            assert same(joined(x), alone(x))


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
    assert found[-1] == ["linear"] and joined.q_proj._siblings[0]._traced is None


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
    assert same(_operators.linear_batch(x, biases, parts), expected)
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
    found = gradients_of_gradients(_operators.linear_batch(x, biases, parts), x)
    expected = gradients_of_gradients([layer(x) for layer in layers], x)
    assert torch_cases.error(found[0], expected[0]) < 1e-6
