"""Siblings under torch.compile: one operator, with the bits of single layers."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import nf4
import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch")

import nf4.torch  # noqa: E402
import nf4.torch.distributed  # noqa: E402
import torch  # noqa: E402
from nf4.torch import _operators_batch  # noqa: E402
from nf4.torch._weight import WeightParts  # noqa: E402
from nf4.torch.modules import siblings  # noqa: E402
from siblings_cases import IN, Attention, Cross, Mlp, both, grads_of, same  # noqa: E402

# ---- Compiled --------------------------------------------------------------------------


@pytest.fixture
def graphs():
    """A backend for torch.compile that counts operators of nf4, graph by graph."""
    torch._dynamo.reset()
    found = []

    def backend(graph, _inputs):
        names = [str(node.target) for node in graph.graph.nodes if "nf4." in str(node.target)]
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


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("make", [Attention, Mlp])
def test_guards_of_layers_are_compared_by_versions_of_dicts(make, compute_dtype):
    """A call of a compiled model that checks each guard by itself takes several times as long."""
    torch._dynamo.reset()
    joined, _ = both(make)
    for layer in joined.children():
        layer.compute_dtype = compute_dtype
    compiled = torch.compile(joined, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(torch.randn(3, IN))
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(type(joined).forward.__code__)
    guards = [line for entry in entries for line in str(entry.guard_manager).splitlines()]
    if guards and not any("tag_safe=" in line for line in guards):
        pytest.skip("this torch does not say how it compares guards")
    layers = [line for line in guards if "GuardManager" in line and "NF4Linear" in line]
    assert layers and all("tag_safe=(True" in line for line in layers)


@pytest.mark.parametrize("name", ["_parameters", "_buffers"])
@pytest.mark.parametrize("layer", ["q_proj", "v_proj"])
def test_siblings_with_other_dicts_are_compiled_anew(layer, name):
    torch._dynamo.reset()
    joined, alone = both()
    compiled = torch.compile(joined, backend="eager", fullgraph=True)
    x = torch.randn(3, IN)
    assert same(compiled(x), alone(x))
    for model in (joined, alone):
        changed = model.get_submodule(layer)
        tensors = getattr(changed, name)
        other = torch.zeros_like(tensors["absmax" if name == "_buffers" else "weight"])
        key = "absmax" if name == "_buffers" else "weight"
        if name == "_parameters":
            other = torch.nn.Parameter(other, requires_grad=False)
        setattr(changed, name, {**tensors, key: other})
    assert same(compiled(x), alone(x))


def test_siblings_that_are_prepared_for_fsdp(graphs):
    found, backend = graphs
    joined, alone = both()
    nf4.torch.distributed.prepare(joined)
    x = torch.randn(3, IN)
    assert same(torch.compile(joined, backend=backend, fullgraph=True)(x), alone(x))
    assert found == [["linear_batch3"]]


def test_products_left_over_hold_no_deleted_layer(graphs):
    _, backend = graphs
    joined, _ = both()
    codes = weakref.ref(joined.k_proj.weight)
    torch.compile(joined.q_proj, backend=backend)(torch.randn(3, IN))
    assert siblings._trace.ahead is not None
    del joined
    torch._dynamo.reset()
    gc.collect()
    assert codes() is None and siblings._trace.ahead is None


def test_siblings_that_take_another_weight_are_compiled_anew(graphs):
    found, backend = graphs
    joined, alone = both()
    compiled = torch.compile(joined, backend=backend, fullgraph=True)
    x = torch.randn(3, IN)
    compiled(x)
    for model in (joined, alone):
        dense = model.k_proj.dequantize()
        other = nf4.torch.NF4Linear.from_quantized(nf4.torch.quantize(dense, blocksize=128))
        model.k_proj.load_state_dict(other.state_dict(), assign=True, strict=False)
        assert model.k_proj.blocksize == 128
    assert same(compiled(x), alone(x)) and found[-1] == ["linear_batch3"]


def test_a_sibling_that_is_gone_is_freed(graphs):
    found, backend = graphs
    joined, alone = both()
    compiled = torch.compile(joined, backend=backend, fullgraph=True)
    x = torch.randn(3, IN)
    compiled(x)
    codes = weakref.ref(joined.k_proj.weight)
    for model in (joined, alone):
        model.k_proj = model.k_proj.to_linear()
    torch._dynamo.reset()
    gc.collect()
    assert codes() is None
    assert same(compiled(x), alone(x)) and found[-1] == ["linear"] * 2


def test_a_copy_that_lacks_siblings_is_compiled_alone(graphs):
    found, backend = graphs
    joined, alone = both()
    x = torch.randn(3, IN)
    for made in (copy.copy(joined.q_proj), copy.deepcopy(joined.k_proj)):
        expected = (alone.q_proj if made._siblings[1] == 0 else alone.k_proj)(x)
        assert torch.equal(torch.compile(made, backend=backend, fullgraph=True)(x), expected)
    assert found == [["linear"]] * 2


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


class Switching(Attention):
    """k, or all but q, in other modes or of another x."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def forward(self, x):
        for_q = {
            "no_grad": torch.no_grad(),
            "inference": torch.inference_mode(),
            "dtype": torch.autocast("cpu", torch.bfloat16),
        }
        with for_q.get(self.other, contextlib.nullcontext()):
            q = self.q_proj(x)
        with torch.autocast("cpu", torch.float16, enabled=self.other in ("autocast", "dtype")):
            k = self.k_proj(x.clone() if self.other == "x" else x)
        return q, k, self.v_proj(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("other", ["x", "no_grad", "inference", "autocast", "dtype"])
def test_compiled_products_are_taken_for_the_same_x_alone(batches, backend, other):
    torch._dynamo.reset()
    joined, alone = both(Switching, other)
    compiled = torch.compile(joined, backend=backend, fullgraph=True)
    runs = (joined, compiled), (alone, alone)
    for _ in range(2):
        x = torch.randn(3, IN)
        found, expected = compiled(x), alone(x)
        assert same(found, expected)
        assert found[0].requires_grad == expected[0].requires_grad
        of_k = [grads_of(model, x, lambda x, run=run: run(x)[1])[:1] for model, run in runs]
        assert same(*of_k)
    assert batches == [3] and siblings._trace.ahead is None


def test_products_left_over_in_a_trace_are_dropped(graphs):
    _, backend = graphs

    class Broken(Attention):
        def forward(self, x):
            return self.q_proj(x), *self.rest(x)

        @torch.compiler.disable
        def rest(self, x):
            return self.k_proj(x), self.v_proj(x)

    joined, alone = both(Broken)
    compiled = torch.compile(joined, backend=backend)
    for _ in range(2):
        x = torch.randn(3, IN)
        assert same(compiled(x), alone(x))
        assert siblings._trace.ahead is None


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
    assert found[-1] == ["linear"] and siblings._trace.ahead is None


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
