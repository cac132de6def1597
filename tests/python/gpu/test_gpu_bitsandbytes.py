"""bitsandbytes on a GPU with nf4.torch in its place: bits, gradients, memory, graphs."""

from __future__ import annotations

import copy

import pytest
from gpu_cases import NEEDS_GPU

pytestmark = [
    pytest.mark.interop,
    pytest.mark.usefixtures("seeded"),
    NEEDS_GPU,
]
torch = pytest.importorskip("torch")

import nf4.torch  # noqa: E402
from nf4.torch import _kernels  # noqa: E402
from torch_cases import ALLOWED, error  # noqa: E402
from torch_gpu_cases import (  # noqa: E402
    COLS,
    DEVICE,
    DTYPES,
    ROWS,
    require_replays,
    settle,
    x_of,
)


@pytest.fixture
def bnb():
    return pytest.importorskip("bitsandbytes")


@pytest.fixture
def backend(bnb):
    from nf4.torch import bitsandbytes as backend

    yield backend
    backend.unregister()


def quantized(bnb, format="nf4", nested=True, dtype="bf16", shape=(ROWS, COLS)):
    return bnb.functional.quantize_4bit(
        x_of(*shape, dtype=dtype), quant_type=format, compress_statistics=nested
    )


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bitsandbytes_dequantizes_the_same_bits(format, nested, dtype, bnb, backend):
    packed, state = quantized(bnb, format, nested, dtype)
    theirs = bnb.functional.dequantize_4bit(packed, state)
    assert all("cuda" in devices for devices in backend.register().operators.values())
    integers = torch.int32 if dtype == "fp32" else torch.int16
    ours = bnb.functional.dequantize_4bit(packed, state)
    assert torch.equal(ours.view(integers), theirs.view(integers))
    out = torch.empty_like(theirs)
    bnb.functional.dequantize_4bit(packed, state, out=out)
    assert torch.equal(out.view(integers), theirs.view(integers))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("rows", [1, 8, 130])
def test_bitsandbytes_multiplies_as_well(nested, dtype, rows, bnb, backend, dense_gradients):
    packed, state = quantized(bnb, nested=nested, dtype=dtype)
    x, bias = x_of(rows, COLS, dtype=dtype, grad=True), x_of(ROWS, dtype=dtype)
    theirs = bnb.matmul_4bit(x, packed.t(), state, bias=bias)
    (their_grad,) = torch.autograd.grad(theirs.sum(), x)
    backend.register()
    ours = bnb.matmul_4bit(x, packed.t(), state, bias=bias)
    assert error(ours, theirs) <= 2 * ALLOWED[dtype]
    (our_grad,) = torch.autograd.grad(ours.sum(), x)
    assert torch.equal(our_grad, their_grad)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 130])
def test_a_layer_of_bitsandbytes_has_its_gradients(
    nested, dtype, storage, rows, bnb, backend, dense_gradients
):
    """Its forward and its Function are replaced in eager mode; many rows of fp32 stay as they
    are."""
    layer = bnb.nn.Linear4bit(
        COLS, ROWS, quant_type="nf4", compress_statistics=nested, quant_storage=storage,
        compute_dtype=x_of(1, dtype=dtype).dtype,
    ).to(DEVICE)  # fmt: skip
    x, grad_y = x_of(2, rows, COLS, dtype=dtype, grad=True), x_of(2, rows, ROWS, dtype=dtype)

    def results():
        y = layer(x)
        return y.detach(), *torch.autograd.grad(y, (x, layer.bias), grad_y)

    theirs = results()
    backend.register()
    ours = results()
    assert error(ours[0], theirs[0]) <= 2 * max(ALLOWED[dtype], 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(ours[1:], theirs[1:], strict=True))
    with torch.no_grad():
        assert torch.equal(layer(x), ours[0])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("rows", [1, 5, 130, 1024])
