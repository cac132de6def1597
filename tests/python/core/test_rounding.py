"""The 16-bit codebooks of lib/core/formats.hpp and the figures of its comment are those of the tool
that is said to have found them."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import round_codebooks  # noqa: E402


def without_spaces(text: str) -> str:
    return "".join(text.split())


def test_tables_are_what_the_tool_finds() -> None:
    header = (ROOT / "lib" / "core" / "formats.hpp").read_text()
    assert round_codebooks.figures() in header
    for name in round_codebooks.FORMATS:
        assert without_spaces(round_codebooks.tables(name)) in without_spaces(header)
