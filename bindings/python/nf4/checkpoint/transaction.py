"""Output that appears whole or not at all.

Work goes to a temporary beside the destination, named `.NAME.nf4-tmp-0123abcd`; only when it
is complete and on disk does one rename put it in place. Whatever raises before that, a
KeyboardInterrupt or the CLI's Terminated included, removes the temporary and leaves the
destination as it was. kill -9 leaves at most the temporary, which may be deleted. What goes
wrong after the rename undoes nothing, and is a warning. The output is open to no more users
than its source, or than what it replaces.
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
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from nf4.checkpoint.errors import OutputRefused, naming
from nf4.checkpoint.files import file_kind

_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_PIECE_BYTES = 1 << 20
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
    """Make the names in a directory durable, on file systems that can."""
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
    # The limit on names is in bytes, 255 of them.
    start = os.fsencode(name)[:200].decode("utf-8", "ignore")
    return os.path.join(parent, f".{start}.nf4-tmp-{secrets.token_hex(4)}")


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


def creation_mode(mode: int, *like: str) -> int:
    """`mode`, as open(2) and mkdir(2) take it, less what group and others may not do with any
    file of `like` that is there."""
    for path in like:
        there = _stat_or_none(path)
        if there is not None:
            mode &= there.st_mode | 0o700
    return mode


def _open_up(folder: str) -> None:
    """Let the owner change every directory of a tree."""
    os.chmod(folder, 0o700)
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            _open_up(entry.path)


def _remove(path: str) -> None:
    """Remove a temporary, file or directory, if it is there."""
    if not os.path.isdir(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    try:
        shutil.rmtree(path)
    except PermissionError:
        _open_up(path)
        shutil.rmtree(path)


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
def _warning(warnings: list[str], what: str) -> Iterator[None]:
    """An OSError becomes a line of `warnings`: the output is in place, and stays."""
    try:
        yield
    except OSError as error:
        warnings.append(f"{what}: {error.strerror or error}")


def _sync_parent(path: str, warnings: list[str]) -> None:
    with _warning(warnings, f"{path}: written, but its directory could not be synced"):
        sync_directory(os.path.dirname(path))


def _rename(first: str, second: str, flags: int) -> int:
    """renameat2; returns 0 or an errno."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return errno.ENOSYS
    names = (os.fsencode(first), os.fsencode(second))
    failed = renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], flags)
    return ctypes.get_errno() if failed else 0


def _move_to_free(temporary: str, path: str) -> None:
    """Rename a file to a name that must be free, even of what came there a moment ago."""
    code = _rename(temporary, path, _RENAME_NOREPLACE)
    try:
        if code in (errno.ENOSYS, errno.EINVAL):
            # Left for network file systems; the temporary's own name is removed later.
            os.link(temporary, path)
        elif code:
            raise OSError(code, os.strerror(code), path)
    except FileExistsError:
        raise OutputRefused(f"{path}: exists already (--force replaces it)") from None


@contextlib.contextmanager
def staged_file(
    destination: str | os.PathLike[str], *, warnings: list[str], replace: bool = False
) -> Iterator[str]:
    """Yields a path to create and sync a file at; it becomes `destination` when the block ends
    without an error. It takes over the mode of a file that it replaces.

    Raises OutputRefused if `destination` exists (unless `replace`) or is no regular file, and
    OSError for what the system refuses. What fails once the file is in place goes to
    `warnings`.
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
        if there is not None:
            os.chmod(temporary, stat.S_IMODE(there.st_mode))
        with signals_deferred():
            if replace:
                os.replace(temporary, path)
            else:
                _move_to_free(temporary, path)
            _sync_parent(path, warnings)


def _check_directory(path: str, replace: bool) -> os.stat_result | None:
    """The status of a directory to replace at `path`, if there is one. An empty one may be
    renamed over."""
    there = _stat_or_none(path)
    if there is None:
        return None
    if not stat.S_ISDIR(there.st_mode):
        raise OutputRefused(f"{path}: is not a directory, and the output is one")
    names = os.listdir(path)
    if not names:
        return None
    if not replace:
        raise OutputRefused(f"{path}: exists already and is not empty (--force replaces it)")
    if ".git" in names:
        raise OutputRefused(f"{path}: holds a .git, so it is not replaced; remove it first")
    if not any(name.endswith(".safetensors") for name in names):
        raise OutputRefused(f"{path}: holds no checkpoint, so it is not replaced; remove it first")
    return there


def _exchange(first: str, second: str) -> None:
    """Swap two directories in one step, so that there is no moment without `second`."""
    code = _rename(first, second, _RENAME_EXCHANGE)
    if code in (errno.ENOSYS, errno.EINVAL):
        raise OutputRefused(
            f"{second}: this file system cannot replace a directory in one step; remove it first"
        )
    if code:
        raise OSError(code, os.strerror(code), second)


@contextlib.contextmanager
def staged_directory(
    destination: str | os.PathLike[str],
    *,
    like: str,
    warnings: list[str],
    replace: bool = False,
) -> Iterator[str]:
    """Yields an empty directory to fill with synced files; it becomes `destination` when the
    block ends without an error. With `replace`, a checkpoint directory that is there already
    is swapped for it in one step and then deleted with all it holds. The mode is that of the
    directory replaced, or else one no more open than that of the directory `like`.

    Raises OutputRefused if `destination` is in the way, and OSError for what the system
    refuses. What fails once the directory is in place goes to `warnings`.
    """
    path = _resolve(destination)
    there = _check_directory(path, replace)
    with _temporary(path) as temporary:
        os.mkdir(temporary, creation_mode(0o777, like, path))
        yield temporary
        for folder, _, _ in os.walk(temporary):
            sync_directory(folder)
        with signals_deferred():
            if there is None:
                os.rename(temporary, path)
            else:
                os.chmod(temporary, stat.S_IMODE(there.st_mode) | 0o700)
                _exchange(temporary, path)
                with _warning(warnings, f"{temporary}: the old output, could not be deleted"):
                    _remove(temporary)
            _sync_parent(path, warnings)


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


def refuse_reading_from(destination: str | os.PathLike[str], paths: Iterable[str]) -> None:
    """OutputRefused if replacing `destination` would delete one of the files that are read,
    which links may lead into it."""
    real_destination = os.path.realpath(destination)
    for path in paths:
        if os.path.commonpath([os.path.realpath(path), real_destination]) == real_destination:
            raise OutputRefused(
                f"{os.fspath(destination)}: the output would replace what {path} is a link to"
            )


def copy_synced(source: str, destination: str) -> None:
    """Copy a small file's bytes and sync them."""
    mode = creation_mode(0o666, source)
    with open(source, "rb") as reader, _create(destination, mode) as writer:
        while True:
            with naming(source):
                piece = reader.read(_PIECE_BYTES)
            with naming(destination):
                if not piece:
                    break
                writer.write(piece)
        with naming(destination):
            writer.flush()
            os.fsync(writer.fileno())


def write_synced(path: str, data: bytes, like: str) -> None:
    """Create a file, no more open than the file `like`, and sync it."""
    with _create(path, creation_mode(0o666, like)) as writer, naming(path):
        writer.write(data)
        writer.flush()
        os.fsync(writer.fileno())


def _create(path: str, mode: int) -> BinaryIO:
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))
