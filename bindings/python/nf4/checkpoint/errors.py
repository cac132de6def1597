"""The errors of checkpoints and of their destinations."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def printable(value: object) -> str:
    """Escapes control characters, because names in a file must not control the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(value))


class FormatError(ValueError):
    """A file breaks its format, or may not be read. The message names the file, the tensor if there
    is one, and the reason, in one line without control characters."""

    def __init__(self, path: str | os.PathLike[str], reason: str, tensor: str | None = None):
        self.path = os.fspath(path)
        self.tensor = tensor
        self.reason = reason
        where = f"{self.path}: tensor {tensor!r}" if tensor is not None else self.path
        super().__init__(printable(f"{where}: {reason}"))


class OutputRefused(Exception):
    """The destination cannot be written without harm: it exists, or it is the input."""


class OptionError(Exception):
    """An option asks for what the checkpoint cannot give, such as a pattern that matches no
    tensor."""


def add_note(error: BaseException, note: str) -> None:
    """BaseException.add_note, which Python 3.10 lacks."""
    error.__notes__ = [*getattr(error, "__notes__", []), note]


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give an OSError from a call on a descriptor the name of the file behind it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise
