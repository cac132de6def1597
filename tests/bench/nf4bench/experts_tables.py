"""Makes the tables of experts. It needs only Python."""

from __future__ import annotations

from nf4bench.experts_cases import PEERS
from nf4bench.table import Cell, Row, Table, number, optional, text

_SPREAD = number("deciles", "{spread[0]:.1f}..{spread[1]:.1f}")


def _peer(name: str) -> Cell:
    made = optional(name, "{us:.1f} ({ratio:.2f}x)")
    return lambda row: made(row["peers"])


_IDENTITY = [text("model", "{model}"), text("work", "{work}"), number("tokens", "{tokens}")]
ROWS = Table(
    *_IDENTITY,
    number("libnf4 µs", "{us:.1f}"),
    *(number(f"{name} µs (ratio)", _peer(name)) for name in PEERS),
)


def _megabytes(row: Row) -> str:
    return f"{row['bytes'] / 1e6:.1f}"


def _error(row: Row) -> str:
    return f"{row['error']:.1e}"


DETAILS = Table(
    *_IDENTITY, number("active experts", "{active:.0f}"),
    number("MB of active experts", _megabytes), number("GB/s", "{gb_per_s:.0f}"), _SPREAD,
    number("error", _error),
)  # fmt: skip
CALLS = Table(
    text("call", "{name}"), number("µs", "{us:.2f}"), number("over grouped_mm", "{ratio:.2f}x"),
    _SPREAD,
)  # fmt: skip
DECODE = Table(
    text("experts", "{name}"), number("µs", "{us:.1f}"), number("over libnf4", "{ratio:.2f}x"),
    _SPREAD, number("error", _error),
)  # fmt: skip
