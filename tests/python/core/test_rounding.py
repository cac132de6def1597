"""The tables and figures of lib/core/rounding.hpp are those of the tool that is said to have found
them."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import round_codebooks  # noqa: E402


def test_tables_are_what_the_tool_finds() -> None:
    header = (ROOT / "lib" / "core" / "rounding.hpp").read_text()
    assert round_codebooks.tables() in header
    assert round_codebooks.figures() in header
    assert header.count("constexpr RoundedCodebook") == len(round_codebooks.KINDS)
