"""ImportWatch: calls a function as soon as a module of another package is loaded."""

from __future__ import annotations

import importlib.abc
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def is_loaded(name: str) -> bool:
    """Tells if a module is loaded completely. It is not while it imports nf4.torch itself."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return hasattr(module, "__file__") and not getattr(spec, "_initializing", False)


class ImportWatch(importlib.abc.MetaPathFinder):
    """A finder that finds nothing by itself. It calls `loaded`, which never raises, with each name
    of `when` as soon as that module has been loaded."""

    def __init__(self, when: Iterable[str], loaded: Callable[[str], None]) -> None:
        self._when, self._loaded = tuple(when), loaded
        self._asking = threading.local()  # other finders may ask all finders in turn

    def start(self) -> None:
        """Starts watching, and calls `loaded` for modules that are loaded already. A second call
        changes nothing."""
        if self not in sys.meta_path:
            for name in filter(is_loaded, self._when):
                self._loaded(name)
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._when or getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            others = [getattr(each, "find_spec", None) for each in sys.meta_path if each != self]
            specs = (find(name, path, target) for find in others if find is not None)
            spec = next((each for each in specs if each is not None), None)
        finally:
            self._asking.now = False
        if spec is not None and spec.loader is not None:
            self._tell_of(spec.loader, name)
        return spec

    def _tell_of(self, loader: Any, name: str) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._loaded(name)

        loader.exec_module = exec_module
