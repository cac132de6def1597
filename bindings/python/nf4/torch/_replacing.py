"""Functions of other packages that are replaced by ours, and given back."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple


class Replaced(NamedTuple):
    """A function that was replaced: where it was, and what there was."""

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
        """A patch that somebody made meanwhile stays."""
        if vars(self.owner).get(self.attribute) is not self.ours:
            return
        if self.original is None:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.original)


def found(owner: Any, name: str) -> Any:
    """The attribute of this dotted name; None if there is none, the owner by an empty name."""
    names = name.split(".") if name else []
    return functools.reduce(lambda at, each: getattr(at, each, None), names, owner)


def is_known(function: Any, digests: Sequence[str]) -> bool:
    """Is its source one of those, by what they begin with in SHA-256?"""
    try:
        # Of a function itself getsource would follow __wrapped__, past somebody's decorator.
        source = inspect.getsource(function.__code__)
    except (OSError, AttributeError):  # no source beside it, or no function
        return False
    return hashlib.sha256(source.encode()).hexdigest()[:16] in digests
