"""Unsloth's fast_dequantize served by libnf4, against modules that are laid out as Unsloth's."""

from __future__ import annotations

import copy
import sys
import types

import nf4
import pytest
import torch_cases

pytestmark = pytest.mark.interop
torch_cases.require("torch", "bitsandbytes")

import bitsandbytes as bnb  # noqa: E402
import nf4.torch  # noqa: E402
import torch  # noqa: E402
from nf4.torch import _state, unsloth_fast_dequantize  # noqa: E402


def quantized(format="nf4", nested=True):
    torch.manual_seed(0)
    return bnb.functional.quantize_4bit(
        torch.randn(24, 64).bfloat16(), quant_type=format, compress_statistics=nested
    )


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_numbers_and_the_orientation(format, nested):
    packed, state = quantized(format, nested)
    expected = nf4.dequantize(_state.of_bitsandbytes(packed, state))
    found = unsloth_fast_dequantize(packed, state)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
    assert torch.equal(unsloth_fast_dequantize(packed.t(), state), expected.t())
    out = torch.empty(24, 64, dtype=torch.bfloat16)
    again = unsloth_fast_dequantize(packed, state, out=out, use_global_buffer=True)
    assert again is out and torch.equal(out, expected)


def test_no_number_is_looked_at(monkeypatch):
    """A GPU would have to be waited for, at every call."""
    packed, state = quantized()
    expected = unsloth_fast_dequantize(packed, state)
    monkeypatch.setattr(torch, "equal", None)
    monkeypatch.setattr(torch.Tensor, "item", None)
    found = unsloth_fast_dequantize(packed, state)
    monkeypatch.undo()
    assert torch.equal(found, expected)


def test_autograd_knows_of_what_is_written():
    packed, state = quantized()
    out = torch.zeros(24, 64, dtype=torch.bfloat16)
    x = torch.ones(24, 64, dtype=torch.bfloat16, requires_grad=True)
    y = x * out
    unsloth_fast_dequantize(packed, state, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_layout_for_cpus_is_refused():
    packed, state = quantized()
    state.packing_format_for_cpu = True
    with pytest.raises(nf4.InvalidArgument, match="in bitsandbytes' layout for CPUs"):
        unsloth_fast_dequantize(packed, state)


def test_a_dense_weight_is_returned():
    dense = torch.randn(3, 4)
    assert unsloth_fast_dequantize(dense) is dense


@pytest.mark.parametrize("out", [torch.empty(24, 64), torch.empty(64, 24, dtype=torch.bfloat16)])
def test_another_out_is_refused(out):
    packed, state = quantized()
    with pytest.raises(nf4.InvalidArgument, match="out is torch"):
        unsloth_fast_dequantize(packed, state, out=out)


@pytest.fixture
def unsloth(monkeypatch):
    """Two modules that share a function, one of which imported it by its name."""

    def fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False):
        return "Unsloth's own"

    utils = types.ModuleType("unsloth.kernels.utils")
    lora = types.ModuleType("unsloth.kernels.fast_lora")
    for module in (utils, lora):
        module.fast_dequantize = fast_dequantize
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return utils, lora


def test_the_patch_reaches_every_module(unsloth):
    names = ["unsloth.kernels.fast_lora", "unsloth.kernels.utils"]
    assert nf4.torch.patch_unsloth() == names
    assert nf4.torch.patch_unsloth() == []
    packed, state = quantized()
    expected = nf4.dequantize(_state.of_bitsandbytes(packed, state))
    for module in unsloth:
        assert torch.equal(module.fast_dequantize(packed.t(), state), expected.t())
        assert module.fast_dequantize(packed, quant_state=torch.ones(1)) == "Unsloth's own"


@pytest.fixture
def with_lora(unsloth):
    """Unsloth's matmul_lora, which calls its fast_dequantize."""
    utils, lora = unsloth

    def matmul_lora(X, W, W_quant, A, B, s, out=None):
        y = torch.matmul(X, utils.fast_dequantize(W, W_quant).t(), out=out)
        return y if A is None else y + s * ((X @ A.t().to(X.dtype)) @ B.t().to(X.dtype))

    utils.matmul_lora = lora.matmul_lora = matmul_lora
    nf4.torch.patch_unsloth()
    return lora, matmul_lora


@pytest.mark.parametrize("adapters", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (2, 3)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_with_its_adapter(adapters, shape, transposed, with_lora):
    lora, own = with_lora
    packed, state = quantized()
    rows, cols = (64, 24) if transposed else (24, 64)
    x = torch.randn(*shape, cols).bfloat16()
    a = b = None
    if adapters is not None:
        a, b = torch.randn(4, cols).to(adapters), torch.randn(4, rows).to(adapters).t()
    of_weight = packed.t() if transposed else packed, state
    found = lora.matmul_lora(x, *of_weight, a, b, 1.5)
    in_fp32 = (None, None) if a is None else (a.float(), b.float())
    expected = own(x.float(), of_weight[0], wide(state), *in_fp32, 1.5)
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    assert (found - expected).norm() < 1e-2 * expected.norm()


def wide(state):
    """The same weight, dequantized to float32."""
    made = copy.copy(state)
    made.dtype = torch.float32
    return made


def test_what_unsloth_still_multiplies(with_lora):
    """An `out`, and what autograd records."""
    lora, own = with_lora
    packed, state = quantized()
    x = torch.randn(5, 64).bfloat16()
    out = torch.empty(5, 24, dtype=torch.bfloat16)
    assert lora.matmul_lora(x, packed, state, None, None, None, out) is out
    assert torch.equal(out, own(x, packed, state, None, None, None))
    with pytest.raises(TypeError, match="unexpected keyword argument 'later'"):  # Unsloth's own
        lora.matmul_lora(x, packed, state, None, None, None, later=1)
    with pytest.raises(TypeError, match="matmul_lora.. takes"):
        lora.matmul_lora(x, packed, state, None, None, None, None, 1)
    a = torch.randn(4, 64).bfloat16().requires_grad_()
    b = torch.randn(24, 4).bfloat16()
    assert lora.matmul_lora(x, packed, state, a, b, 1.0).requires_grad
    with torch.no_grad():
        assert not lora.matmul_lora(x, packed, state, a, b, 1.0).requires_grad


def test_without_unsloth_there_is_nothing_to_patch():
    with pytest.raises(nf4.InvalidArgument, match="expected `import unsloth` before this call"):
        nf4.torch.patch_unsloth()
