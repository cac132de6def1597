"""The plots of dequantize and quantize."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nf4bench import tables
from nf4bench.drawing import Plot, Plots

Row = Mapping[str, Any]
MARKERS = {"bf16": "o", "fp16": "s", "fp32": "^"}
COLOURS = {"plain": "#0072b2", "pdl": "#d55e00"}
LIMITS = {"stream": "#333333", "read": "#009e73", "write": "#cc79a7"}


def _plain_nf4(rows: Iterable[Row]) -> list[Row]:
    """Dequantize as most have it: NF4, nested, blocks of 64, aligned, even."""
    common = {
        "work": "dequantize", "nested": True, "blocksize": 64, "format": "nf4",
        "placement": "aligned",
    }  # fmt: skip
    return [
        row for row in rows
        if all(row[name] == value for name, value in common.items()) and row["shape"][1] % 64 == 0
    ]  # fmt: skip


def _area(row: Row) -> int:
    return row["shape"][0] * row["shape"][1]


def speedup(axes: Any, bench: Row) -> None:
    """Bars: each peer's time over ours, bf16, launched plainly, by shape."""
    rows = [
        row for row in _plain_nf4(bench["rows"])
        if row["dtype"] == "bf16" and row["launch"] == "plain" and row["peers"]
    ]  # fmt: skip
    rows.sort(key=_area)
    # torch's own operators are so much slower that nothing else could be seen beside them.
    names = [
        name for name in bench["peers"]
        if name != "torch" and any(name in row["peers"] for row in rows)
    ]  # fmt: skip
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        found = [(at, row["peers"][name]) for at, row in enumerate(rows) if name in row["peers"]]
        where = [at + (index - (len(names) - 1) / 2) * width for at, _ in found]
        axes.bar(where, [peer["ratio"] for _, peer in found], width, label=tables.NAMES[name])
    axes.axhline(1, color="#333333", linewidth=1)
    axes.set_xticks(range(len(rows)), [tables.shape_text(row) for row in rows], rotation=45)
    axes.set_ylabel("time over libnf4's")
    axes.set_title("Dequantize to bf16, nested, plain launches: speed-up over each peer")


def of_limit(axes: Any, bench: Row) -> None:
    """Points: percent of the same-traffic stream kernel by megabytes of output."""
    rows = _plain_nf4(bench["rows"])
    for launch, colour in COLOURS.items():
        for dtype, marker in MARKERS.items():
            chosen = [row for row in rows if (row["launch"], row["dtype"]) == (launch, dtype)]
            if chosen:
                itemsize = 4 if dtype == "fp32" else 2
                axes.plot(
                    [_area(row) * itemsize / 1e6 for row in chosen],
                    [100 * row["of_limit"] for row in chosen],
                    marker, color=colour, fillstyle="none" if dtype == "fp16" else "full",
                    label=f"{dtype}, {'PDL' if launch == 'pdl' else 'plain'}",
                )  # fmt: skip
    axes.axhline(100, color="#333333", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("output, MB")
    axes.set_ylabel("percent of the stream kernel launched alike")
    axes.set_title("Dequantize, nested: how near to the limit")


def _roof(rows: Iterable[Row], bound: str) -> tuple[list[float], list[float]]:
    """Megabytes that a limit's kernel moves, and GB/s, by size."""
    points = set()
    for row in rows:
        limit = row["limit"] | {"bytes": row["bytes"]} if bound == "stream" else row.get(bound)
        if limit:
            points.add((limit["bytes"] / 1e6, limit["bytes"] / limit["us"] / 1e3))
    return tuple(zip(*sorted(points), strict=True)) if points else ((), ())


def roofline(axes: Any, bench: Row) -> None:
    """GB/s by megabytes moved, between the lines of the limits."""
    rows = [row for row in _plain_nf4(bench["rows"]) if row["launch"] == "plain"]
    for bound, colour in LIMITS.items():
        label = {"stream": "stream of the same bytes", "read": "read only", "write": "write only"}
        axes.plot(*_roof(rows, bound), color=colour, linewidth=1, label=label[bound])
    for dtype, marker in MARKERS.items():
        chosen = [row for row in rows if row["dtype"] == dtype]
        axes.plot(
            [row["bytes"] / 1e6 for row in chosen], [row["gb_per_s"] for row in chosen], marker,
            fillstyle="none" if dtype == "fp16" else "full", color=COLOURS["plain"],
            label=f"libnf4, {dtype}",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes moved, MB")
    axes.set_ylabel("GB/s")
    axes.set_title("Dequantize, nested, plain launches: memory speed by size")


PLOTS = Plots(
    __file__,
    {"speedup": Plot(speedup), "of_limit": Plot(of_limit), "roofline": Plot(roofline)},
)
