"""PEFT's LoRA layers over NF4Linear on a GPU: y and the gradients of x, A and B beside float64."""

from __future__ import annotations

import pytest
from gpu_cases import NEEDS_GPU

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded"), NEEDS_GPU]
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

import nf4  # noqa: E402
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


def matrices(dtype, m, rank, cols, rows):
    """grad_y, x, p and q; rows of grad_y and x are further apart than they are long, and those of
    grad_y begin at any element."""
    made = DTYPES[dtype]
    grad_y = torch.randn(m, rows + 3, device=DEVICE).to(made)[:, 1 : rows + 1]
    x = torch.randn(m, cols + 6, device=DEVICE).to(made)[:, :cols]
    p, q = (torch.randn(m, rank, device=DEVICE).to(made) for _ in range(2))
    return grad_y, x, p, q


def halves(grad_y, x, p, q):
    """dA and dB of a scale of 1.5."""
    return 1.5 * (q.double().t() @ x.double()), 1.5 * (grad_y.double().t() @ p.double())


@pytest.mark.parametrize("dtype", [*ALLOWED, "fp32"])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    ("m", "rank", "cols", "rows"),
    [(0, 8, 64, 48), (1, 16, 512, 384), (77, 8, 100, 33), (2048, 128, 1030, 520)],
)
def test_the_gradients_of_an_adapter(dtype, narrow, m, rank, cols, rows):
    """The same bits each time, and in a graph."""
    like = torch.empty(1, device=DEVICE, dtype=DTYPES[dtype] if narrow else torch.float32)
    given = matrices(dtype, m, rank, cols, rows)
    found = _fast.lora_grads(*given, like, like, 1.5)
    assert {each.dtype for each in found} == {like.dtype}
    require_near(found, halves(*given), ALLOWED.get(dtype, 2e-6) if narrow else 2e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = _fast.lora_grads(*given, like, like, 1.5)
    graph.replay()
    assert all(map(torch.equal, again, found))


@pytest.mark.parametrize("dtype", [*ALLOWED, "fp32"])
@pytest.mark.parametrize("of", ["own", "fp32"])
def test_lora_grad_is_the_same(dtype, of):
    """nf4.lora_grad, with outputs of its own and of the caller's, both and each alone, on another
    stream."""
    grad_y, x, p, q = matrices(dtype, 50, 16, 256, 192)
    like = torch.empty(1, device=DEVICE, dtype=DTYPES[dtype if of == "own" else of])
    expected = _fast.lora_grads(grad_y, x, p, q, like, like, 1.5)
    stream, wide = torch.cuda.Stream(), like.new_zeros(16, 300)
    stream.wait_stream(torch.cuda.current_stream())
    options = {"dtype": like.dtype, "stream": stream}
    both = nf4.lora_grad(x, grad_y, p, q, 1.5, **options)
    of_a = nf4.lora_grad(x, None, None, q, 1.5, out=[wide[:, :256], None], **options)
    of_b = nf4.lora_grad(None, grad_y, p, None, 1.5, **options)
    torch.cuda.current_stream().wait_stream(stream)
    assert of_a[1] is None and of_b[0] is None
    require_near(expected, halves(grad_y, x, p, q), ALLOWED.get(dtype, 2e-6))
    for found in (both, (of_a[0], of_b[1])):
        require_near(found, expected, 1e-6 if of == "fp32" else ALLOWED.get(dtype, 1e-6))
    assert all(map(torch.equal, both, expected)) and not wide[:, 256:].any()


def test_an_x_without_a_gradient(monkeypatch):
    """As that of a model's first layer: dA and dB are one call."""
    layer, made, grads = adapted("bf16", "fp32", 8), [], _fast.lora_grads
    monkeypatch.setattr(_fast, "lora_grads", lambda *each: (made.append(grads(*each)), made[-1])[1])
    x, grad_y = x_of(17, IN), x_of(17, OUT)
    layer(x).backward(grad_y)
    found = [half["default"].weight.grad for half in (layer.lora_A, layer.lora_B)]
    assert len(made) == 1 and all(map(torch.equal, made[0], found))
    require_near(found, reference(layer, x, grad_y)[2:], ALLOWED["bf16"])


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


def test_what_gradients_of_an_adapter_leave_to_torch():
    grad_y, x, p, q = (torch.randn(4, n, device=DEVICE).bfloat16() for n in (48, 64, 8, 8))
    a = b = torch.empty(1, device=DEVICE)
    given = {"grad_y": grad_y, "x": x, "p": p, "q": q, "a": a, "b": b}
    wide = torch.randn(4, 129, device=DEVICE).bfloat16()
    for change in (
        {"x": x.half()},
        {"grad_y": grad_y[:1].expand(4, 48)},
        {"x": x.t().contiguous().t()},
        {"x": torch._neg_view(x)},
        {"p": p[:3]},
        {"q": q[:, :7]},
        {"q": torch.cat([q, q], 1)[:, :8]},
        {"q": q.cpu()},
        {"p": wide, "q": wide},
        {"a": a.bfloat16()},
        {"a": a.half(), "b": b.half()},
        {"a": a.cpu(), "b": b.cpu()},
    ):
        assert _fast.lora_grads(*(given | change).values(), 1.5) is None
    assert _fast.lora_grads(*given.values(), "1.5") is None
    assert _fast.lora_grads(*given.values(), 1.5) is not None
