"""PEFT's LoRA layers over weights in 4 bits: NF4Linear, and bitsandbytes' Linear4bit where libnf4
serves that.

Importing nf4.torch is enough; as soon as PEFT is loaded, before or after, these are replaced:
    tuners.lora.layer.Linear.forward, tuners.lora.bnb.Linear4bit.forward
                        layer and adapter as one product with one backward pass (layers.py)
    their merge and unmerge
                        which change an NF4Linear (merging.py)
    utils.integrations.dequantize_module_weight
                        by which DoRA reads a weight

Functions whose source is not one that replacements.py knows, and patches, are left alone; so is
everything over other base layers.
"""

from __future__ import annotations

import importlib.abc
import sys
import threading
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from nf4.torch._replacing import Replaced
from nf4.torch.peft import replacements
from nf4.torch.peft.replacements import LINEAR, LINEAR4BIT

# After these modules are loaded there is something to replace; the first needs all of LINEAR.
_WHEN = {"peft.tuners.lora.model": LINEAR, LINEAR4BIT: LINEAR4BIT}


class Served(NamedTuple):
    """PEFT's functions that are replaced in this process, and those that are not known."""

    functions: list[str]
    left_alone: list[str]


_replaced: list[Replaced] = []
_left_alone: list[str] = []


def served() -> Served:
    return Served([each.name for each in _replaced], list(_left_alone))


def _loaded(name: str) -> None:
    """Never raises: whoever imports PEFT would get it."""
    try:
        if name != LINEAR4BIT:
            replacements.replace_dequantize(_replaced, _left_alone)
        replacements.replace(_WHEN[name], _replaced, _left_alone)
    except Exception as error:
        warnings.warn(f"libnf4 does not serve {_WHEN[name]}: {error!r}", stacklevel=2)


def _is_loaded(name: str) -> bool:
    """To its end, and not by whoever imports nf4.torch from there."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return hasattr(module, "__file__") and not getattr(spec, "_initializing", False)


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing by itself, and learns when PEFT's modules have been loaded."""

    def __init__(self) -> None:
        self._asking = threading.local()  # the other finders, which may ask all in turn

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _WHEN or getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            others = [getattr(each, "find_spec", None) for each in sys.meta_path if each != self]
            specs = (find(name, path, target) for find in others if find is not None)
            spec = next((each for each in specs if each is not None), None)
        finally:
            self._asking.now = False
        if spec is not None and spec.loader is not None:
            _tell_of(spec.loader, name)
        return spec


def _tell_of(loader: Any, name: str) -> None:
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _loaded(name)

    loader.exec_module = exec_module


_watch = _Watch()


def register() -> Served:
    """Replaces PEFT's functions now or as soon as it is loaded; a second call changes nothing."""
    if _watch not in sys.meta_path:
        for name in _WHEN:
            if _is_loaded(name):
                _loaded(name)
        sys.meta_path.insert(0, _watch)
    return served()


def unregister() -> None:
    """Gives PEFT its functions back, for a comparison for example. Patches made since stay."""
    if _watch in sys.meta_path:
        sys.meta_path.remove(_watch)
    for each in reversed(_replaced):
        each.give_back()
    _replaced.clear()
    _left_alone.clear()
