"""Opens, creates and copies files. A created file is on disk before it is closed, and has no more
permissions than the file that it is made from."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import TypeVar

from nf4.checkpoint.errors import FormatError, naming

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}
_PIECE_BYTES = 1 << 20
_Self = TypeVar("_Self", bound="Closing")


class Closing(ABC):
    """A context manager that closes itself at the end of the block."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held; a second call does nothing."""

    def finish(self) -> None:
        """Called at the end of a block that raised nothing."""
        self.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
            return
        # The block's error is reported, and not one from closing after it.
        with contextlib.suppress(OSError):
            self.close()


class Descriptor(Closing):
    """An open file, which is closed once."""

    def __init__(self, fd: int):
        self._fd = fd

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def file_kind(mode: int) -> str:
    """Returns the kind of file for a stat mode, in words, if it is not a regular file."""
    return _KINDS.get(stat.S_IFMT(mode), "a special file")


def open_regular(path: str) -> tuple[int, os.stat_result]:
    """Returns a descriptor to read from, and its status. Raises FormatError if `path` is not a
    regular file, OSError if it cannot be opened."""
    # O_NONBLOCK: opening a FIFO must not wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(path, f"{file_kind(status.st_mode)}, not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd, status


def stat_or_none(path: str) -> os.stat_result | None:
    """Returns the status of `path`; None if nothing is there."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def creation_mode(mode: int, *like: str) -> int:
    """Returns `mode`, for open(2) and mkdir(2), without the permissions that group and others lack
    on any existing file of `like`."""
    for path in like:
        status = stat_or_none(path)
        if status is not None:
            mode &= status.st_mode | 0o700
    return mode


def write_fully(fd: int, data: memoryview, offset: int) -> None:
    """Calls pwrite until everything is written. Python retries EINTR; a short write continues."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def sync_directory(path: str) -> None:
    """Make the names in a directory durable, on file systems that support it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with Descriptor(fd), naming(path):
        try:
            os.fsync(fd)
        except OSError as error:
            # Some network and FUSE file systems have no fsync for directories.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


@contextlib.contextmanager
def _created(path: str, like: str) -> Iterator[int]:
    """Yields a descriptor of a new file with no more permissions than the file `like`. It is synced
    at the end."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(path, flags, creation_mode(0o666, like))
    with naming(path), Descriptor(fd):
        yield fd
        os.fsync(fd)


def write_synced(path: str, data: bytes, like: str) -> None:
    """Write a new file with no more permissions than the file `like`, and sync it."""
    with _created(path, like) as fd:
        write_fully(fd, memoryview(data), 0)


def copy_synced(source: str, destination: str) -> None:
    """Copy a regular file's bytes to a new file and sync it. Raises FormatError if the source is
    not a regular file, or its size changes meanwhile."""
    fd, status = open_regular(source)
    with Descriptor(fd), _created(destination, source) as output:
        done = 0
        while True:
            with naming(source):
                piece = os.read(fd, _PIECE_BYTES)
            if not piece or done + len(piece) > status.st_size:
                break
            write_fully(output, memoryview(piece), done)
            done += len(piece)
        if piece or done < status.st_size:
            raise FormatError(source, "changed while it was read")
