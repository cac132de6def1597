"""Replaces functions of other packages by ours, and restores them."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple


class Replaced(NamedTuple):
    """A function that was replaced: its place, the original and ours."""

    name: str
    owner: Any
    attribute: str
    original: Any  # None: the owner had inherited it
    ours: Any

    @classmethod
    def by(cls, name: str, owner: Any, ours: Any) -> Replaced:
        attribute = name.rpartition(".")[2]
        original = vars(owner).get(attribute)
        setattr(owner, attribute, ours)
        return cls(name, owner, attribute, original, ours)

    def give_back(self) -> None:
        """Restores the original, unless somebody has patched the function since."""
        if vars(self.owner).get(self.attribute) is not self.ours:
            return
        if self.original is None:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.original)


def found(owner: Any, name: str) -> Any:
    """Returns the attribute of this dotted name, or None. An empty name gives the owner."""
    names = name.split(".") if name else []
    return functools.reduce(lambda at, each: getattr(at, each, None), names, owner)


def is_known(function: Any, digests: Sequence[str]) -> bool:
    """Tells if the SHA-256 of its source begins with one of these digests."""
    try:
        # Given the function, getsource would follow __wrapped__ past somebody's decorator.
        source = inspect.getsource(function.__code__)
    except (OSError, AttributeError):  # there is no source, or it is not a function
        return False
    return hashlib.sha256(source.encode()).hexdigest()[:16] in digests
