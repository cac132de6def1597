"""Products on a GPU in the way that the library expects to be faster: by its kernels, by
bitsandbytes', or by a dense weight. Blocks of 32 go to a dense weight on every GPU."""

from __future__ import annotations

import pytest
from gpu_cases import NEEDS_GPU

pytestmark = [
    pytest.mark.interop,
    pytest.mark.usefixtures("seeded"),
    NEEDS_GPU,
]
torch = pytest.importorskip("torch")

import nf4  # noqa: E402
import nf4.torch  # noqa: E402
from nf4.torch import Int4Linear, NF4Linear, _kernels, _paths  # noqa: E402
from nf4.torch._weight import WeightParts  # noqa: E402
from torch_cases import ALLOWED, error  # noqa: E402
from torch_gpu_cases import DEVICE, DTYPES, x_of  # noqa: E402

ROWS, COLS = 512, 1024
LAYERS = {
    "blocks of 32": lambda linear: NF4Linear.from_linear(linear, blocksize=32),
    "blocks of 64": NF4Linear.from_linear,
    "gptq": lambda linear: Int4Linear.from_linear(linear, layout="gptq"),
    "groups of 32": lambda linear: Int4Linear.from_linear(linear, layout="gptq", group_size=32),
}


def layer_of(kind, dtype="bf16", bias=False, device=DEVICE):
    return LAYERS[kind](torch.nn.Linear(COLS, ROWS, bias, device=device, dtype=DTYPES[dtype]))


def expected(layer, x):
    y = x.double() @ layer.dequantize("fp32").double().T
    return y if layer.bias is None else y + layer.bias.double()


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_products(kind, dtype, bias):
    layer = layer_of(kind, dtype, bias)
    for m in (1, 16, 17, 300):
        x = x_of(m, COLS + 8, dtype=dtype)[:, :COLS]
        with torch.no_grad():
            assert error(layer(x), expected(layer, x)) <= ALLOWED[dtype]
            flat = torch.ops.nf4.linear if isinstance(layer, NF4Linear) else None
            if flat is not None:
                y = flat(x, layer.bias, *layer.parts().arguments())
                assert error(y, expected(layer, x)) <= ALLOWED[dtype]


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients(kind):
    layer = layer_of(kind, bias=True)
    for m in (4, 300):
        x, grad_y = x_of(m, COLS, grad=True), x_of(m, ROWS)
        layer(x).backward(grad_y)
        of_x = grad_y.double() @ layer.dequantize("fp32").double()
        assert error(x.grad, of_x) <= 2 * ALLOWED["bf16"]
        assert error(layer.bias.grad, grad_y.double().sum(0)) <= 2 * ALLOWED["bf16"]
        layer.bias.grad = None


def test_compiled_and_captured():
    layer = layer_of("blocks of 32", bias=True)
    compiled = torch.compile(layer, dynamic=True)
    with torch.inference_mode():
        for m in (1, 300):
            x = x_of(m, COLS)
            assert error(compiled(x), expected(layer, x)) <= ALLOWED["bf16"]
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                y = layer(x)
            x.copy_(x_of(m, COLS))
            graph.replay()
            assert torch.equal(y, layer(x))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_on_another_device_than_the_current_one():
    layer = layer_of("blocks of 32", device="cuda:1")
    x = x_of(300, COLS, device="cuda:1")
    with torch.no_grad():
        assert error(layer(x), expected(layer, x)) <= ALLOWED["bf16"]
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_experts(dtype, monkeypatch):
    stack = torch.randn(4, 64, 128, device=DEVICE, dtype=DTYPES[dtype])
    weight = WeightParts.of(nf4.torch.quantize(stack))
    ends = torch.tensor([600, 601, 601, 1400], device=DEVICE, dtype=torch.int32)
    x = x_of(1400, 128, dtype=dtype)
    dense = nf4.torch.dequantize(weight.quantized(), "fp32").double()
    reference = torch.cat([x[a:b].double() @ dense[e].T for e, (a, b) in enumerate(
        [(0, 600), (600, 601), (601, 601), (601, 1400)])])  # fmt: skip
    for way in (False, True):
        monkeypatch.setattr(_paths, "_is_grouped_dense", lambda *_, way=way: way)
        y = _kernels_of_experts(x, ends, weight, way)
        assert error(y, reference) <= ALLOWED[dtype]


