"""The hash that ties record.json to the sources that a GPU has run."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COVERED = ("include", "lib/core", "lib/cuda")
# What every GPU call passes through besides, and what decides whether it passed.
COVERED_FILES = (
    "lib/api.cpp",
    "lib/problem.hpp",
    "lib/status.cpp",
    "lib/status.hpp",
    "lib/validate.cpp",
    "lib/validate.hpp",
)
COVERED_PATTERNS = (
    "tests/check_cuda*.cpp",
    "tests/support/cases.*",
    "tests/support/device.*",
    "tests/support/families.hpp",
    "tests/support/force*.hpp",
    "tests/support/kernels.*",
    "tests/support/matmul_*",
    "tests/support/random.*",
    "tests/support/values.*",
)


def source_hash(root: Path = ROOT) -> str:
    """SHA-256 over the paths and contents of the covered files, in the order of the paths."""
    files = [path for folder in COVERED for path in (root / folder).rglob("*") if path.is_file()]
    files += [root / name for name in COVERED_FILES]
    files += [path for pattern in COVERED_PATTERNS for path in root.glob(pattern)]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
