"""The costs that `nf4 tune` measured: a file for each GPU in the user's cache folder, which the
library is given when it is loaded (nf4_set_costs in nf4.h describes the text). Nothing here asks
CUDA anything."""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nf4 import _abi

if TYPE_CHECKING:
    from nf4.info import Device

# Names a folder to use in place of the user's; "0" means that no costs are read.
VARIABLE = "NF4_COSTS"
_MOST_BYTES, _MOST_FILES = 64 << 10, 8
_END = "end\n"


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
    major, minor = gpu.compute_capability
    facts = (
        major * 10 + minor, gpu.dequant_variant, gpu.multiprocessors, gpu.shared_memory_bytes,
        gpu.driver_version, gpu.name,
    )  # fmt: skip
    return f"gpu {' '.join(map(str, facts))}"


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
        return ""
    return library.nf4_last_error().decode(errors="replace")


def store(text: str) -> Path:
    """Replaces the file of the GPU that the text is of, whole or not at all. Raises OSError."""
    path = path_of(text.splitlines()[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".costs-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def paths() -> list[Path]:
    """Returns the files that there are."""
    where = folder()
    try:
        return sorted(where.glob("costs-*.txt"))[:_MOST_FILES] if where else []
    except OSError:
        return []


def _read(path: Path, library: ctypes.CDLL) -> CostsFile:
    if not path.is_file():
        return CostsFile(path, "", "it is no regular file")
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        return CostsFile(path, "", str(error))
    if len(text) > _MOST_BYTES:
        return CostsFile(path, "", f"it has more than {_MOST_BYTES} bytes")
    refused = set_costs(library, text)
    return CostsFile(path, "" if refused else text, refused)


def load(library: ctypes.CDLL) -> list[CostsFile]:
    """Gives the library the costs of all files that it accepts. Returns all files."""
    files = [_read(path, library) for path in paths()]
    used = {file.gpu_line: file for file in files if not file.reason}
    set_costs(library, "".join(_joined(used.values())) if used else None)
    return files


def _joined(files: Iterable[CostsFile]) -> Iterator[str]:
    for number, file in enumerate(files):
        lines = file.text.splitlines(keepends=True)
        yield from lines[min(number, 1) : -1]
    yield _END
