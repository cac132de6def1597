"""Which of bitsandbytes' functions are replaced, and given back."""

from __future__ import annotations

import functools

import pytest
import torch_cases
from torch_cases import ALLOWED, IN, error

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "bitsandbytes", "_nf4_fast")

import bitsandbytes as bnb  # noqa: E402
import torch  # noqa: E402
from bitsandbytes_cases import (  # noqa: E402
    layer,
)
from nf4.cli import doctor_bitsandbytes  # noqa: E402
from nf4.torch import _fast  # noqa: E402
from nf4.torch import bitsandbytes as backend  # noqa: E402
from nf4.torch.bitsandbytes import replacements  # noqa: E402

if not _fast.registered:
    pytest.skip("this torch has not what C++ needs", allow_module_level=True)

MatMul4Bit = bnb.autograd._functions.MatMul4Bit
FORWARD = "nn.modules.Linear4bit.forward"


# ---- Which functions are known ----------------------------------------------------------


def test_given_back(calls):
    owners = {bnb: "matmul_4bit", bnb.autograd._functions: "matmul_4bit",
              bnb.nn.Linear4bit: "forward", bnb.functional: "dequantize_4bit"}  # fmt: skip
    before = {owner: vars(owner)[name] for owner, name in owners.items()}
    backend.register()
    assert all(vars(owner)[name] is not before[owner] for owner, name in owners.items())
    assert "apply" in vars(MatMul4Bit)
    made, x = layer(), torch.randn(3, IN)
    kept, _ = made.forward, made(x)
    backend.unregister()
    kept(x)
    assert calls.count == 1
    assert all(vars(owner)[name] is before[owner] for owner, name in owners.items())
    assert "apply" not in vars(MatMul4Bit)


@pytest.mark.parametrize(
    "changed, alone",
    [
        ("nn.modules.Linear4bit.forward", {"nn.modules.Linear4bit.forward"}),
        ("autograd._functions.MatMul4Bit.backward", set(replacements.RELIES_ON)
         - {"functional.dequantize_4bit"}),
    ],
)  # fmt: skip
def test_a_function_of_unknown_source_is_left_alone(changed, alone, monkeypatch, calls):
    monkeypatch.setitem(replacements.KNOWN, changed, ())
    monkeypatch.setattr(backend, "_version", lambda: "0.99.0")
    with pytest.warns(UserWarning, match="libnf4 leaves") as caught:
        served = backend.register()
    try:
        assert len(caught) == 1
        assert set(served.left_alone) == alone and alone.isdisjoint(served.functions)
        assert set(served.operators) and "functional.dequantize_4bit" in served.functions
        made, x = layer(), torch.randn(3, IN)
        made(x)
        assert calls.count == (len(alone) > 1)
    finally:
        backend.unregister()
    (line, *_) = served.left_alone.values()
    assert (
        line == f"{changed} is of bitsandbytes 0.99.0, whose source is not that of 0.50.0 to 0.50.2"
    )
    report = {"active": True, "reason": None, **served._asdict()}
    lines = doctor_bitsandbytes.lines(report)
    assert f"nn.modules.Linear4bit.forward left alone: {line}" in lines


# ---- Patches of somebody else's -----------------------------------------------------------


def doubled(original):
    @functools.wraps(original)
    def patch(*arguments, **named):
        return 2 * original(*arguments, **named)

    return patch


@pytest.fixture
def patches(monkeypatch):
    """Patches made before; what is registered goes before they do."""
    yield monkeypatch
    backend.unregister()


def test_a_wrapper_of_a_known_function_is_left_alone(patches):
    made, x = layer(), torch.randn(3, IN)
    expected = 2 * made(x)
    patch = doubled(bnb.nn.Linear4bit.forward)
    patches.setattr(bnb.nn.Linear4bit, "forward", patch)
    with pytest.warns(UserWarning, match="libnf4 leaves nn.modules.Linear4bit.forward alone"):
        served = backend.register()
    assert bnb.nn.Linear4bit.forward is patch and list(served.left_alone) == [FORWARD]
    assert error(made(x), expected) <= ALLOWED["fp32"]


def test_a_patch_of_what_layers_call_is_left_alone(patches):
    made, x = layer(), torch.randn(3, IN)
    expected = 2 * made(x)
    patch = doubled(bnb.matmul_4bit)
    patches.setattr(bnb, "matmul_4bit", patch)
    with pytest.warns(UserWarning, match="libnf4 leaves matmul_4bit, nn.modules.Linear4bit"):
        served = backend.register()
    line = "matmul_4bit is not autograd._functions.matmul_4bit, but a patch"
    assert served.left_alone == {"matmul_4bit": line, FORWARD: line}
    assert bnb.matmul_4bit is patch
    assert error(made(x), expected) <= ALLOWED["fp32"]


def test_a_patched_apply_is_left_alone(patches):
    made, x = layer(), torch.randn(3, IN, requires_grad=True)
    expected = 2 * made(x)
    patches.setattr(MatMul4Bit, "apply", doubled(MatMul4Bit.apply), raising=False)
    with pytest.warns(UserWarning, match="MatMul4Bit.apply is not torch.autograd.Function's"):
        backend.register()
    assert error(made(x), expected) <= ALLOWED["fp32"]


def test_a_later_patch_of_what_layers_call_is_called(patches):
    made, x = layer(), torch.randn(3, IN)
    backend.register()
    expected = 2 * made(x)
    with patches.context() as patched:
        patched.setattr(bnb, "matmul_4bit", doubled(bnb.matmul_4bit))
        assert torch.equal(made(x), expected)
    assert torch.equal(2 * made(x), expected)


@pytest.mark.parametrize("patched", ["forward", "matmul_4bit", "dequantize_4bit", "apply"])
def test_unregister_leaves_later_patches(patched):
    owner = {"forward": bnb.nn.Linear4bit, "matmul_4bit": bnb, "apply": MatMul4Bit,
             "dequantize_4bit": bnb.functional}[patched]  # fmt: skip
    original = vars(owner).get(patched)
    backend.register()
    patch = doubled(getattr(owner, patched))
    setattr(owner, patched, patch)
    backend.unregister()
    found = vars(owner)[patched]
    if original is None:
        delattr(owner, patched)
    else:
        setattr(owner, patched, original)
    assert found is patch
