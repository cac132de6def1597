"""bitsandbytes on libnf4's kernels: the same results through its own functions and layers."""

from __future__ import annotations

import copy
import dataclasses

import nf4
import pytest
import torch_cases
from torch_cases import ALLOWED, error

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "bitsandbytes")

import bitsandbytes as bnb  # noqa: E402
import nf4.torch  # noqa: E402
import torch  # noqa: E402
from bitsandbytes_cases import DTYPES, FUNCTIONS, OPERATORS  # noqa: E402
from nf4.torch import bitsandbytes as backend  # noqa: E402
from nf4.torch.bitsandbytes import operators, replacements  # noqa: E402


def quantized(shape=(24, 64), format="nf4", nested=True, storage=torch.uint8, **options):
    return bnb.functional.quantize_4bit(
        torch.randn(shape), quant_type=format, compress_statistics=nested, quant_storage=storage,
        **options,
    )  # fmt: skip


def ours(packed, state) -> nf4.QuantizedTensor:
    from nf4.torch import _state

    return _state.of_bitsandbytes(packed, state)


def calls_of(monkeypatch):
    """Names of the calls into the library, as they are made."""
    from nf4.torch import _fast

    made = []
    for name in ("linear", "dequantize"):
        original = getattr(_fast, name)

        def noted(*arguments, _name=name, _original=original):
            made.append(_name)
            return _original(*arguments)

        monkeypatch.setattr(_fast, name, noted)
    return made


# ---- What is served --------------------------------------------------------------------


def test_registered_once_and_given_back():
    assert backend.served() is None
    before = bnb.functional.dequantize_4bit, bnb.nn.modules.has_avx512bf16
    first = backend.register()
    try:
        assert list(first.operators) == OPERATORS and first.functions == FUNCTIONS
        assert all("cpu" in devices for devices in first.operators.values())
        assert first.left_alone == {} and backend.register() is first is backend.served()
    finally:
        backend.unregister()
    assert (bnb.functional.dequantize_4bit, bnb.nn.modules.has_avx512bf16) == before
    backend.unregister()
    assert backend.served() is None


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_dequantize_is_bit_equal(format, nested, dtype, storage, served, monkeypatch):
    packed, state = quantized(format=format, nested=nested, storage=storage)
    state.dtype = DTYPES[dtype]
    expected = nf4.dequantize(ours(packed, state))
    made = calls_of(monkeypatch)
    found = bnb.functional.dequantize_4bit(packed, state)
    assert found.dtype == DTYPES[dtype] and torch.equal(found, expected)
    assert torch.equal(bnb.functional.dequantize_4bit(packed.t(), state), expected.t())
    out = torch.empty_like(expected)
    assert bnb.functional.dequantize_4bit(packed, state, out=out) is out
    assert torch.equal(out, expected)
    assert made == ["dequantize"] * 3


@pytest.mark.parametrize("shape", [(7, 11), (3, 100), (1, 1), (77,), (2, 3, 64)])
@pytest.mark.parametrize("nested", [False, True])
def test_dequantize_of_any_shape(shape, nested, served):
    """bitsandbytes' own kernels for CPUs are wrong, or refuse, where a row is no multiple of the
    blocksize."""
    packed, state = quantized(shape, nested=nested)
    found = bnb.functional.dequantize_4bit(packed, state)
    assert found.shape == shape and torch.equal(found, nf4.dequantize(ours(packed, state)))


@pytest.mark.parametrize("blocksize", [32, 64, 4096])
def test_dequantize_without_a_quant_state(blocksize, served):
    packed, state = quantized((16, 512), nested=False, blocksize=blocksize)
    out = torch.empty(16, 512)
    arguments = {"absmax": state.absmax, "blocksize": blocksize, "quant_type": "nf4"}
    bnb.functional.dequantize_4bit(packed, out=out, **arguments)
    assert torch.equal(out, nf4.dequantize(ours(packed, state)))


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_matmul_4bit(format, nested, dtype, with_bias, served, monkeypatch):
    packed, state = quantized(format=format, nested=nested)
    x = torch.randn(2, 5, 64).to(DTYPES[dtype])
    bias = torch.randn(24).to(DTYPES[dtype]) if with_bias else None
    expected = torch_cases.reference(x, ours(packed, state), bias)
    made = calls_of(monkeypatch)
    y = bnb.matmul_4bit(x, packed.t(), state, bias=bias)
    assert made == ["linear"] and y.dtype == x.dtype
    assert error(y, expected) <= ALLOWED[dtype]


