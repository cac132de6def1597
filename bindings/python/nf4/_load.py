"""libnf4.so: found and loaded at the first call that needs it, and its errors raised."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nf4 import _abi, _costs
from nf4.errors import InvalidArgument, LibraryNotFound, error_of

_PACKAGE = Path(__file__).resolve().parent
_SONAME = "libnf4.so.0"
_INSTALLED = _PACKAGE / "lib" / _SONAME


def _candidate() -> str:
    """What to load: $NF4_LIBRARY, else the library in the package, else the loader's."""
    chosen = os.environ.get("NF4_LIBRARY")
    if chosen:
        return chosen
    return str(_INSTALLED) if _INSTALLED.exists() else _SONAME


def _load(path: str) -> ctypes.CDLL:
    try:
        loaded = _abi.bind(ctypes.CDLL(path))
    except OSError as error:
        raise LibraryNotFound(
            f"cannot load {path}: {error}; set NF4_LIBRARY to the path of libnf4.so, or "
            f"install this package with pip, which builds it"
        ) from error
    except AttributeError as error:
        raise LibraryNotFound(f"{path} is not the libnf4 of this package: {error}") from error
    major, minor = divmod(loaded.nf4_version() // 100, 100)
    # docs/abi.md: a later version of the same major one has all that this one has.
    if major != _abi.VERSION_MAJOR or minor < _abi.VERSION_MINOR:
        raise LibraryNotFound(
            f"{path} is libnf4 {loaded.nf4_version_string().decode()}; "
            f"this package needs {_abi.VERSION_MAJOR}.{_abi.VERSION_MINOR} or a later "
            f"{_abi.VERSION_MAJOR}.x"
        )
    return loaded


@functools.cache
def library() -> ctypes.CDLL:
    """The library, its functions declared, with the costs that the user measured. Raises
    LibraryNotFound."""
    loaded = _load(_candidate())
    _costs.load(loaded)
    return loaded


class Operation(NamedTuple):
    """The library's functions for an operation. workspace_size is None where no function has that
    name."""

    launch: Any
    cpu: Any
    workspace_size: Any


class Functions:
    """The library's operations on one kind of weight, found at their first use. With the prefix
    "nf4_", `dequant` is nf4_dequant_launch and nf4_dequant_cpu."""

    def __init__(self, library: ctypes.CDLL, prefix: str) -> None:
        self._library, self._prefix = library, prefix

    def __getattr__(self, name: str) -> Operation:
        library, name_in_c = self._library, self._prefix + name
        operation = Operation(
            getattr(library, f"{name_in_c}_launch"),
            getattr(library, f"{name_in_c}_cpu"),
            getattr(library, f"{name_in_c}_workspace_size", None),
        )
        setattr(self, name, operation)  # later uses find it without this method
        return operation


_functions = functools.cache(Functions)


def functions(prefix: str) -> Functions:
    """The Functions of the kind of weight with this prefix: one object for each kind."""
    return _functions(library(), prefix)


def library_path() -> str:
    """Returns the path or name by which the library was loaded. Raises LibraryNotFound."""
    return str(library()._name)


def get_include() -> str:
    """Returns the include folder for C and C++, which has nf4/nf4.h: the package's own, or that of
    the sources beside it.

    Raises FileNotFoundError if the package was installed without the header.
    """
    for folder in (_PACKAGE / "include", _PACKAGE.parents[2] / "include"):
        if (folder / "nf4" / "nf4.h").is_file():
            return str(folder)
    raise FileNotFoundError(f"no nf4.h in {_PACKAGE}: install libnf4 again with pip")


def get_library() -> str:
    """Returns the path of the shared library that this package calls, for a linker, dlopen or
    another language's FFI. The package's folder lib/ also has CMake and pkg-config files.

    Raises LibraryNotFound if there is no library, or only one that the loader finds by its name.
    """
    path = _candidate()
    # A bare name is for the loader, which does not search the current folder.
    if os.sep not in path or not os.path.isfile(path):
        raise LibraryNotFound(f"there is no file {path}; set NF4_LIBRARY to the path of libnf4.so")
    return os.path.abspath(path)


def _renamed(detail: str, names: Mapping[str, str]) -> str:
    """A detail with the caller's names for arguments. C's stand before a verb or at the end,
    which tells them from other words."""
    known = "|".join(re.escape(name) for name in names)
    pattern = rf"(?<![\w.])({known})(?= (?:is|overlaps|of product) |$)"
    return re.sub(pattern, lambda found: names[found[1]], detail)


def check(status: int, names: Mapping[str, str] | None = None) -> None:
    """Raises the exception for a status, with the library's detail. `names` are the caller's for
    arguments that have others in C."""
    if status == _abi.STATUS_OK:
        return
    error = error_of(status, library().nf4_last_error().decode(errors="replace"))
    if names and isinstance(error, InvalidArgument):
        error = error_of(status, _renamed(str(error), names))
    raise error
