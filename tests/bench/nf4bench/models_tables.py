"""The models' figures as text for a terminal and as markdown. Needs nothing but Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nf4bench.models_cases import FORMS, PEERS
from nf4bench.tables import NOTHING, markdown, shape_text

Row = Mapping[str, Any]
NAMES = {"bitsandbytes": "bitsandbytes", "dense": "dense"}
WORKS = {
    "decode": "decode",
    "prefill": "prefill",
    "training": "forward + backward",
    "mlp": "MLP, forward",
}


def layers_text(row: Row) -> str:
    return "1 layer" if row["layers"] == 1 else f"{row['layers']} layers"


def work_text(row: Row, times: str = "×") -> str:
    """The work and its size: sequences, and tokens of each."""
    size = f"batch {row['batch']}" if row["work"] == "decode" else (
        f"{row['batch']}{times}{row['tokens']}"
    )  # fmt: skip
    text = f"{WORKS[row['work']]} {size}"
    return f"{text}, {row['hidden']}/{row['intermediate']}" if row["work"] == "mlp" else text


def launch_text(row: Row) -> str:
    parts = ["compiled"] if row["compiled"] else []
    if row["launch"] == "graph":
        parts.append("CUDA graph")
    return ", ".join(parts) or "eager"


def _milliseconds(us: float) -> str:
    return f"{us / 1e3:.2f}" if us < 1e5 else f"{us / 1e3:.0f}"


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"


# ---- For a terminal ---------------------------------------------------------------------


def _form_text(name: str, figures: Row) -> str:
    low, high = figures["spread"]
    ratio = f" ({figures['ratio']:.2f}x)" if "ratio" in figures else ""
    return (
        f"{name} {figures['us']:.1f} us{ratio} ({low:.1f}..{high:.1f}) "
        f"{_gigabytes(figures['weights'])} + {_gigabytes(figures['step'])} GB"
    )


def line(row: Row) -> str:
    parts = [_form_text(name, figures) for name, figures in row["forms"].items()]
    parts += [f"{name} failed: {reason}" for name, reason in row["failed"].items()]
    if row["error"] is not None:
        parts.append(f"error {row['error']:.2e}")
    what = f"{work_text(row, 'x')}, {layers_text(row)}, {launch_text(row)}"
    return f"{what}: {', '.join(parts)}"


def call_text(figures: Row) -> str:
    lines = [f"host time of one layer's call at {shape_text(figures, 'x')}, M=1, microseconds"]
    for name, each in figures["forms"].items():
        lines.append(f"  {name:28} {each['us']:7.2f} ({each.get('ratio', 1):.2f}x)")
    lines += [f"  {name} failed: {reason}" for name, reason in figures["failed"].items()]
    return "\n".join(lines)


# ---- Markdown ---------------------------------------------------------------------------


def _time_cell(row: Row, name: str) -> str:
    if name not in row["forms"]:
        return "failed" if name in row["failed"] else NOTHING
    figures = row["forms"][name]
    ratio = f" ({figures['ratio']:.2f}x)" if "ratio" in figures else ""
    return _milliseconds(figures["us"]) + ratio


def _memory_cell(row: Row, name: str) -> str:
    if name not in row["forms"]:
        return NOTHING
    figures = row["forms"][name]
    return f"{_gigabytes(figures['weights'])} + {_gigabytes(figures['step'])}"


def rows_table(figures: Row, keep: Callable[[Row], bool]) -> str:
    """A line for each row that is wanted: milliseconds, and each peer's over ours."""
    head = ["work", "model", "launched", "ms", *(f"{NAMES[name]} ms (ratio)" for name in PEERS)]
    lines = [
        [work_text(row), layers_text(row), launch_text(row)]
        + [_time_cell(row, name) for name in FORMS]
        for row in figures["rows"]
        if keep(row)
    ]
    return markdown(head, len(FORMS), lines)


def memory_table(rows: Iterable[Row]) -> str:
    """Once for each work, of its first row: weights + what a step takes beside them, GB."""
    head = ["work", "model", "libnf4 GB", *(f"{NAMES[name]} GB" for name in PEERS)]
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        compiled = ", compiled" if row["compiled"] else ""
        identity = work_text(row) + compiled, layers_text(row)
        found.setdefault(identity, [_memory_cell(row, name) for name in FORMS])
    return markdown(head, len(FORMS), [[*key, *cells] for key, cells in found.items()])


def spread_table(rows: Iterable[Row]) -> str:
    """Every form of every row with its spread, and how far ours is from bitsandbytes."""
    head = ["work", "model", "launched", "form", "ms", "first..last decile", "error"]
    lines = []
    for row in rows:
        for name, figures in row["forms"].items():
            low, high = figures["spread"]
            error = NOTHING if name != "libnf4" or row["error"] is None else f"{row['error']:.2e}"
            lines.append([
                work_text(row), layers_text(row), launch_text(row), name,
                _milliseconds(figures["us"]), f"{_milliseconds(low)}..{_milliseconds(high)}", error,
            ])  # fmt: skip
    return markdown(head, 3, lines)


def call_table(figures: Row) -> str:
    head = [f"one eager call of a layer at {shape_text(figures)}, M = 1", "host µs", "ratio"]
    lines = [
        [name, f"{each['us']:.2f}", f"{each.get('ratio', 1):.2f}x"]
        for name, each in figures["forms"].items()
    ]
    return markdown(head, 2, lines)
