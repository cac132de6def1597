"""Which of PEFT's functions are replaced, and when."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch_cases
import warm

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "served")]
torch_cases.require("torch", "bitsandbytes", "peft", "_nf4_fast")

import peft  # noqa: E402
import torch  # noqa: E402
from nf4.torch import peft as nf4_peft  # noqa: E402
from nf4.torch._import_watch import is_loaded  # noqa: E402
from peft_cases import IN, pair, require_equal, results  # noqa: E402


def test_given_back_and_taken_again(fused):
    ours = pair("NF4Linear")[0]
    x = torch.randn(3, IN)
    before = results(ours, x)
    nf4_peft.unregister()
    try:
        assert nf4_peft.served() == ([], [])
        own = results(ours, x)
        assert fused.count == 1
    finally:
        again = nf4_peft.register()
    require_equal(own, before, 2e-6)
    assert results(ours, x)[0].equal(before[0]) and fused.count == 2
    assert again.left_alone == [] and len(again.functions) >= 8


def test_bitsandbytes_on_its_own_kernels(fused):
    from nf4.torch import bitsandbytes as backend

    ours, theirs = pair("Linear4bit")
    backend.unregister()
    x = torch.randn(3, IN)
    require_equal(results(ours, x), results(theirs, x), 1e-5)
    assert fused.count == 0


def test_an_unknown_source_is_left_alone(monkeypatch):
    nf4_peft.unregister()
    try:
        with monkeypatch.context() as patch:
            forward = peft.tuners.lora.layer.Linear.forward
            patch.setattr(
                peft.tuners.lora.layer.Linear, "forward", lambda *a, **k: forward(*a, **k)
            )
            found = nf4_peft.register()
            assert found.left_alone == ["peft.tuners.lora.layer.Linear.forward"]
            nf4_peft.unregister()
    finally:
        nf4_peft.register()


@pytest.mark.parametrize("first", ["nf4.torch", "peft"])
def test_in_any_order_of_imports(first):
    second = {"nf4.torch": "peft", "peft": "nf4.torch"}[first]
    code = (
        f"import {first}, {second}, sys, peft.tuners.lora.bnb; "
        "from nf4.torch import peft as ours; found = ours.served(); "
        "print(len([each for each in found.functions if 'tuners.lora' in each]), found.left_alone)"
    )
    made = warm.run(code)
    assert made.returncode == 0, made.stderr
    count, left_alone = made.stdout.strip().splitlines()[-1].split(maxsplit=1)
    assert int(count) >= 6 and left_alone == "[]", made.stdout


def test_an_error_does_not_break_an_import(monkeypatch):
    def failing(*_):
        raise KeyError("no such name")

    monkeypatch.setattr(nf4_peft.replacements, "replace", failing)
    with pytest.warns(UserWarning, match="libnf4 does not serve peft.tuners.lora.bnb: KeyError"):
        nf4_peft._loaded("peft.tuners.lora.bnb")


class OldFinder:
    """Has no find_spec, as those before Python 3.4."""


class AskingFinder:
    """Asks all others, as those do that wrap a loader."""

    asks = False

    def find_spec(self, name, path, target=None):
        if self.asks or not name.startswith("peft.tuners.lora"):
            return None
        self.asks = True
        try:
            return importlib.util.find_spec(name)
        finally:
            self.asks = False


@pytest.mark.parametrize("finder", [OldFinder, AskingFinder])
def test_other_finders(finder, monkeypatch):
    name, loaded = "peft.tuners.lora.bnb", []
    others = [each for each in sys.meta_path if each is not nf4_peft._watch]
    monkeypatch.setattr(sys, "meta_path", [nf4_peft._watch, finder(), *others])
    monkeypatch.setattr(nf4_peft, "_loaded", loaded.append)
    monkeypatch.delitem(sys.modules, name)
    spec = nf4_peft._watch.find_spec(name, peft.tuners.lora.__path__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert loaded == [name]  # once


def test_a_module_that_is_being_imported_is_not_read(monkeypatch):
    name = "peft.tuners.lora.bnb"
    module = types.ModuleType(name)
    module.__file__, module.__spec__ = "bnb.py", types.SimpleNamespace(_initializing=True)
    monkeypatch.setitem(sys.modules, name, module)
    assert not is_loaded(name)
    module.__spec__._initializing = False
    assert is_loaded(name)
