"""The program of examples/cpp/llama."""

from pathlib import Path

import nf4
import pytest


def program() -> Path:
    """Where Meson put it, beside the library; skips the test where it did not."""
    path = Path(nf4.library_path()).parents[1] / "examples" / "cpp_llama"
    if not path.exists():
        pytest.skip(f"not built: {path}; -Dexamples=enabled")
    return path
