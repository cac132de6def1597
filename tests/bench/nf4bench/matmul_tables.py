"""Matmul's figures as text for a terminal and as markdown. Needs nothing but Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nf4bench.tables import NOTHING, markdown, shape_text, sweep_best, sweep_cell, sweep_mark

Row = Mapping[str, Any]
NAMES = {"bitsandbytes": "bitsandbytes", "dense": "dense", "tinygemm": "int4"}
_IDENTITY = ("shape", "weights", "m", "dtype", "nested")


def kind_text(row: Row) -> str:
    """What sets a row's weight apart besides its shape."""
    return f"{row['dtype']}, {'nested' if row['nested'] else 'flat'}"


# ---- For a terminal ---------------------------------------------------------------------


def line(row: Row) -> str:
    low, high = row["spread"]
    weights = f"{row['weights']} x " if row["weights"] > 1 else ""
    text = (
        f"matmul {weights + shape_text(row, 'x'):>14} M={row['m']:<4} {kind_text(row)}"
        f"{', PDL' if row['launch'] == 'pdl' else ''}, {row['kernel']}: {row['us']:.2f} us "
        f"({low:.2f}..{high:.2f}) {row['tflop_per_s']:.0f} TFLOP/s, {row['of_floor']:.1%} of "
        f"reading {row['floor']['us']:.2f} us, error {row['error']:.2e}"
    )
    if "apart" in row:
        text += f", a call each {row['apart']['us']:.2f} us ({row['apart']['ratio']:.2f}x)"
    for name, peer in row["peers"].items():
        text += f", {name} {peer['us']:.2f} us ({peer['ratio']:.2f}x)"
    return text


def error_line(row: Row) -> str:
    errors = ", ".join(f"{name} {error:.2e}" for name, error in row["errors"].items())
    return (
        f"error {shape_text(row, 'x'):>11} M={row['m']:<4} {kind_text(row)}, {row['x']}: {errors}"
    )


def call_text(figures: Row) -> str:
    lines = []
    for kind, title in (("host", "host time of one call"), ("waited", "one call, waited for")):
        lines.append(f"matmul {shape_text(figures, 'x')} M={figures['m']}, {title}, microseconds")
        for name, each in figures[kind].items():
            lines.append(f"  {name:28} {each['us']:7.2f} ({each['ratio']:.2f}x)")
    return "\n".join(lines)


def sweep_line(figures: Row, row: Row) -> str:
    names, best, chosen = figures["configurations"], sweep_best(row), row["chosen"]
    return (
        f"{shape_text(row, 'x'):>11} M={row['m']:<4} {row['dtype']}: best {names[best]} "
        f"{row['times'][best]['us']:.2f} us; chosen {names[chosen]} "
        f"{sweep_cell(row['times'][chosen])}"
    )


# ---- Markdown ---------------------------------------------------------------------------


def by_launch(rows: Iterable[Row]) -> list[dict[str, Row]]:
    """The rows of one product together: {"plain": row, "pdl": row}, or "plain" alone."""
    products: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        identity = tuple(str(row[name]) for name in _IDENTITY)
        products.setdefault(identity, {})[row["launch"]] = row
    return list(products.values())


def _peer_cell(row: Row, name: str, peers: Mapping[str, Row]) -> str:
    found = row["peers"].get(name)
    if found:
        return f"{found['us']:.1f} ({found['ratio']:.2f}x)"
    return "missing" if "missing" in peers.get(name, {}) else NOTHING


def _apart_cell(row: Row | None) -> str:
    if row is None or "apart" not in row:
        return NOTHING
    return f"{row['apart']['us']:.1f} ({row['apart']['ratio']:.2f}x)"


def _with_pdl(product: Mapping[str, Row]) -> list[str]:
    row = product.get("pdl")
    return [f"{row['us']:.1f}", f"{row['of_floor']:.0%}"] if row else [NOTHING, NOTHING]


