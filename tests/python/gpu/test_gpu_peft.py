"""PEFT's LoRA layers over NF4Linear on a GPU: y and the gradients of x, A and B beside float64."""

from __future__ import annotations

import pytest
from gpu_cases import NEEDS_GPU

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded"), NEEDS_GPU]
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

from nf4.torch import _fast  # noqa: E402
from nf4.torch.peft import layers  # noqa: E402
from torch_gpu_cases import DEVICE, DTYPES, layer_of, x_of  # noqa: E402

# As on the CPU: sums may cancel, and p, q, A and B are rounded to the dtype of x.
ALLOWED = {"fp16": 3e-3, "bf16": 2e-2}
SHAPE = OUT, IN = 384, 512


def adapted(dtype, adapters, rank):
    model = torch.nn.Sequential(layer_of(dtype, shape=SHAPE).requires_grad_(False))
    config = peft.LoraConfig(r=rank, lora_alpha=12, target_modules=["0"])
    made = peft.get_peft_model(model, config)
    layer = made.base_model.model[0]
    for half in (layer.lora_A, layer.lora_B):
        weight = half["default"].weight
        weight.data = (0.2 * torch.randn_like(weight)).to(DEVICE, DTYPES[adapters])
    return layer


def reference(layer, x, grad_y):
    """y, dX, dA, dB."""
    base = layer.base_layer
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    weight, scale = base.dequantize("fp32").double(), layer.scaling["default"]
    x, grad_y = x.detach().double(), grad_y.double()
    p, q = x @ a.t(), grad_y @ b
    y = x @ weight.t() + base.bias.double() + scale * (p @ b.t())
    return y, grad_y @ weight + scale * (q @ a), scale * (q.t() @ x), scale * (grad_y.t() @ p)


def require_near(found, expected, allowed):
    for each, other in zip(found, expected, strict=True):
        assert each.shape == other.shape
        assert (each.double() - other).norm() <= allowed * other.norm()


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 300])
@pytest.mark.parametrize("rank", [8, 16])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer_with_its_adapter(dtype, narrow, rows, rank, autocast, monkeypatch):
    """One product, but for fp32 adapters beside fp16 without autocast."""
    layer = adapted(dtype, dtype if narrow else "fp32", rank)
    x, grad_y = x_of(rows, IN, dtype=dtype, grad=True), x_of(rows, OUT, dtype=dtype)
    inputs = [x, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    made, fused = [], layers.fused_forward
    monkeypatch.setattr(
        layers, "fused_forward", lambda *each: (made.append(fused(*each)), made[-1])[1]
    )
    with torch.autocast(DEVICE, DTYPES[dtype], enabled=autocast):
        y = layer(x)
    assert (made[0] is not None) == (narrow or autocast or dtype == "bf16")
    grads = torch.autograd.grad(y, inputs, grad_y)
    assert [each.dtype for each in (y, *grads)] == [x.dtype, *(each.dtype for each in inputs)]
    require_near((y, *grads), reference(layer, x, grad_y), ALLOWED[dtype])


@pytest.mark.parametrize("dtype", ALLOWED)
def test_the_gradient_of_a_sum_under_autocast(dtype):
    layer = adapted(dtype, dtype, 8)
    x = x_of(17, IN, dtype=dtype, grad=True)
    y = layer(x)
    with torch.autocast(DEVICE, torch.bfloat16):
        (grad,) = torch.autograd.grad(y.sum(), x)
    expected = reference(layer, x, torch.ones_like(y))[1]
    require_near([grad], [expected], ALLOWED[dtype])


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("m", "rank", "cols"), [(1, 16, 512), (77, 8, 100), (2048, 128, 1030)])
def test_the_gradient_of_an_adapters_half(dtype, narrow, m, rank, cols):
    """Rows of x are further apart than they are long; the same bits each time, and in a graph."""
    made = DTYPES[dtype]
    like = torch.empty(1, device=DEVICE, dtype=made if narrow else torch.float32)
    p = torch.randn(m, rank, device=DEVICE).to(made)
    x = torch.randn(m, cols + 6, device=DEVICE).to(made)[:, :cols]
    found = _fast.adapter_grad(p, x, 1.5, like)
    assert found.dtype == like.dtype
    require_near([found], [1.5 * (p.double().t() @ x.double())], ALLOWED[dtype] if narrow else 2e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = _fast.adapter_grad(p, x, 1.5, like)
    graph.replay()
    assert torch.equal(again, found)


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (600,)])
@pytest.mark.parametrize("fused", [False, True])
def test_all_gradients_in_one_call(dtype, narrow, shape, fused):
    layer = adapted(dtype, dtype if narrow else "fp32", 16)
    base, x, grad_y = (
        layer.base_layer,
        x_of(*shape, IN, dtype=dtype),
        x_of(*shape, OUT, dtype=dtype),
    )
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    scale = layer.scaling["default"]
    _, p = _fast.linear_adapted(x, None, base.parts(), a, b, scale)
    found = _fast.adapted_grads(grad_y, x, p, base.parts(), a, b, scale, fused)
    assert [each.dtype for each in found] == [x.dtype, a.dtype, b.dtype]
    flat = reference(layer, x.view(-1, IN), grad_y.view(-1, OUT))
    require_near(found, (flat[1].view(x.shape), *flat[2:]), ALLOWED[dtype])
    again = _fast.adapted_grads(grad_y, x, p, base.parts(), a, b, scale, fused)
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("rows", [17, 1100])
def test_one_call_is_all_of_a_layers_backward_pass(rows, monkeypatch):
    """With a dense weight for many rows."""
    layer, made, grads = adapted("bf16", "fp32", 8), [], _fast.adapted_grads
    monkeypatch.setattr(
        _fast, "adapted_grads", lambda *each: (made.append(grads(*each)), made[-1])[1]
    )
    x = x_of(rows, IN, grad=True)
    layer(x).backward(x_of(rows, OUT))
    parameters = (x, layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    assert len(made) == 1 and all(map(torch.equal, made[0], (each.grad for each in parameters)))


def test_what_an_adapters_gradient_leaves_to_torch():
    p, x = (torch.randn(4, cols, device=DEVICE).bfloat16() for cols in (8, 64))
    like = torch.empty(1, device=DEVICE)
    for arguments in (
        (p.float(), x.float(), 1.5, like),
        (p, x.half(), 1.5, like),
        (p, x[:1].expand(4, 64), 1.5, like),
        (p[:3], x, 1.5, like),
        (p[:0], x[:0], 1.5, like),
        (p, x, 1.5, like.half()),
        (p, x, 1.5, like.cpu()),
    ):
        assert _fast.adapter_grad(*arguments) is None
