"""Replaces bitsandbytes' Python functions whose source is known and that nobody else has
patched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nf4.torch import _fast
from nf4.torch._replacing import Replaced, found, is_known
from nf4.torch.bitsandbytes import eager, own_kernels
from nf4.torch.bitsandbytes.dequantize import dequantize_4bit

_DEQUANTIZE = "functional.dequantize_4bit"
_MATMUL = "autograd._functions.matmul_4bit"
_BY_LAYERS = "matmul_4bit"  # the same function under the name that layers call
_APPLY = "autograd._functions.MatMul4Bit.apply"
_FORWARD = "nn.modules.Linear4bit.forward"
_FUNCTION = ("autograd._functions.MatMul4Bit.forward", "autograd._functions.MatMul4Bit.backward")

CHECKED = "0.50.0 to 0.50.2"  # the versions whose source was read
# The first digits of the SHA-256 of their functions' sources. Add a digest if a version changes
# one.
KNOWN: dict[str, Sequence[str]] = {
    _DEQUANTIZE: ("c928daa1321ac803",),
    _MATMUL: ("a219d40d62264de6",),
    _FUNCTION[0]: ("29f4e21a4fe99db3",),
    _FUNCTION[1]: ("053e8719319a526c",),
    _FORWARD: ("d52cf63457717cc7",),
}
# For each replaced function: the functions whose work its replacement does.
RELIES_ON: Mapping[str, Sequence[str]] = {
    _DEQUANTIZE: (_DEQUANTIZE,),
    _MATMUL: (_MATMUL, _APPLY, *_FUNCTION),
    _BY_LAYERS: (_BY_LAYERS, _MATMUL, _APPLY, *_FUNCTION),
    _APPLY: (_APPLY, *_FUNCTION),
    _FORWARD: (_FORWARD, _BY_LAYERS, _MATMUL, _APPLY, *_FUNCTION),
}


def _problems(bitsandbytes: Any, version: str) -> dict[str, str]:
    """Returns, by name, what is wrong with each function that cannot be replaced."""
    why = f"is of bitsandbytes {version}, whose source is not that of {CHECKED}"
    problems = {name: why for name in KNOWN if not is_known(found(bitsandbytes, name), KNOWN[name])}
    if found(bitsandbytes, _BY_LAYERS) is not found(bitsandbytes, _MATMUL):
        problems[_BY_LAYERS] = f"is not {_MATMUL}, but a patch"
    function = found(bitsandbytes, _APPLY.rpartition(".")[0])
    if "apply" in getattr(function, "__dict__", {}):
        problems[_APPLY] = "is not torch.autograd.Function's, but a patch"
    return problems


def unknown(bitsandbytes: Any, version: str) -> dict[str, str]:
    """Returns why functions cannot be replaced, by name."""
    problems = _problems(bitsandbytes, version)
    return {
        name: f"{each} {problems[each]}"
        for name, relies_on in RELIES_ON.items()
        for each in [next((each for each in relies_on if each in problems), None)]
        if each is not None
    }


def _keeps_its_bytes() -> bool:
    """Replaces has_avx512bf16 where a Linear4bit asks whether to repack its weight."""
    return False


def _ours(bitsandbytes: Any) -> dict[str, Callable[[Any], Any]]:
    """The makers of the replacements, in this order. Each takes the original."""
    weight_of = eager.weights_of(bitsandbytes)
    product = eager.product_for(weight_of, bitsandbytes)
    return {
        _DEQUANTIZE: dequantize_4bit,
        _MATMUL: functools.partial(eager.matmul_4bit, product),
        _BY_LAYERS: lambda _original: found(bitsandbytes, _MATMUL),
        _APPLY: functools.partial(eager.apply, product),
        _FORWARD: functools.partial(eager.forward, product, weight_of, bitsandbytes),
    }


def replace(bitsandbytes: Any, left_alone: Mapping[str, str], replaced: list[Replaced]) -> None:
    """Replaces the functions, and appends each to `replaced`, for give_back."""
    eager.given_back = False
    own_kernels.take(bitsandbytes)
    _fast.take_packed(bitsandbytes.nn.Params4bit)
    for name, make in _ours(bitsandbytes).items():
        if name not in left_alone:
            owner = found(bitsandbytes, name.rpartition(".")[0])
            ours = make(found(bitsandbytes, name))
            replaced.append(Replaced.by(name, owner, ours))
    modules = bitsandbytes.nn.modules
    if hasattr(modules, "has_avx512bf16"):
        name = "nn.modules.has_avx512bf16"
        replaced.append(Replaced.by(name, modules, _keeps_its_bytes))


def give_back(replaced: list[Replaced]) -> None:
    eager.given_back = True
    own_kernels.give_back()
    for each in reversed(replaced):
        each.give_back()