def rows_table(figures: Row, keep: Callable[[Row], bool], several: bool = False) -> str:
    """A line for each product that is wanted, both ways to launch in it. several: of several
    weights, so that there are calls for each to compare with."""
    peers = [f"{NAMES[name]} µs (ratio)" for name in figures["peers"]]
    apart = ["a call each µs (ratio)", "with PDL µs (ratio)"] if several else []
    head = [
        "shape", "weight", "M", "µs", "of the floor", "with PDL µs", "of its floor", *apart, *peers,
    ]  # fmt: skip
    lines = []
    for product in by_launch(figures["rows"]):
        row = product["plain"]
        if keep(row):
            lines.append([
                shape_text(row), kind_text(row), str(row["m"]), f"{row['us']:.1f}",
                f"{row['of_floor']:.0%}", *_with_pdl(product),
                *([_apart_cell(row), _apart_cell(product.get("pdl"))] if several else []),
                *(_peer_cell(row, name, figures["peers"]) for name in figures["peers"]),
            ])  # fmt: skip
    return markdown(head, len(head) - 2, lines)


def spread_table(rows: Iterable[Row]) -> str:
    """Every row with its kernel, its spread and its error."""
    head = [
        "shape", "weight", "launch", "kernel", "M", "µs", "first..last decile", "TFLOP/s",
        "floor µs", "error",
    ]  # fmt: skip
    lines = []
    for row in rows:
        low, high = row["spread"]
        weights = f"{row['weights']} of " if row["weights"] > 1 else ""
        lines.append([
            weights + shape_text(row), kind_text(row), row["launch"], row["kernel"],
            str(row["m"]), f"{row['us']:.2f}", f"{low:.2f}..{high:.2f}",
            f"{row['tflop_per_s']:.0f}", f"{row['floor']['us']:.2f}", f"{row['error']:.2e}",
        ])  # fmt: skip
    return markdown(head, 6, lines)


def over_dense(row: Row) -> float:
    """Our error over that of a dense product with the rounded weight."""
    return row["errors"]["libnf4"] / row["errors"]["dense"]


def error_table(rows: Iterable[Row]) -> str:
    """A line for each kind of weight and of x and each M: the largest over all shapes."""
    lines: dict[tuple, list[Row]] = {}
    for row in rows:
        lines.setdefault((kind_text(row), row["x"], str(row["m"])), []).append(row)
    names = ("libnf4", "bitsandbytes", "dense")
    made = []
    for identity, found in lines.items():
        worst = [max(row["errors"].get(name, 0) for row in found) for name in names]
        ratios = [over_dense(row) for row in found if "dense" in row["errors"]]
        made.append([
            *identity, *(f"{error:.2e}" if error else NOTHING for error in worst),
            f"{max(ratios):.3f}x" if ratios else NOTHING,
        ])  # fmt: skip
    return markdown(["weight", "x", "M", *names, "libnf4 over dense"], 5, made)


def call_table(figures: Row) -> str:
    head = [
        f"one call at {shape_text(figures)}, M = {figures['m']}", "host µs", "ratio",
        "waited for µs", "ratio",
    ]  # fmt: skip
    lines = []
    for name, host in figures["host"].items():
        waited = figures["waited"][name]
        lines.append([
            NAMES.get(name, name), f"{host['us']:.2f}", f"{host['ratio']:.2f}x",
            f"{waited['us']:.1f}", f"{waited['ratio']:.2f}x",
        ])  # fmt: skip
    return markdown(head, 4, lines)


def sweep_tables(figures: Row) -> str:
    """A table for each weight: kernels by rows of x, each its time over the best one's; the best
    has its microseconds, and the library's choice is bold."""
    parts = [
        f"Measured on one {figures['device']}, nested, blocksize 64, launched as the library does: "
        "times over the best of each column, which has its microseconds; what the library chooses "
        "is bold."
    ]
    by_weight: dict[str, list[Row]] = {}
    for row in figures["rows"]:
        by_weight.setdefault(f"{shape_text(row)} {row['dtype']}", []).append(row)
    for weight, rows in by_weight.items():
        head = [f"{weight}: kernel", *(f"M = {row['m']}" for row in rows)]
        lines = [
            [name, *(sweep_mark(row, index) for row in rows)]
            for index, name in enumerate(figures["configurations"])
        ]
        parts.append(markdown(head, len(rows), lines))
    return "\n\n".join(parts)
