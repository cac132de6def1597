"""Opening files that may be anything, and objects that hold one open."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

from nf4.checkpoint.errors import FormatError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}
_Self = TypeVar("_Self", bound="Closing")


def file_kind(mode: int) -> str:
    """What a stat mode that is not of a regular file is of, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "a special file")


def open_regular(path: str) -> tuple[int, os.stat_result]:
    """A descriptor to read from, and its status. FormatError if `path` is no regular file,
    OSError if it cannot be opened."""
    # O_NONBLOCK: opening a FIFO must answer, not wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(path, f"{file_kind(status.st_mode)}, not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd, status


class Closing(ABC):
    """A context manager that closes itself at the end of the block."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what is held; a second call does nothing."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
