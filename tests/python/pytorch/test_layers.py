"""What NF4Linear and Int4Linear do alike: copies, moves, casts, parts that are replaced."""

from __future__ import annotations

import copy
import io
import pickle

import nf4
import pytest
import torch_cases
from torch_cases import ALLOWED, IN, OUT, error, reference

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch")

import int4_torch_cases  # noqa: E402
import nf4.torch  # noqa: E402
import torch  # noqa: E402
from nf4.torch import Int4Linear, NF4Linear  # noqa: E402

CODEBOOKS = {"nested": {}, "flat": {"nested_blocksize": 0}, "fp4": {"format": "fp4"}}
KINDS = [*CODEBOOKS, *int4_torch_cases.CASES]
ONE_OF_EACH = ["nested", "compressed-tensors, zeros, act order"]

X = torch.randn(3, IN)


def layer_of(kind: str, seed: int = 0, bias: bool = True) -> NF4Linear | Int4Linear:
    if kind in CODEBOOKS:
        dense = torch.nn.Linear(IN, OUT, bias=bias)
        return NF4Linear.from_linear(dense, **CODEBOOKS[kind])
    made = torch.nn.Parameter(torch.randn(OUT)) if bias else None
    return Int4Linear.from_quantized(int4_torch_cases.weight_of(kind, seed), made)


def empty_of(kind: str, bias: bool) -> NF4Linear | Int4Linear:
    if kind in CODEBOOKS:
        return NF4Linear(IN, OUT, bias, device="meta", **CODEBOOKS[kind])
    layout, symmetric, _ = int4_torch_cases.CASES[kind]
    given = {"layout": layout, "group_size": int4_torch_cases.GROUP, "symmetric": symmetric}
    return Int4Linear(IN, OUT, bias, device="meta", **given)


