"""Which of bitsandbytes' Python functions are replaced: those whose source was read."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nf4.torch import _fast
from nf4.torch.bitsandbytes import eager
from nf4.torch.bitsandbytes.dequantize import dequantize_4bit

_DEQUANTIZE = "functional.dequantize_4bit"
_MATMUL = "autograd._functions.matmul_4bit"
_APPLY = "autograd._functions.MatMul4Bit.apply"
_FORWARD = "nn.modules.Linear4bit.forward"
_FUNCTION = ("autograd._functions.MatMul4Bit.forward", "autograd._functions.MatMul4Bit.backward")

CHECKED = "0.50.0 to 0.50.2"  # the versions that were read
# What their functions' sources begin with in SHA-256; add a digest where a version changes one.
KNOWN: dict[str, Sequence[str]] = {
    _DEQUANTIZE: ("c928daa1321ac803",),
    _MATMUL: ("a219d40d62264de6",),
    _FUNCTION[0]: ("29f4e21a4fe99db3",),
    _FUNCTION[1]: ("053e8719319a526c",),
    _FORWARD: ("d52cf63457717cc7",),
}
# Of each function that is replaced, those whose work its replacement does.
RELIES_ON: Mapping[str, Sequence[str]] = {
    _DEQUANTIZE: (_DEQUANTIZE,),
    _MATMUL: (_MATMUL, *_FUNCTION),
    _APPLY: _FUNCTION,
    _FORWARD: (_FORWARD, _MATMUL, *_FUNCTION),
}


class Replaced(NamedTuple):
    """A function that was replaced: where it was, and what there was."""

    name: str
    owner: Any
    attribute: str
    original: Any  # None: the owner had inherited it

    @classmethod
    def by(cls, name: str, owner: Any, ours: Any) -> Replaced:
        attribute = name.rpartition(".")[2]
        original = vars(owner).get(attribute)
        setattr(owner, attribute, ours)
        return cls(name, owner, attribute, original)

    def give_back(self) -> None:
        if self.original is None:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.original)


def _found(bitsandbytes: Any, name: str) -> Any:
    """None if there is no such function."""
    return functools.reduce(lambda at, each: getattr(at, each, None), name.split("."), bitsandbytes)


def _is_known(bitsandbytes: Any, name: str) -> bool:
    try:
        # Of a function itself getsource would follow __wrapped__, past somebody's decorator.
        source = inspect.getsource(_found(bitsandbytes, name).__code__)
    except (OSError, AttributeError):  # no source beside it, or no function
        return False
    return hashlib.sha256(source.encode()).hexdigest()[:16] in KNOWN[name]


def unknown(bitsandbytes: Any, version: str) -> dict[str, str]:
    """Why each function that cannot be replaced is not, by name."""
    known = {name: _is_known(bitsandbytes, name) for name in KNOWN}
    why = f"of bitsandbytes {version}, whose source is not that of {CHECKED}"
    return {
        name: f"{each} is {why}"
        for name, relies_on in RELIES_ON.items()
        for each in [next((each for each in relies_on if not known[each]), None)]
        if each is not None
    }


def _keeps_its_bytes() -> bool:
    """Replaces has_avx512bf16 where a Linear4bit asks whether to repack its weight."""
    return False


def _ours(bitsandbytes: Any) -> dict[str, Callable[[Any], Any]]:
    """What makes each replacement from the original."""
    product = eager.product_for(bitsandbytes)
    return {
        _DEQUANTIZE: dequantize_4bit,
        _MATMUL: functools.partial(eager.matmul_4bit, product),
        _APPLY: functools.partial(eager.apply, product),
        _FORWARD: functools.partial(eager.forward, product, bitsandbytes.nn.Params4bit),
    }


def replace(bitsandbytes: Any, left_alone: Mapping[str, str], replaced: list[Replaced]) -> None:
    """Appends what it replaces, one by one, for give_back."""
    eager.given_back = False
    _fast.take_packed(bitsandbytes.nn.Params4bit)
    for name, make in _ours(bitsandbytes).items():
        if name not in left_alone:
            owner = _found(bitsandbytes, name.rpartition(".")[0])
            ours = make(_found(bitsandbytes, name))
            replaced.append(Replaced.by(name, owner, ours))
            if name == _MATMUL:  # which layers call by this name
                replaced.append(Replaced.by("matmul_4bit", bitsandbytes, ours))
    modules = bitsandbytes.nn.modules
    if hasattr(modules, "has_avx512bf16"):
        name = "nn.modules.has_avx512bf16"
        replaced.append(Replaced.by(name, modules, _keeps_its_bytes))


def give_back(replaced: list[Replaced]) -> None:
    eager.given_back = True
    for each in reversed(replaced):
        each.give_back()