def test_gradients_through_matmul_4bit(served, monkeypatch, dense_gradients):
    packed, state = quantized()
    dense = nf4.dequantize(ours(packed, state))
    x = torch.randn(5, 64, requires_grad=True)
    bias = torch.randn(24, requires_grad=True)
    grad = torch.randn(5, 24)
    made = calls_of(monkeypatch)
    bnb.matmul_4bit(x, packed.t(), state, bias=bias).backward(grad)
    assert made == ["linear", "dequantize"]
    assert error(x.grad, grad.double() @ dense.double()) <= ALLOWED["fp32"]
    assert error(bias.grad, grad.sum(0)) <= ALLOWED["fp32"]


def raw(tensor):
    """Bytes, which are equal where NaNs are."""
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("rows", [24, 32])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_a_layer_keeps_its_bytes(rows, training, storage, served):
    """bitsandbytes' own eval mode on CPUs with AVX512-BF16 changes them to another layout, and
    fails where the rows are no multiple of 32."""
    layer = bnb.nn.Linear4bit(
        64, rows, quant_type="nf4", compute_dtype=torch.float32, quant_storage=storage
    )
    layer = layer.to("cpu").train(training)
    before = {key: raw(value).clone() for key, value in layer.state_dict().items()}
    x = torch.randn(3, 64)
    with torch.no_grad():
        y = layer(x)
    weight = ours(layer.weight.data, layer.weight.quant_state)
    expected = torch_cases.reference(x, weight, layer.bias)
    in_bf16 = bnb.functional.has_avx512bf16() and rows == 32 and not training  # as bitsandbytes
    assert error(y, expected) <= ALLOWED["bf16" if in_bf16 else "fp32"]
    after = layer.state_dict()
    assert all(torch.equal(raw(after[key]), value) for key, value in before.items())


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_without_a_break(grad, served):
    layer = bnb.nn.Linear4bit(64, 24, quant_type="nf4", compute_dtype=torch.float32).to("cpu")
    x = torch.randn(3, 64, requires_grad=grad)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    packed, state = layer.weight.data, layer.weight.quant_state
    dequantize = torch.compile(
        lambda p: bnb.functional.dequantize_4bit(p, state), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(dequantize(packed), nf4.dequantize(ours(packed, state)))


def test_quantize_stays_bitsandbytes_own():
    dense = torch.randn(8, 64)
    before = bnb.functional.quantize_4bit(dense, quant_type="nf4")[0]
    backend.register()
    try:
        assert torch.equal(bnb.functional.quantize_4bit(dense, quant_type="nf4")[0], before)
    finally:
        backend.unregister()


def test_an_out_of_another_shape_is_refused(served):
    packed, state = quantized(nested=False)
    for out in (torch.empty(24, 63), torch.empty(24, 64).half()):
        with pytest.raises(nf4.InvalidArgument, match="out is torch"):
            bnb.functional.dequantize_4bit(packed, state, out=out)
    with pytest.raises(nf4.InvalidArgument, match="out is not contiguous"):
        bnb.functional.dequantize_4bit(packed, state, out=torch.empty(64, 24).t())


# ---- Scales in 16 bits, as a model that was .half()ed has them ---------------------------


SCALES = {
    "offset": ("offset",),
    "nested absmax": ("absmax",),
    "nested code": ("code",),
    "all": ("offset", "absmax", "code"),
}


def narrowed(state, names, dtype):
    """The state with scales in this dtype, and one with the same numbers in float32."""
    narrow, wide = copy.deepcopy(state), copy.deepcopy(state)
    for name in names:
        flat_or_offset = not state.nested or name == "offset"
        holders = (narrow, wide) if flat_or_offset else (narrow.state2, wide.state2)
        rounded = getattr(holders[0], name).to(dtype)
        setattr(holders[0], name, rounded)
        setattr(holders[1], name, rounded.float())
    return narrow, wide


@pytest.mark.parametrize("scales", ["bf16", "fp16"])
@pytest.mark.parametrize("names", [*SCALES.values(), None], ids=[*SCALES, "flat absmax"])
@pytest.mark.parametrize("grad", [False, True])
def test_scales_in_16_bits_are_cast(scales, names, grad, served, dense_gradients):
    packed, state = quantized(nested=names is not None)
    narrow, wide = narrowed(state, names or ("absmax",), DTYPES[scales])
    x, bias = torch.randn(5, 64, requires_grad=grad), torch.randn(24)
    found, expected = (bnb.matmul_4bit(x, packed.t(), each, bias=bias) for each in (narrow, wide))
    assert torch.equal(found, expected)
    if grad:
        of_found, of_expected = (torch.autograd.grad(y.sum(), x) for y in (found, expected))
        assert torch.equal(*of_found, *of_expected)
    dense = bnb.functional.dequantize_4bit(packed, narrow)
    assert torch.equal(dense, bnb.functional.dequantize_4bit(packed, wide))
    if names in (None, ("offset",)):  # an out of others is bitsandbytes' own to compute
        out = bnb.functional.dequantize_4bit(packed, narrow, out=torch.empty(24, 64))
        assert torch.equal(out, dense)


@pytest.mark.parametrize("scales", ["bf16", "fp16"])
@pytest.mark.parametrize("nested", [False, True])
def test_they_are_cast_as_bitsandbytes_casts_them(scales, nested):
    """Of nested scales it casts the offset, and reads the others as if they were float32."""
    packed, state = quantized(nested=nested)
    narrow, _ = narrowed(state, ("offset" if nested else "absmax",), DTYPES[scales])
    x = torch.randn(5, 64)
    theirs = bnb.functional.dequantize_4bit(packed, narrow), bnb.matmul_4bit(x, packed, narrow)
    backend.register()
    try:
        ours = bnb.functional.dequantize_4bit(packed, narrow), bnb.matmul_4bit(x, packed, narrow)
    finally:
        backend.unregister()
    assert torch.equal(ours[0], theirs[0])
    assert error(ours[1], theirs[1]) <= ALLOWED["fp32"]


@pytest.mark.parametrize("names", [*SCALES.values(), None], ids=[*SCALES, "flat absmax"])
def test_a_layer_made_from_them_has_float32(names):
    packed, state = quantized(nested=names is not None)
    narrow, wide = narrowed(state, names or ("absmax",), torch.float16)
    weights = [ours(packed, each) for each in (narrow, wide)]
    layers = [nf4.torch.NF4Linear.from_quantized(each) for each in weights]
    x = torch.randn(5, 64)
    assert torch.equal(layers[0](x), layers[1](x))
    found = nf4.torch.unsloth_fast_dequantize(packed, narrow)
    assert torch.equal(found, nf4.dequantize(weights[1]))


# ---- What is not --------------------------------------------------------------------------


def test_an_operator_with_other_arguments_is_left_alone(monkeypatch):
    arguments, make = operators.OPERATORS["gemm_4bit"]
    monkeypatch.setitem(operators.OPERATORS, "gemm_4bit", (arguments[:-1], make))
    monkeypatch.setitem(operators.OPERATORS, "gemm_5bit", (arguments, make))
    monkeypatch.setattr(backend, "_version", lambda: "0.45.0")
    before = bnb.functional.dequantize_4bit
    with pytest.warns(UserWarning, match="libnf4 does not serve gemm_"):
        served = backend.register()
    try:
        assert list(served.operators) == OPERATORS[1:] and served.functions == []
        assert bnb.functional.dequantize_4bit is before
        assert "bitsandbytes 0.45.0 takes other arguments" in served.left_alone["gemm_4bit"]
        missing = "bitsandbytes 0.45.0 has none; 0.50 and later have"
        assert served.left_alone["gemm_5bit"] == missing
    finally:
        backend.unregister()


def test_what_cannot_be_done_is_undone(monkeypatch):
    def fail(*_arguments):
        raise RuntimeError("no functions today")

    monkeypatch.setattr(replacements, "replace", fail)
    with pytest.raises(RuntimeError, match="no functions today") as caught:
        backend.register()
    made = calls_of(monkeypatch)
    assert backend.served() is None
    packed, state = quantized((8, 64), nested=False)
    assert bnb.functional.dequantize_4bit(packed, state).shape == (8, 64) and made == []
    assert caught.tb  # which keeps what was registered, unless it was undone


def test_a_gpu_that_libnf4_cannot_use_stays_with_bitsandbytes(monkeypatch):
    found = nf4.device_info(0)
    unusable = dataclasses.replace(found, usable=False, reason="no kernel for sm_70")
    monkeypatch.setattr(nf4, "device_info", lambda index: unusable)
    monkeypatch.setattr(operators, "_usable_gpus", {})
    with pytest.warns(UserWarning, match="GPU 0 to bitsandbytes' own kernels: no kernel for sm_70"):
        assert not operators._usable_gpu(0)
    assert not operators._usable_gpu(0) and operators._usable_gpus == {0: False}