def parts_of(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of the weight: all but the bias."""
    return {
        name: part
        for name, part in [*layer.named_parameters(), *layer.named_buffers()]
        if name != "bias"
    }


def same_parts(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    first, second = parts_of(one), parts_of(other)
    return first.keys() == second.keys() and all(
        torch.equal(part, second[name]) for name, part in first.items()
    )


# ---- Copied, cast, moved ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_equal_and_their_own(kind, copied):
    layer = layer_of(kind)
    expected = layer(X)
    if copied == "deepcopy":
        other = copy.deepcopy(layer)
    elif copied == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    else:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert same_parts(layer, other) and torch.equal(other(X), expected)
    layer.quantized.packed.zero_()
    assert not torch.equal(layer(X), expected)
    assert torch.equal(other(X), expected)


CASTS = {
    "half": (lambda layer: layer.half(), torch.float16),
    "bfloat16": (lambda layer: layer.bfloat16(), torch.bfloat16),
    "double, float": (lambda layer: layer.double().float(), torch.float32),
    "double": (lambda layer: layer.double(), torch.float64),
    "to cpu as fp16": (lambda layer: layer.to("cpu", torch.float16), torch.float16),
    "to bf16": (lambda layer: layer.to(torch.bfloat16), torch.bfloat16),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_is_of_the_bias_alone(kind, cast):
    layer = layer_of(kind)
    before = copy.deepcopy(layer)
    call, dtype = CASTS[cast]
    call(layer)
    assert same_parts(layer, before) and layer.bias.dtype == dtype
    dtypes = {name: part.dtype for name, part in parts_of(before).items()}
    assert {name: part.dtype for name, part in parts_of(layer).items()} == dtypes
    if dtype != torch.float64:
        x = X.to(dtype)
        expected = reference(x, before.quantized, layer.bias)
        assert error(layer(x), expected) <= ALLOWED["bf16"]


@pytest.mark.parametrize("kind", KINDS)
def test_moved_to_meta_and_back_to_memory(kind):
    layer = layer_of(kind)
    before = {name: (part.shape, part.dtype) for name, part in parts_of(layer).items()}
    layer = layer.to("meta")
    assert all(part.is_meta for part in parts_of(layer).values())
    assert layer(X.to("meta")).shape == (3, OUT)
    layer = layer.to_empty(device="cpu")
    assert {name: (part.shape, part.dtype) for name, part in parts_of(layer).items()} == before


@pytest.mark.parametrize("kind", KINDS)
def test_shared_memory_for_other_processes(kind):
    assert all(part.is_shared() for part in parts_of(layer_of(kind).share_memory()).values())


# ---- In parallel; ../distributed has it under DistributedDataParallel ----------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_replica_of_data_parallel(kind):
    """Whose parameters are plain attributes."""
    layer = layer_of(kind)
    replica = layer._replicate_for_data_parallel()
    for name, parameter in layer.named_parameters():
        setattr(replica, name, parameter * 1)
    assert not replica._parameters
    assert torch.equal(replica(X), layer(X))


# ---- Parts that are replaced --------------------------------------------------------------


def changed(before: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of other numbers: what all weights have alike, such as a table, is not another's."""
    if not torch.equal(before, other):
        return other
    return before * 2 if before.is_floating_point() else before ^ 0x11111111


def names_of(layer: torch.nn.Module) -> list[str]:
    return ["bias", *(name for name in parts_of(layer) if name != "weight_shape")]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_tensor_that_is_replaced_is_the_one_used(kind, grad, compiled):
    """Each parameter and buffer in turn, between two calls and between forward and backward."""
    for name in names_of(layer_of(kind)):
        layer, other = layer_of(kind), layer_of(kind, seed=1)
        run = layer
        if compiled:
            run = torch.compile(layer, fullgraph=True, backend="aot_eager")
        x = X.clone().requires_grad_(grad)
        run(x)
        new = changed(getattr(layer, name), getattr(other, name))
        setattr(layer, name, new if name != "bias" else torch.nn.Parameter(new.detach().clone()))
        expected = nf4.matmul(X, layer.quantized, bias=layer.bias.detach())
        y = run(x)
        assert torch.equal(y, expected), name
        if grad:
            (found,) = torch.autograd.grad(y.sum(), x)
            dense = nf4.dequantize(layer.quantized, "fp32").double()
            assert error(found, torch.ones(3, OUT).double() @ dense) <= ALLOWED["fp32"], name


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_layers_of_a_shape_share_a_graph(kind):
    """Each with its own weights."""
    graphs = []

    def counted(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=counted)
    def run(layer, x):
        return layer(x)

    layers = [layer_of(kind, seed) for seed in range(4)]
    with torch.no_grad():
        for layer in layers:
            assert torch.equal(run(layer, X), layer(X))
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad", [False, True])
def test_functional_call_uses_what_it_is_given(kind, grad):
    layer, other = layer_of(kind), layer_of(kind, seed=1)
    x = X.clone().requires_grad_(grad)
    given = {name: getattr(other, name) for name in names_of(other)}
    y = torch.func.functional_call(layer, given, (x,))
    assert torch.equal(y, other(x)) and not torch.equal(y, layer(x))


class Twice(torch.nn.Module):
    def forward(self, bias):
        return 2 * bias


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_a_bias_with_a_parametrization(kind):
    layer = layer_of(kind)
    expected = layer(X) + layer.bias
    torch.nn.utils.parametrize.register_parametrization(layer, "bias", Twice())
    assert torch.allclose(layer(X), expected, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_in_another_dtype_is_cast_for_the_call(kind):
    layer = layer_of(kind)
    y = layer(X.bfloat16())
    assert y.dtype == torch.bfloat16 and layer.bias.dtype == torch.float32


# ---- state_dict ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded_goes_to_the_memory_that_is_there(kind):
    """CUDA graphs and optimizers know where that is."""
    layer, other = layer_of(kind), layer_of(kind, seed=1)
    before = {name: getattr(layer, name) for name in names_of(layer)}
    layer.load_state_dict(other.state_dict())
    assert all(getattr(layer, name) is part for name, part in before.items())
    assert same_parts(layer, other) and torch.equal(layer(X), other(X))
    other.quantized.packed.zero_()
    assert not same_parts(layer, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_on_meta_there_are_keys_and_no_numbers(kind, bias):
    layer, empty = layer_of(kind, bias=bias), empty_of(kind, bias)
    saved = layer.state_dict()
    assert empty.state_dict().keys() <= saved.keys()
    assert all(part.is_meta for part in empty.state_dict().values())
    with pytest.raises(RuntimeError, match="the layer is on meta, where nothing can be copied to"):
        empty.load_state_dict(saved)
    empty.load_state_dict(saved, assign=True)
    assert torch.equal(empty(X), layer(X))
