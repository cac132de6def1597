"""Output that appears whole or not at all.

Output is written to a temporary beside the destination, `.NAME.nf4-tmp-0123abcd`. When that is
complete and on disk, one rename puts it in place. Any exception before that (KeyboardInterrupt and
the CLI's Terminated included) removes the temporary and leaves the destination as it was. kill -9
leaves at most the temporary, which may be deleted. A failure after the rename is a warning.
Replacing deletes only what was there at the start. The output has no more permissions than its
source, or than what it replaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import os
import secrets
import shutil
import signal
import stat
import threading
from collections.abc import Iterable, Iterator

from nf4.checkpoint.errors import OutputRefused, add_note
from nf4.checkpoint.files import creation_mode, file_kind, stat_or_none, sync_directory

_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The identity of each path of a tree, relative to its root, to detect changes.
_Listing = dict[str, tuple[int, ...]]


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Defers SIGINT, SIGTERM and SIGHUP to the end of the block, so that a second one does not
    interrupt cleaning up. Only the main thread needs it: handlers run there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    # A handler that is None was not installed from Python and cannot be put back.
    before = {number: signal.getsignal(number) for number in _INTERRUPTS}
    before = {number: handler for number, handler in before.items() if handler is not None}
    try:
        # A signal mask would not do: it is per thread, and another thread could take the signal.
        for number in before:
            signal.signal(number, lambda number, frame: held.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)


@dataclasses.dataclass
class _Temporary:
    """The temporary that is being written. `placed`: it has become the destination, and must not be
    removed."""

    path: str
    placed: bool = False


def hidden_beside(destination: str, ending: str) -> str:
    """Returns the path of a hidden file or directory for this destination."""
    parent, name = os.path.split(destination)
    # The limit on names is in bytes, 255 of them.
    start = os.fsencode(name)[:200].decode("utf-8", "ignore")
    return os.path.join(parent, f".{start}.{ending}")


def _free_name_beside(destination: str) -> str:
    while True:
        path = hidden_beside(destination, f"nf4-tmp-{secrets.token_hex(4)}")
        if not os.path.lexists(path):
            return path


def _remove(path: str) -> None:
    """Remove a temporary, file or directory, if it is there."""
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


@contextlib.contextmanager
def _temporary(destination: str) -> Iterator[_Temporary]:
    """Yields a temporary. It is removed after an error, which is then raised."""
    temporary = _Temporary(_free_name_beside(destination))
    path = temporary.path
    try:
        yield temporary
    except BaseException as error:
        if isinstance(error, OSError):
            # The user knows the destination's name, not the temporary's.
            name = error.filename
            if name is None or isinstance(name, str) and name.startswith(path):
                error.filename = destination + (name or path)[len(path) :]
                error.filename2 = None
        with signals_deferred():
            try:
                if not temporary.placed:
                    _remove(path)
            except OSError as later:
                add_note(error, f"{path}: left behind: {later.strerror or later}")
        raise


@contextlib.contextmanager
def _warning(warnings: list[str], what: str) -> Iterator[None]:
    """Turns an OSError into a line of `warnings`, because the output is in place and stays."""
    try:
        yield
    except OSError as error:
        warnings.append(f"{what}: {error.strerror or error}")


def _sync_parent(path: str, warnings: list[str]) -> None:
    with _warning(warnings, f"{path}: written, but its directory could not be synced"):
        sync_directory(os.path.dirname(path))


def _resolve(destination: str | os.PathLike[str]) -> str:
    """Returns the real path, so that a link given as destination stays a link."""
    path = os.path.realpath(destination)
    parent = os.path.dirname(path)
    # The system says why it cannot be accessed: it may be absent, or its path too long.
    if not stat.S_ISDIR(os.stat(parent).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), parent)
    return path


def _mount_id(path: str) -> str | None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
            return next((line for line in lines if line.startswith("mnt_id:")), None)
    finally:
        os.close(fd)


def _is_mount_point(path: str) -> bool:
    try:
        # os.path.ismount misses bind mounts.
        return _mount_id(path) != _mount_id(os.path.dirname(path))
    except OSError:
        return os.path.ismount(path)


def _refuse_mount_point(path: str) -> None:
    if _is_mount_point(path):
        raise OutputRefused(f"{path}: is a mount point, which cannot be replaced; name one in it")


def _rename(first: str, second: str, flags: int) -> int:
    """renameat2; returns 0 or an errno."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return errno.ENOSYS
    names = (os.fsencode(first), os.fsencode(second))
    failed = renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], flags)
    return ctypes.get_errno() if failed else 0