def test_gradients_that_need_no_dense_weight(nested, dtype, rows, bnb, backend, monkeypatch):
    """Those of layers and of bitsandbytes', where libnf4's own product is used for them."""
    out, cols = 384, 512
    packed, state = quantized(bnb, nested=nested, dtype=dtype, shape=(out, cols))
    dense = bnb.functional.dequantize_4bit(packed, state).double()
    x, grad_y = x_of(rows, cols, dtype=dtype, grad=True), x_of(rows, out, dtype=dtype)
    backend.register()
    monkeypatch.setattr(_kernels, "uses_fused_grad", lambda *_: True)
    monkeypatch.setattr(_kernels, "new_dense", None)
    found = [
        torch.autograd.grad(bnb.matmul_4bit(x, packed.t(), state), x, grad_y)[0] for _ in range(3)
    ]
    assert error(found[0], grad_y.double() @ dense) <= 2 * ALLOWED[dtype]
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "names", [("offset",), ("absmax",), ("code",), ("offset", "absmax", "code")]
)
def test_nested_scales_in_16_bits_are_cast(scales, names, bnb, backend):
    """As in a model that was .half()ed. bitsandbytes casts the offset alone."""
    packed, narrow = quantized(bnb, dtype="fp16")
    wide = copy.deepcopy(narrow)
    for name in names:
        part = narrow if name == "offset" else narrow.state2
        setattr(part, name, getattr(part, name).to(scales))
        setattr(wide if name == "offset" else wide.state2, name, getattr(part, name).float())
    x = x_of(3, COLS, dtype="fp16")
    theirs = bnb.matmul_4bit(x, packed, wide)
    backend.register()
    ours = bnb.matmul_4bit(x, packed, narrow)
    assert torch.equal(ours, bnb.matmul_4bit(x, packed, wide))
    assert error(ours, theirs) <= 2 * ALLOWED["fp16"]
    dense = bnb.functional.dequantize_4bit
    assert torch.equal(dense(packed, narrow), dense(packed, wide))


@pytest.mark.parametrize("rows", [1, 16, 17, 130])
def test_many_rows_of_fp32_stay_with_bitsandbytes(rows, bnb, backend):
    packed, state = quantized(bnb, dtype="fp32")
    x = x_of(rows, COLS, dtype="fp32")
    theirs = bnb.matmul_4bit(x, packed.t(), state)
    dense = bnb.functional.dequantize_4bit(packed, state).double()
    backend.register()
    ours = bnb.matmul_4bit(x, packed.t(), state)
    if rows > 16:
        assert torch.equal(ours, theirs)
    else:
        assert error(ours, x.double() @ dense.T) <= ALLOWED["fp32"]


def peak(model, x):
    """Bytes that a forward and a backward pass need beyond what was there."""
    for _ in range(2):
        settle()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x).sum().backward()
        x.grad = None
        found = torch.cuda.max_memory_allocated() - before
    return found


def test_training_takes_no_more_memory_than_bitsandbytes(bnb, backend):
    shape = (1024, 1024)
    layers = [
        bnb.nn.Linear4bit(*shape, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16)
        for _ in range(4)
    ]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    x = x_of(64, shape[1], grad=True)
    theirs = peak(model, x)
    backend.register()
    assert peak(model, x) <= theirs
    nf4.torch.convert(model)
    assert peak(model, x) <= theirs


def test_a_converted_model_in_a_graph(bnb):
    layer = bnb.nn.Linear4bit(COLS, ROWS, quant_type="nf4", compute_dtype=torch.bfloat16)
    model = torch.nn.Sequential(layer.to(DEVICE))
    x = x_of(4, COLS)
    theirs = model(x)
    assert nf4.torch.convert(model) == ["0"]
    assert error(model(x), theirs) <= 2 * ALLOWED["bf16"]
    require_replays(model)


def test_bitsandbytes_in_a_graph(bnb, backend):
    backend.register()
    layer = bnb.nn.Linear4bit(COLS, ROWS, quant_type="nf4", compute_dtype=torch.bfloat16)
    require_replays(layer.to(DEVICE))


@pytest.mark.parametrize("nested", [False, True])
def test_unsloths_function_in_a_graph(nested, bnb):
    packed, state = quantized(bnb, nested=nested)
    expected = nf4.torch.unsloth_fast_dequantize(packed, state)
    out, graph = torch.zeros_like(expected), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = nf4.torch.unsloth_fast_dequantize(packed, state)
        nf4.torch.unsloth_fast_dequantize(packed, state, out=out)
    graph.replay()
    assert torch.equal(made, expected) and torch.equal(out, expected)
