"""The C library of the bench through ctypes: the rooflines, and every launch configuration.

bench_library.hpp is the manual, from which the functions' types are read."""

from __future__ import annotations

import ctypes
import re
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from nf4 import _abi

from nf4bench.errors import LaunchFailed, LibraryMissing, Refused

HEADER = Path(__file__).resolve().parents[1] / "bench_library.hpp"
_TYPES = {
    "int": c_int, "int64_t": c_int64, "size_t": c_size_t, "nf4_dtype": _abi.Dtype,
    "nf4_status": _abi.Status, "nf4_stream": c_void_p,
}  # fmt: skip


def _type(declaration: str) -> Any:
    base, *rest = declaration.split()
    pointer = c_char_p if base == "char" else c_void_p
    return pointer if "*" in "".join(rest) else _TYPES[base]


def functions() -> dict[str, tuple[Any, list[Any]]]:
    """Result and arguments of each function, by its name without nf4_bench_."""
    code = re.sub(r"//[^\n]*|\bconst\b|\n", " ", HEADER.read_text())
    return {
        name: (_type(result), [_type(each) for each in given.split(",") if given != "void"])
        for result, name, given in re.findall(r"NF4_API (.*?)nf4_bench_(\w+)\((.*?)\);", code)
    }


PLAIN = -1  # in place of a configuration's index: the library's choice launched plainly


def path_in(build: Path) -> Path:
    return build / "bench" / "libnf4_bench.so"


class Library:
    """Arguments are addresses, structures, sizes in bytes, and the stream's address last."""

    def __init__(self, build: Path) -> None:
        path = path_in(build)
        self._c: dict[str, Any] = {}
        try:
            library = ctypes.CDLL(str(path))
            for name, (restype, argtypes) in functions().items():
                function = self._c[name] = getattr(library, f"nf4_bench_{name}")
                function.restype, function.argtypes = restype, argtypes
        except OSError as error:
            raise LibraryMissing(f"{error}; ./dev build makes it where there is CUDA") from error
        except AttributeError as error:
            raise LibraryMissing(f"{path} is not of these sources: {error}") from error

    def call(self, name: str, *arguments: Any) -> Any:
        """What a function returns; structures are passed by reference."""
        return self._c[name](
            *(ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in arguments)
        )

    def launch(self, name: str, *arguments: Any) -> None:
        """Raises LaunchFailed; Refused where a kernel configuration cannot do a product."""
        status = self.call(name, *arguments)
        if name == "matmul_as" and status == _abi.STATUS_INVALID_ARGUMENT:
            raise Refused(f"the configuration {arguments[0]} of matmul cannot do it")
        if status != 0:
            raise LaunchFailed(f"nf4_bench_{name} returned {status}")

    def has_pdl(self) -> bool:
        """Does libnf4 launch with programmatic dependent launch, on the current GPU?"""
        return bool(self.call("has_pdl"))

    def variants(self, kernel: str) -> range:
        """The launch variants of "dequant_traffic", "quantize_traffic", "read" or "write"."""
        return range(self.call(f"{kernel}_variants"))

    def configurations(self, operation: str) -> list[str]:
        """The names of the launch configurations of "dequant" or "matmul", by index."""
        count = self.call(f"{operation}_configurations")
        return [self.call(f"{operation}_configuration", index).decode() for index in range(count)]

    def chosen(self, operation: str, *arguments: Any) -> int:
        """The index of the configuration that libnf4 itself takes; negative: one of none."""
        return self.call(f"{operation}_chosen", *arguments)
