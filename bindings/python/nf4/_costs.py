"""The costs that `nf4 tune` measured: a file for each GPU in the user's cache folder, which the
library is given when it is loaded (nf4_set_costs in nf4.h describes the text). Nothing here asks
CUDA anything."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from nf4 import _abi

if TYPE_CHECKING:
    from nf4.info import Device

# Names a folder to use in place of the user's; "0" means that no costs are read.
VARIABLE = "NF4_COSTS"
_MOST_BYTES = 64 << 10
_MOST_GPUS = 8  # the most GPUs in a text
_END = "end\n"
# The handles of the libraries that have costs of this module. Costs that the program set by
# nf4_set_costs are not removed.
_given: set[int] = set()


@dataclass(frozen=True)
class CostsFile:
    """A file of costs. `reason` says why it is not used; it is "" for one that is."""

    path: Path
    text: str
    reason: str = ""

    @property
    def gpu_line(self) -> str:
        lines = self.text.splitlines()
        return lines[1] if len(lines) > 1 else ""

    @property
    def products(self) -> list[str]:
        """Returns the products that have costs."""
        return list(dict.fromkeys(line.split(" ", 1)[0] for line in self.text.splitlines()[2:-1]))


def folder() -> Path | None:
    """Returns the folder of the files, which need not exist. None means that there is none."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return None if chosen == "0" else Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or ""
    try:
        return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "libnf4"
    except RuntimeError:  # there is no home
        return None


def gpu_line(gpu: Device) -> str:
    """Returns the line of a text of costs that says which GPU they are of."""
    return line_of(
        gpu.compute_capability, gpu.dequant_variant, gpu.multiprocessors, gpu.shared_memory_bytes,
        gpu.driver_version, gpu.name,
    )  # fmt: skip


def line_of(compute_capability: Sequence[int], *facts: int | str) -> str:
    """The same from the facts, in the order of the line."""
    major, minor = compute_capability
    return f"gpu {major * 10 + minor} {' '.join(map(str, facts))}"


def path_of(line: str) -> Path:
    """Returns the file for the costs of a GPU. Raises OSError where there is no folder."""
    where = folder()
    if where is None:
        raise OSError(f"there is no folder for costs: {VARIABLE} is 0, or there is no home")
    return where / f"costs-{hashlib.sha256(line.encode()).hexdigest()[:16]}.txt"


def text_of(line: str, rows: Iterable[str], version: str) -> str:
    """Returns the costs of one GPU as a text."""
    return "\n".join([f"nf4-costs 1 {version}", line, *rows, _END])


def set_costs(library: ctypes.CDLL, text: str | None) -> str:
    """Returns why the library refuses the text, or ""."""
    encoded = None if text is None else text.encode()
    if library.nf4_set_costs(encoded, len(encoded or b"")) == _abi.STATUS_OK:
        (_given.discard if text is None else _given.add)(library._handle)
        return ""
    return library.nf4_last_error().decode(errors="replace")


def store(text: str) -> Path:
    """Replaces the file of the GPU that the text is of, whole or not at all. Raises OSError."""
    path = path_of(text.splitlines()[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(text.encode())
    return path


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yields a new file that takes the place of `path` once the caller has written all of it. Any
    exception leaves what was there. Raises OSError."""
    temporary = path.with_name(f".{path.name[:64]}-{secrets.token_hex(8)}")
    new = open(temporary, "xb")  # with the usual permissions
    try:
        with new as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def paths() -> list[Path]:
    """Returns the files that there are, the newest first."""
    return _files("costs-*.txt")


def unfinished() -> list[Path]:
    """Returns the files that writers left which were killed, or are still writing."""
    return _files(".costs-*.txt-*")


def _files(pattern: str) -> list[Path]:
    where = folder()
    try:
        return sorted(where.glob(pattern), key=_age) if where else []
    except OSError:
        return []


def _age(path: Path) -> tuple[float, Path]:
    try:
        return -path.stat().st_mtime_ns, path
    except OSError:
        return math.inf, path


def _read(path: Path, library: ctypes.CDLL) -> CostsFile:
    try:
        if not path.is_file():
            return CostsFile(path, "", "it is not a regular file")
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        return CostsFile(path, "", str(error))
    if len(text) > _MOST_BYTES:
        return CostsFile(path, "", f"it has more than {_MOST_BYTES} bytes")
    refused = set_costs(library, text)
    return CostsFile(path, "" if refused else text, refused)


def load(library: ctypes.CDLL) -> list[CostsFile]:
    """Gives the library the costs of all files that it accepts together, of which the newest come
    first. Returns all files."""
    files: list[CostsFile] = []
    used: list[CostsFile] = []
    for path in paths():
        file = _beside(used, path, library)
        files.append(file)
        used += [] if file.reason else [file]
    if used:
        set_costs(library, _joined(used))
    elif library._handle in _given:
        set_costs(library, None)
    return files


def _beside(used: Sequence[CostsFile], path: Path, library: ctypes.CDLL) -> CostsFile:
    """Returns a file, with a reason if its costs are not used beside those of newer files."""
    if len(used) == _MOST_GPUS:
        return CostsFile(path, "", f"the costs of {_MOST_GPUS} newer files are used")
    file = _read(path, library)
    if file.reason or not used:
        return file
    if file.gpu_line in (newer.gpu_line for newer in used):
        return CostsFile(path, "", "a newer file has costs of the same GPU")
    refused = set_costs(library, _joined([*used, file]))
    return CostsFile(path, "", f"beside those of newer files: {refused}") if refused else file


def _joined(files: Iterable[CostsFile]) -> str:
    """Returns one text with the costs of several files."""
    lines = [file.text.splitlines(keepends=True) for file in files]
    return "".join([lines[0][0], *(line for each in lines for line in each[1:-1]), _END])
