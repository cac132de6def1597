"""An error of one rank as an error of every rank: else the others wait for it in a collective."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from nf4.checkpoint import FormatError

_T = TypeVar("_T")


def gathered(said: _T) -> list[_T]:
    """What each rank says, by rank; this one's alone where nothing is distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return [said]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, said)
    return found


def on_every_rank(path: str | os.PathLike[str], work: Callable[[], _T]) -> _T:
    """The result of `work`, once it has worked on every rank. Else its own exception where it
    failed, and on other ranks FormatError of `path` that says which rank failed and how."""
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:  # what it is matters to no rank but this
        error = raised
    said = gathered(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, each in enumerate(said):
        if each is not None:
            raise FormatError(path, f"rank {rank} failed: {each}")
    return result


def require_alike(path: str | os.PathLike[str], said: str) -> None:
    """FormatError on every rank if one says something else than rank 0."""
    found = gathered(said)
    for rank, each in enumerate(found):
        if each != found[0]:
            raise FormatError(
                path, f"ranks read different checkpoints: rank 0 has {found[0]}, rank {rank} {each}"
            )
