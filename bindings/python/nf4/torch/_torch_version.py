"""Checks that there is a torch that nf4.torch can use, before anything else is imported."""

from __future__ import annotations

_OLDEST = (2, 10)
_INSTALL = "pip install '.[torch]' in a clone of libnf4 gets one"

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(f"nf4.torch needs PyTorch, which is not installed; {_INSTALL}") from error

_found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if _found < _OLDEST:
    raise ImportError(
        f"nf4.torch needs torch {'.'.join(map(str, _OLDEST))} or later, "
        f"and this is {torch.__version__}; {_INSTALL}"
    )
