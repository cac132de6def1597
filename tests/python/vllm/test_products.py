"""The products of layers, without vLLM."""

import pytest

torch = pytest.importorskip("torch")
nf4_torch = pytest.importorskip("nf4.torch")
loading = pytest.importorskip("nf4.vllm.loading")

from nf4.torch._weight import WeightParts  # noqa: E402
from nf4.vllm import products  # noqa: E402

pytestmark = pytest.mark.interop
COLS = 64


def weight(rows: int, seed: int):
    made = torch.randn(rows, COLS, generator=torch.Generator().manual_seed(seed))
    return nf4_torch.quantize(made)


def values(each):
    return each if isinstance(each, torch.Tensor) else nf4_torch.dequantize(each, "fp32")


MATRIX = torch.linspace(-1, 1, 16 * COLS).view(16, COLS)
LAYERS = {
    "one": [weight(32, 0)],
    "two": [weight(32, 1), weight(16, 2)],
    "three": [weight(32, 3), weight(16, 4), weight(16, 5)],
    "four": [weight(32, 6), weight(16, 7), weight(16, 8), weight(48, 9)],
    "dense between": [weight(32, 10), MATRIX, weight(16, 11)],
}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_weights_are_side_by_side(name, has_bias):
    layer, weights = torch.nn.Module(), LAYERS[name]
    layer.nf4_specs = tuple(
        loading.register(layer, f"weight{i or ''}", each) for i, each in enumerate(weights)
    )
    matrix = torch.cat([values(each) for each in weights])
    bias = torch.randn(len(matrix)) if has_bias else None
    x = torch.randn(2, 3, COLS, generator=torch.Generator().manual_seed(1))
    y = products.linear(layer, x, bias)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, matrix, bias), rtol=0, atol=1e-4)


HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 32, 5, 2


def stack(rows: int, cols: int, format: str):
    made = torch.randn(EXPERTS, rows, cols, generator=torch.Generator().manual_seed(rows))
    options = {"blocksize": 32, "nested_blocksize": 0} if format == "mxfp4" else {}
    return nf4_torch.quantize(made, format=format, **options)


def gated(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def layer_of(format: str = "nf4", has_bias: bool = False):
    layer = torch.nn.Module()
    layer.expert_map = None
    layer.stacks = {
        "w13": stack(2 * INTERMEDIATE, HIDDEN, format),
        "w2": stack(HIDDEN, INTERMEDIATE, format),
    }
    for name, each in layer.stacks.items():
        names, _ = loading.register(layer, f"{name}_weight", each)
        setattr(layer, f"nf4_{name}", (names, WeightParts.of(each).spec))
        if has_bias:
            setattr(layer, f"{name}_bias", torch.randn(EXPERTS, each.shape[1]))
    return layer


def expected(layer, x, weights, ids, here=range(EXPERTS)):
    """Of the experts that are `here`, one token and one expert at a time."""
    w13, w2 = (values(layer.stacks[name]) for name in ("w13", "w2"))
    b13, b2 = (getattr(layer, f"{name}_bias", torch.zeros(EXPERTS, 1)) for name in ("w13", "w2"))
    y = torch.zeros_like(x)
    for token, (of_token, chosen) in enumerate(zip(weights, ids.tolist(), strict=True)):
        for share, expert in zip(of_token, chosen, strict=True):
            if expert in here:
                hidden = gated(w13[expert] @ x[token] + b13[expert])
                y[token] += share * (w2[expert] @ hidden + b2[expert])
    return y


def routed(tokens: int):
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    found = scores.topk(TOP_K)
    return torch.randn(tokens, HIDDEN, generator=generator), found.values, found.indices.int()


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize(("format", "has_bias"), [("nf4", False), ("mxfp4", True)])
def test_experts(tokens, format, has_bias):
    layer, (x, weights, ids) = layer_of(format, has_bias), routed(tokens)
    y = products.experts(layer, x, weights, ids, gated)
    torch.testing.assert_close(y, expected(layer, x, weights, ids), rtol=1e-4, atol=1e-3)


def test_experts_of_another_rank_add_nothing():
    layer, (x, weights, ids) = layer_of(), routed(6)
    layer.expert_map = torch.tensor([-1, 1, -1, 3, 4], dtype=torch.int32)
    y = products.experts(layer, x, weights, ids, gated)
    here = expected(layer, x, weights, ids, here=(1, 3, 4))
    assert not torch.equal(here, expected(layer, x, weights, ids))
    torch.testing.assert_close(y, here, rtol=1e-4, atol=1e-3)