def _exists(path: str) -> OutputRefused:
    return OutputRefused(f"{path}: exists already (--force, or replace=True, replaces it)")


def _move_to_free(temporary: str, path: str, warnings: list[str]) -> None:
    """Renames a file to a name that must be free, even of a file that appeared a moment ago."""
    code = _rename(temporary, path, _RENAME_NOREPLACE)
    try:
        if code in (errno.ENOSYS, errno.EINVAL):
            # Network file systems support this instead.
            os.link(temporary, path)
            with _warning(warnings, f"{temporary}: another name of {path}, could not be removed"):
                os.unlink(temporary)
        elif code:
            raise OSError(code, os.strerror(code), path)
    except FileExistsError:
        raise _exists(path) from None


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """Returns a value that changes if a file is replaced or written to, or if a directory is
    replaced."""
    if stat.S_ISDIR(status.st_mode):
        return (status.st_dev, status.st_ino)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _refuse_changed(path: str, before: object, now: object) -> None:
    if before != now:
        raise OutputRefused(f"{path}: changed since the start, so it is not replaced")


@dataclasses.dataclass(frozen=True)
class FileTarget:
    """The destination of a file, checked at the start. `before`: the file to replace, if any."""

    path: str
    before: os.stat_result | None

    @classmethod
    def check(cls, destination: str | os.PathLike[str], *, replace: bool) -> FileTarget:
        """Raises OutputRefused if `destination` exists (unless `replace`), is not a regular file
        or is a mount point; OSError if its parent is not a directory."""
        path = _resolve(destination)
        before = stat_or_none(path)
        if before is not None:
            if not stat.S_ISREG(before.st_mode):
                raise OutputRefused(f"{path}: is {file_kind(before.st_mode)}, not a regular file")
            if not replace:
                raise _exists(path)
            _refuse_mount_point(path)
        return cls(path, before)

    @contextlib.contextmanager
    def staged(self, warnings: list[str]) -> Iterator[str]:
        """Yields a path to create and sync a file at; it becomes the destination when the block
        ends without an error. It takes over the mode of a file that it replaces.

        Raises OutputRefused if the destination has changed since the check, and OSError for what
        the system refuses. What fails once the file is in place goes to `warnings`.
        """
        path = self.path
        with _temporary(path) as temporary:
            yield temporary.path
            with signals_deferred():
                if self.before is None:
                    _move_to_free(temporary.path, path, warnings)
                else:
                    os.chmod(temporary.path, stat.S_IMODE(self.before.st_mode))
                    _refuse_changed(path, _identity(self.before), _identity(os.stat(path)))
                    os.replace(temporary.path, path)
                temporary.placed = True
                _sync_parent(path, warnings)


def _fail(error: OSError) -> None:
    raise error


def _listing(folder: str) -> _Listing:
    """Lists everything in a directory; directories come before what they hold."""
    found: _Listing = {}
    for parent, folders, names in os.walk(folder, onerror=_fail):
        for name in folders + names:
            path = os.path.join(parent, name)
            found[os.path.relpath(path, folder)] = _identity(os.lstat(path))
    return found


def _delete(folder: str, listing: _Listing) -> None:
    """Deletes a directory with everything in `listing` that is still there. Anything else stays,
    and raises OSError."""
    _make_writable(folder)
    for path, status in _unchanged(folder, listing.items()):
        if stat.S_ISDIR(status.st_mode):
            _make_writable(path)
    for path, status in _unchanged(folder, reversed(listing.items())):
        with contextlib.suppress(FileNotFoundError):
            (os.rmdir if stat.S_ISDIR(status.st_mode) else os.unlink)(path)
    os.rmdir(folder)


def _make_writable(folder: str) -> None:
    """Makes a directory writable, which may be read-only even to its owner."""
    with contextlib.suppress(PermissionError, FileNotFoundError):
        os.chmod(folder, 0o700)


def _unchanged(
    folder: str, listed: Iterable[tuple[str, tuple[int, ...]]]
) -> Iterator[tuple[str, os.stat_result]]:
    """Yields the entries of a listing that have not changed: path and status."""
    for name, identity in listed:
        path = os.path.join(folder, name)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = os.lstat(path)
            if _identity(status) == identity:
                yield path, status


def _holds_current_directory(path: str) -> bool:
    try:
        return os.path.commonpath([os.getcwd(), path]) == path
    except FileNotFoundError:  # it was deleted
        return False


