"""bitsandbytes on libnf4's kernels: the same results through its own functions and layers."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import nf4
import pytest
import torch_cases
from torch_cases import ALLOWED, error

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "bitsandbytes")

import bitsandbytes as bnb  # noqa: E402
import nf4.torch  # noqa: E402
import torch  # noqa: E402
from nf4.cli import doctor_bitsandbytes  # noqa: E402
from nf4.torch import bitsandbytes as backend  # noqa: E402
from nf4.torch.bitsandbytes import operators, replacements  # noqa: E402

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OPERATORS = ["gemm_4bit", "dequantize_4bit", "dequantize_4bit.out"]
FUNCTIONS = [
    "functional.dequantize_4bit",
    "autograd._functions.matmul_4bit",
    "matmul_4bit",
    "autograd._functions.MatMul4Bit.apply",
    "nn.modules.Linear4bit.forward",
    "nn.modules.has_avx512bf16",
]


@pytest.fixture
def served():
    yield backend.register()
    backend.unregister()


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


def test_gradients_through_matmul_4bit(served, monkeypatch):
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
    assert error(y, expected) <= ALLOWED["fp32"]
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
def test_scales_in_16_bits_are_cast(scales, names, grad, served):
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


def test_a_gpu_that_libnf4_cannot_use_stays_with_bitsandbytes(monkeypatch):
    found = nf4.device_info(0)
    unusable = dataclasses.replace(found, usable=False, reason="no kernel for sm_70")
    monkeypatch.setattr(nf4, "device_info", lambda index: unusable)
    monkeypatch.setattr(operators, "_usable_gpus", {})
    with pytest.warns(UserWarning, match="GPU 0 to bitsandbytes' own kernels: no kernel for sm_70"):
        assert not operators._usable_gpu(0)
    assert not operators._usable_gpu(0) and operators._usable_gpus == {0: False}


# ---- The entry point and nf4 doctor -----------------------------------------------------------


@pytest.fixture
def installed(tmp_path):
    """The environment of a process that finds nf4 as if pip had installed it."""
    notes = tmp_path / "libnf4-0.1.0.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text("Metadata-Version: 2.1\nName: libnf4\nVersion: 0.1.0\n")
    entry_points = (
        "[bitsandbytes.backends]\nnf4 = nf4._bitsandbytes:activate\n"
        "[torch.backends]\nnf4 = _nf4_quiet:hold_back\n"
    )
    (notes / "entry_points.txt").write_text(entry_points)
    path = [str(Path(nf4.__file__).parents[1]), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "NF4_BITSANDBYTES": "1"}


def doctor(environment) -> dict:
    result = subprocess.run(
        [sys.executable, "-m", "nf4", "doctor", "--json"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(result.stdout)["bitsandbytes"]


REGISTERED_FIRST = """
from nf4.torch import bitsandbytes as backend
backend.register()
import bitsandbytes
assert "nf4" in bitsandbytes.functional.dequantize_4bit.__code__.co_filename
backend.unregister()
assert "nf4" not in bitsandbytes.functional.dequantize_4bit.__code__.co_filename
"""
FAILING = """
from nf4.torch import bitsandbytes as backend
backend.replacements.replace = lambda module, *_: module.no_such_name
import bitsandbytes
assert backend.served() is None
"""


def run(code, environment) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


def test_registered_before_bitsandbytes_is_imported(installed):
    """The entry point registers, too, in the middle of the import; once is enough."""
    result = run(REGISTERED_FIRST, installed)
    assert result.returncode == 0, result.stderr


NO_KERNEL = """
import logging, torch
logging.getLogger("bitsandbytes.backends.cpu.ops").warning("before")
log = logging.getLogger("bitsandbytes.backends.cpu.ops")
log.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "none")
import bitsandbytes
log.warning("after")
log.warning("Failed to load CPU gemm_4bit_forward, for the second time")
"""


@pytest.mark.parametrize("switch, lines", [("1", 0), ("0", 1)])
def test_what_bitsandbytes_says_of_its_kernel_appears_where_it_means_something(
    switch, lines, installed
):
    result = run(NO_KERNEL, installed | {"NF4_BITSANDBYTES": switch})
    assert result.returncode == 0, result.stderr
    # bitsandbytes itself says so, too, on CPUs with AVX512-BF16.
    own = bnb.functional.has_avx512bf16() and find_spec("kernels") is None
    found = result.stderr.count("Failed to load CPU gemm_4bit_forward from kernels-community")
    assert found == lines * (1 + own)
    assert "before\n" in result.stderr and "after\n" in result.stderr
    assert "for the second time" in result.stderr


def test_it_appears_where_nothing_is_served(installed):
    failing = FAILING.replace("import bitsandbytes\n", NO_KERNEL + "\n", 1)
    result = run(failing, installed)
    assert result.returncode == 0, result.stderr
    assert "gemm_4bit_forward from kernels-community: none" in result.stderr


def test_whatever_goes_wrong_bitsandbytes_is_imported(installed):
    result = run(FAILING, installed)
    assert result.returncode == 0, result.stderr
    assert "libnf4 does not serve bitsandbytes" in result.stderr
    assert "AttributeError" in result.stderr and "no_such_name" in result.stderr


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


def test_doctor_says_what_is_served(installed):
    report = doctor(installed)
    assert report["active"] and report["reason"] is None
    assert list(report["operators"]) == OPERATORS and report["functions"] == FUNCTIONS
    off = doctor(installed | {"NF4_BITSANDBYTES": "0"})
    assert off == {"active": False, "reason": "NF4_BITSANDBYTES=0 is set"}


def test_doctor_says_why_nothing_is_served(monkeypatch):
    assert doctor_bitsandbytes.diagnose(None)["reason"] == "not installed"
    monkeypatch.setenv("NF4_BITSANDBYTES", "1")
    monkeypatch.setattr(doctor_bitsandbytes.metadata, "entry_points", lambda group: [])
    assert "not installed by pip" in doctor_bitsandbytes.diagnose("0.50.2")["reason"]
    monkeypatch.setattr(doctor_bitsandbytes, "_is_found", lambda: True)
    monkeypatch.setattr(doctor_bitsandbytes, "_PROBE", "raise ImportError('no such GPU')")
    report = doctor_bitsandbytes.diagnose("0.50.2")
    assert report["reason"] == "it cannot be imported: ImportError: no such GPU"
    monkeypatch.setattr(doctor_bitsandbytes, "_asked", lambda: (None, ""))
    old = doctor_bitsandbytes.diagnose("0.44.1")["reason"]
    assert old == "0.44.1 did not load libnf4; 0.50 and later do"
    (line,) = doctor_bitsandbytes.lines(report)
    assert line == f"bitsandbytes on its own kernels: {report['reason']}"


def test_doctor_in_words():
    report = {
        "active": True,
        "reason": None,
        "operators": {"gemm_4bit": ["cpu", "cuda"], "dequantize_4bit": ["cpu"]},
        "left_alone": {"dequantize_4bit.out": "bitsandbytes 0.45 has none"},
        "functions": ["functional.dequantize_4bit"],
    }
    assert doctor_bitsandbytes.lines(report) == [
        "bitsandbytes on libnf4's kernels on cpu and cuda: gemm_4bit",
        "on cpu: dequantize_4bit",
        "functional.dequantize_4bit replaced",
        "dequantize_4bit.out left alone: bitsandbytes 0.45 has none",
    ]
