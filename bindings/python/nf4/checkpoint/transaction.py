"""Output that appears whole or not at all.

Work goes to a temporary beside the destination, named `.NAME.nf4-tmp-0123abcd`; only when it
is complete and on disk does one rename put it in place. Whatever raises before that, a
KeyboardInterrupt or the CLI's Terminated included, removes the temporary and leaves the
destination as it was. kill -9 leaves at most the temporary, which may be deleted.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import signal
import stat
import threading
from collections.abc import Iterator

from nf4.checkpoint.errors import OutputRefused, naming
from nf4.checkpoint.reader import file_kind

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Hold back SIGINT, SIGTERM and SIGHUP until the block is done, so that cleaning up is not
    cut short by a second one. Off the main thread nothing is needed: handlers run there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    # A handler that is None was not installed from Python and cannot be put back.
    before = {number: signal.getsignal(number) for number in _INTERRUPTS}
    before = {number: handler for number, handler in before.items() if handler is not None}
    try:
        # Not a signal mask: that is per thread, and any other thread could take the signal.
        for number in before:
            signal.signal(number, lambda number, frame: held.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)


def sync_directory(path: str) -> None:
    """Make the names in a directory durable. File systems that cannot say so."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(fd)
    except OSError as error:
        # Some network and FUSE file systems have no fsync for directories.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def _temporary_beside(destination: str) -> str:
    parent, name = os.path.split(destination)
    return os.path.join(parent, f".{name[:200]}.nf4-tmp-{secrets.token_hex(4)}")


def _resolve(destination: str | os.PathLike[str]) -> str:
    """The real path, so that a link given as destination stays a link."""
    path = os.path.realpath(destination)
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        code = errno.ENOTDIR if os.path.exists(parent) else errno.ENOENT
        raise OSError(code, os.strerror(code), parent)
    return path


def _stat_or_none(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _remove(path: str) -> None:
    """Remove a temporary, file or directory, if it is there."""
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


@contextlib.contextmanager
def _temporary(destination: str) -> Iterator[str]:
    path = _temporary_beside(destination)
    try:
        yield path
    except OSError as error:
        # Name the destination, which the user knows, and not the temporary.
        name = error.filename
        if name is None or isinstance(name, str) and name.startswith(path):
            error.filename = destination + (name or path)[len(path) :]
            error.filename2 = None
        raise
    finally:
        with signals_deferred():
            _remove(path)


@contextlib.contextmanager
def staged_file(destination: str | os.PathLike[str], *, replace: bool = False) -> Iterator[str]:
    """Yields a path to create and sync a file at; it becomes `destination` when the block ends
    without an error.

    Raises OutputRefused if `destination` exists (unless `replace`) or is no regular file, and
    OSError for what the system refuses.
    """
    path = _resolve(destination)
    there = _stat_or_none(path)
    if there is not None:
        if not stat.S_ISREG(there.st_mode):
            raise OutputRefused(f"{path}: is {file_kind(there.st_mode)}, not a regular file")
        if not replace:
            raise OutputRefused(f"{path}: exists already (--force replaces it)")
    with _temporary(path) as temporary:
        yield temporary
        os.replace(temporary, path)
        sync_directory(os.path.dirname(path))


def _check_directory(path: str, replace: bool) -> bool:
    """Whether there is a directory to replace at `path`. An empty one may be renamed over."""
    there = _stat_or_none(path)
    if there is None:
        return False
    if not stat.S_ISDIR(there.st_mode):
        raise OutputRefused(f"{path}: is not a directory, and the output is one")
    names = os.listdir(path)
    if not names:
        return False
    if not replace:
        raise OutputRefused(f"{path}: exists already and is not empty (--force replaces it)")
    if not any(name == "config.json" or name.endswith(".safetensors") for name in names):
        raise OutputRefused(f"{path}: holds no checkpoint, so it is not replaced; remove it first")
    return True


def _exchange(first: str, second: str) -> None:
    """Swap two directories in one step, so that there is no moment without `second`."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    code = errno.ENOSYS
    if renameat2 is not None:
        names = (os.fsencode(first), os.fsencode(second))
        if renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        raise OutputRefused(
            f"{second}: this file system cannot replace a directory in one step; remove it first"
        )
    raise OSError(code, os.strerror(code), second)


@contextlib.contextmanager
def staged_directory(
    destination: str | os.PathLike[str], *, replace: bool = False
) -> Iterator[str]:
    """Yields an empty directory to fill with synced files; it becomes `destination` when the
    block ends without an error. With `replace`, a checkpoint directory that is there already
    is swapped for it in one step and then deleted with all it holds.

    Raises OutputRefused if `destination` is in the way, and OSError for what the system
    refuses.
    """
    path = _resolve(destination)
    exchange = _check_directory(path, replace)
    with _temporary(path) as temporary:
        os.mkdir(temporary)
        yield temporary
        for folder, _, _ in os.walk(temporary):
            sync_directory(folder)
        if exchange:
            _exchange(temporary, path)
        else:
            os.rename(temporary, path)
        sync_directory(os.path.dirname(path))


def refuse_overlap(source: str | os.PathLike[str], destination: str | os.PathLike[str]) -> None:
    """OutputRefused if writing `destination` would touch `source`: the same file or directory
    under any name, or one inside the other."""
    real_source, real_destination = os.path.realpath(source), os.path.realpath(destination)
    same = real_source == real_destination
    if not same and os.path.exists(real_source) and os.path.exists(real_destination):
        same = os.path.samefile(real_source, real_destination)
    if same:
        raise OutputRefused(f"{os.fspath(destination)}: the output is the input")
    common = os.path.commonpath([real_source, real_destination])
    if common == real_destination or (common == real_source and os.path.isdir(real_source)):
        raise OutputRefused(f"{os.fspath(destination)}: the output and the input lie in each other")


def copy_synced(source: str, destination: str) -> None:
    """Copy a small file's bytes and sync them."""
    with open(source, "rb") as reader, open(destination, "xb") as writer, naming(destination):
        shutil.copyfileobj(reader, writer)
        writer.flush()
        os.fsync(writer.fileno())


def write_synced(path: str, data: bytes) -> None:
    with open(path, "xb") as writer, naming(path):
        writer.write(data)
        writer.flush()
        os.fsync(writer.fileno())
