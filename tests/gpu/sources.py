"""Hashes of code, without its comments and blanks: of what the GPU tests cover, and of what each
of the bench's figures depends on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The code that the GPU tests run, and the code that decides whether they passed.
COVERED = (
    "include/nf4/nf4.h",
    "lib/*.cpp",
    "lib/*.hpp",
    "lib/core/**/*",
    "lib/cuda/**/*",
    "tests/cuda/**/*",
    "tests/support/adapter.*",
    "tests/support/cases.*",
    "tests/support/device.*",
    "tests/support/families.hpp",
    "tests/support/force*.hpp",
    "tests/support/grouped_*",
    "tests/support/guarded.*",
    "tests/support/int4_cases.*",
    "tests/support/int4_matmul.hpp",
    "tests/support/kernels.*",
    "tests/support/launches.hpp",
    "tests/support/lora_grad_case.*",
    "tests/support/matmul_*",
    "tests/support/matrix.hpp",
    "tests/support/placed.*",
    "tests/support/random.*",
    "tests/support/values.*",
)
# Other files that the results of Python's tests on a GPU depend on; those by which a run is judged.
SCRIPTS = (
    "bindings/python/*.[ch]*",
    "bindings/python/**/*.py",
    "tests/python/**/*.py",
    "bench/**/*.py",
)
JUDGING = ("tests/gpu/gpu_*.py",)
_SHARED = ("lib/core/**/*", "lib/cuda/*", "lib/cuda/[prw]*/**/*")  # ptx, runtime, weight
_BINDINGS = (
    "bindings/python/*.[ch]*",
    "bindings/python/nf4/*.py",
    "bindings/python/nf4/torch/**/*.py",
)
_MEMORY = (*_SHARED, "lib/cuda/dequant/**/*", "lib/cuda/quantize/**/*")
_MATMUL = (*_SHARED, "lib/cuda/kinds/**/*", "lib/cuda/matmul/**/*")
_GRADIENT = ("lib/cuda/matmul_grad/**/*", "lib/cuda/lora/**/*")
_GROUPED = "lib/cuda/matmul_grouped/**/*"
# Code by the name of the figures in docs/bench/figures.json.
FIGURES = {
    "bench": _MEMORY,
    "challenge": (*_MEMORY, *_BINDINGS),
    "call": _BINDINGS,
    "matmul": _MATMUL,
    "int4": (*_MEMORY, *_MATMUL),
    "sweep": _MEMORY,
    "matmul-sweep": _MATMUL,
    "models": (*_MEMORY, *_MATMUL, *_GRADIENT, *_BINDINGS),
    "training": (*_MEMORY, *_MATMUL, *_GRADIENT, *_BINDINGS),
    "experts": (*_MATMUL, _GROUPED, *_BINDINGS),
    "families": (*_MEMORY, *_MATMUL, *_GRADIENT, _GROUPED, *_BINDINGS),
}

# A character that no other alternative begins with stands for itself. Words are matched whole, so
# that their last letter begins no raw string, and numbers, since 1'000 holds no character.
_C = re.compile(
    r"""(?P<keep>(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"
               | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
               | \.?\d(?:[eEpP][+-]|'?[\w.])* | [^\W\d]\w*)
      | (?P<comment>//(?:\\[^\S\n]*\n|[^\n])* | /\*.*?\*/)
      | (?P<blank>[^\S\n]+) | .""",
    re.VERBOSE | re.DOTALL,
)
# Meson and Python, where blanks that begin a line have a meaning.
_SCRIPT = re.compile(
    r"""(?P<keep>(?P<quotes>\"""|''')(?:\\.|.)*?(?P=quotes)
               | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' | (?<![^\n])[^\S\n]+(?=[^\s\#]))
      | (?P<comment>\#[^\n]*)
      | (?P<blank>[^\S\n]+) | .""",
    re.VERBOSE | re.DOTALL,
)
_OPENED, _CLOSE = (["("], ["["], ["{"]), tuple(")]},;")
_C_SUFFIXES = {".c", ".h", ".cpp", ".hpp", ".cu", ".cuh"}


def _lexer(path: Path) -> re.Pattern[str] | None:
    if path.suffix in _C_SUFFIXES:
        return _C
    return _SCRIPT if path.suffix == ".py" or path.name == "meson.build" else None


def code(text: str, lexer: re.Pattern[str]) -> str:
    """`text` without comments, empty lines and blanks that mean nothing. Lines stay lines."""
    text = text.replace("\r\n", "\n")
    parts = []
    for match in lexer.finditer(text):
        if match["comment"] is None:
            parts.append(" " if match["blank"] is not None else match[0])
        # Between two tokens a comment is a blank; next to a bracket or a comma it is nothing.
        elif text[match.end() : match.end() + 1] in _CLOSE:
            parts[-1:] = [part for part in parts[-1:] if part != " "]
        elif parts[-1:] not in _OPENED:
            parts.append(" ")
    # A literal keeps its blanks, also at the end of a line and before one that is empty.
    joined = ["\n"]
    for part in parts:
        if part == "\n" and joined[-1] == " ":
            joined.pop()
        if part not in (" ", "\n") or joined[-1] not in (" ", "\n"):
            joined.append(part)
    return "".join(joined).strip(" \n")


def _content(path: Path) -> bytes:
    lexer = _lexer(path)
    return code(path.read_text(), lexer).encode() if lexer else path.read_bytes()


def source_hash(root: Path = ROOT, patterns: Iterable[str] = COVERED) -> str:
    """SHA-256 over the paths and the code of the files of these patterns, in order of the paths."""
    files = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
        digest.update(hashlib.sha256(_content(path)).digest())
    return digest.hexdigest()


def changed(figures: dict, root: Path = ROOT) -> set[str]:
    """The names of those figures whose code is no longer what they were measured with."""
    return {
        name
        for name, patterns in FIGURES.items()
        if name in figures and figures[name]["sources"] != source_hash(root, patterns)
    }


if __name__ == "__main__":
    print(source_hash())