def _exchange(first: str, second: str) -> None:
    """Swaps two directories in one step, so that `second` always exists."""
    code = _rename(first, second, _RENAME_EXCHANGE)
    if code in (errno.ENOSYS, errno.EINVAL):
        raise OutputRefused(
            f"{second}: this file system cannot replace a directory in one step; remove it first"
        )
    if code:
        raise OSError(code, os.strerror(code), second)


@dataclasses.dataclass(frozen=True)
class DirectoryTarget:
    """The destination of a directory, checked at the start. `before`: the contents of the directory
    to replace; None if there is none, or an empty one, which may be renamed over."""

    path: str
    before: _Listing | None

    @classmethod
    def check(cls, destination: str | os.PathLike[str], *, replace: bool) -> DirectoryTarget:
        """Raises OutputRefused if `destination` is in the way: a file, a directory that is not
        empty (unless `replace` and it is a checkpoint's), a mount point, or the current
        directory; OSError if its parent is not a directory."""
        path = _resolve(destination)
        status = stat_or_none(path)
        if status is None:
            return cls(path, None)
        if not stat.S_ISDIR(status.st_mode):
            raise OutputRefused(f"{path}: is not a directory, and the output is one")
        names = os.listdir(path)
        if names and not replace:
            raise OutputRefused(
                f"{path}: exists already and is not empty (--force, or replace=True, replaces it)"
            )
        kept = "so it is not replaced; remove it first"
        if ".git" in names:
            raise OutputRefused(f"{path}: holds a .git, {kept}")
        if names and not any(name.endswith(".safetensors") for name in names):
            raise OutputRefused(f"{path}: holds no checkpoint, {kept}")
        _refuse_mount_point(path)
        if _holds_current_directory(path):
            # Replacing it would leave the user's shell in a deleted directory.
            raise OutputRefused(
                f"{path}: is or holds the current directory, so it is not replaced; "
                "run nf4 elsewhere"
            )
        return cls(path, _listing(path) if names else None)

    @contextlib.contextmanager
    def staged(self, warnings: list[str], *, like: str) -> Iterator[str]:
        """Yields an empty directory to fill with synced files; it becomes the destination when the
        block ends without an error. A directory that it replaces is swapped for it in one step and
        then deleted, except for anything that appeared there since the check. The mode is that of
        the replaced directory, or else one with no more permissions than the directory `like`.

        Raises OutputRefused if the destination has changed since the check, and OSError for what
        the system refuses. What fails once the directory is in place goes to `warnings`.
        """
        path = self.path
        with _temporary(path) as temporary:
            new = temporary.path
            os.mkdir(new, creation_mode(0o777, like, path))
            yield new
            for folder, _, _ in os.walk(new):
                sync_directory(folder)
            with signals_deferred():
                if self.before is None:
                    os.rename(new, path)
                    temporary.placed = True
                else:
                    os.chmod(new, stat.S_IMODE(os.stat(path).st_mode) | 0o700)
                    _refuse_changed(path, self.before, _listing(path))
                    _exchange(new, path)
                    temporary.placed = True
                    with _warning(warnings, f"{new}: the old output, could not be deleted whole"):
                        _delete(new, self.before)
                _sync_parent(path, warnings)


def refuse_overlap(source: str | os.PathLike[str], destination: str | os.PathLike[str]) -> None:
    """Raises OutputRefused if writing `destination` would change `source`: they are the same file
    or directory, under any name, or one is inside the other."""
    real_source, real_destination = os.path.realpath(source), os.path.realpath(destination)
    same = real_source == real_destination
    if not same and os.path.exists(real_source) and os.path.exists(real_destination):
        same = os.path.samefile(real_source, real_destination)
    if same:
        raise OutputRefused(
            f"{os.fspath(destination)}: the output is the input; expected another path"
        )
    common = os.path.commonpath([real_source, real_destination])
    if common == real_destination or (common == real_source and os.path.isdir(real_source)):
        raise OutputRefused(
            f"{os.fspath(destination)}: one of the output and the input is inside the other; "
            "expected an output beside the input"
        )


def refuse_reading_from(destination: str | os.PathLike[str], paths: Iterable[str]) -> None:
    """Raises OutputRefused if replacing `destination` would delete a file that is read through a
    link into it."""
    real_destination = os.path.realpath(destination)
    for path in paths:
        if os.path.commonpath([os.path.realpath(path), real_destination]) == real_destination:
            raise OutputRefused(
                f"{os.fspath(destination)}: the output would replace what {path} is a link to"
            )