def _kernels_of_experts(x, ends, weight, dense):
    from nf4.torch._operators_grouped import _general_linear

    assert _paths.grouped_prefers_dense(x, None, weight, False) == dense
    return _general_linear(x, ends, None, None, weight)


# ---- bitsandbytes' layers ----------------------------------------------------------------


@pytest.fixture
def bnb():
    found = pytest.importorskip("bitsandbytes")
    from nf4.torch import bitsandbytes as backend

    backend.register()
    yield found
    backend.unregister()


def linear4bit(bnb, blocksize, dtype, bias=False):
    layer = bnb.nn.Linear4bit(COLS, ROWS, bias, DTYPES[dtype], True, "nf4")
    weight = x_of(ROWS, COLS, dtype=dtype)
    options = {"requires_grad": False, "quant_type": "nf4", "blocksize": blocksize}
    layer.weight = bnb.nn.Params4bit(weight.cpu(), **options)
    layer.to(DTYPES[dtype])
    return layer.to(DEVICE)


@pytest.mark.parametrize("blocksize", [32, 64])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_drop_in_beside_bitsandbytes_itself(blocksize, dtype, bnb):
    from nf4.torch import bitsandbytes as backend
    from nf4.torch.bitsandbytes import own_kernels

    layer = linear4bit(bnb, blocksize, dtype, bias=True)
    dense = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    for m in (1, 4, 16, 32, 300):
        x, grad_y = x_of(m, COLS, dtype=dtype), x_of(m, ROWS, dtype=dtype)
        reference = x.double() @ dense.double().T + layer.bias.double()
        for known in (True, False):
            if not known:
                own_kernels.give_back()
            given = x.clone().requires_grad_()
            y = layer(given)
            y.backward(grad_y)
            assert error(y, reference) <= 2 * ALLOWED[dtype]
            assert error(given.grad, grad_y.double() @ dense.double()) <= 2 * ALLOWED[dtype]
            with torch.no_grad():
                assert error(layer(x), reference) <= 2 * ALLOWED[dtype]
        backend.unregister()
        theirs = layer(x)
        backend.register()
        assert error(theirs, reference) <= 2 * ALLOWED[dtype]


def test_bitsandbytes_own_kernel_is_called_where_it_is_faster(bnb, monkeypatch):
    """y has its bits. In blocks of 32 libnf4 has no kernel that is fast for one row of x."""
    from nf4.torch import bitsandbytes as backend
    from nf4.torch.bitsandbytes import own_kernels

    layer, x = linear4bit(bnb, 32, "bf16"), x_of(1, COLS)
    assert own_kernels._own, "unknown to libnf4: bitsandbytes.backends.cuda.ops"
    with torch.no_grad():
        ours = layer(x)
        converted = NF4Linear.from_bitsandbytes(layer)(x)
        backend.unregister()
        theirs = layer(x)
        assert torch.equal(ours, theirs) and torch.equal(converted, theirs)
        assert _kernels.peer is None
        assert error(NF4Linear.from_bitsandbytes(layer)(x), theirs) <= 2 * ALLOWED["bf16"]


def test_a_peft_layer(bnb):
    peft = pytest.importorskip("peft")
    for base in (linear4bit(bnb, 32, "bf16"), layer_of("blocks of 32")):
        model = torch.nn.Sequential(base)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["0"]))
        lora = adapted.base_model.model[0]
        with torch.no_grad():
            lora.lora_B["default"].weight.normal_()
        a, b = lora.lora_A["default"].weight, lora.lora_B["default"].weight
        for m in (1, 300):
            x = x_of(m, COLS, grad=True)
            with torch.autocast(DEVICE, torch.bfloat16):
                y = adapted(x)
            base_y = base(x.detach()).double()
            scale = lora.scaling["default"]
            reference = base_y + scale * x.double() @ a.double().T @ b.double().T
            assert error(y, reference) <= 4 * ALLOWED["bf16"]
            y.float().sum().backward()
            assert a.grad is not None and x.grad is not None
