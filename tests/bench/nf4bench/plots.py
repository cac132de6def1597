"""The plots, PNG and SVG, from the figures of the bench.

Each carries a digest of the figures and of this file in its metadata, by which a test knows
whether it is up to date: bytes differ between versions of matplotlib.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nf4bench import tables

Row = Mapping[str, Any]
NAMES = ("speedup", "of_limit", "roofline")
FORMATS = ("svg", "png")
STYLE = {
    "svg.hashsalt": "libnf4", "svg.fonttype": "none", "font.family": "DejaVu Sans",
    "font.size": 9, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip
MARKERS = {"bf16": "o", "fp16": "s", "fp32": "^"}
COLOURS = {"plain": "#0072b2", "pdl": "#d55e00"}
LIMITS = {"stream": "#333333", "read": "#009e73", "write": "#cc79a7"}


def digest(bench: Row) -> str:
    """SHA-256 of what the plots are made from and of."""
    made = hashlib.sha256(Path(__file__).read_bytes())
    made.update(json.dumps(bench, sort_keys=True).encode())
    return made.hexdigest()


def paths(folder: Path) -> list[Path]:
    return [folder / f"{name}.{each}" for name in NAMES for each in FORMATS]


def stale(folder: Path, bench: Row) -> list[Path]:
    """The plots that are missing or of other figures."""
    wanted = digest(bench).encode()
    return [p for p in paths(folder) if not p.is_file() or wanted not in p.read_bytes()]


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


def write(folder: Path, bench: Row) -> list[Path]:
    """Makes every plot; the files that were written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    label = digest(bench)
    metadata = {
        "svg": {"Date": None, "Creator": None, "Description": label},
        "png": {"Software": None, "Description": label},
    }
    with pyplot.rc_context(STYLE):
        for name in NAMES:
            figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
            globals()[name](axes, bench)
            if axes.get_legend_handles_labels()[0]:
                figure.legend(loc="outside lower center", ncols=6)
            for each in FORMATS:
                target = folder / f"{name}.{each}"
                figure.savefig(target, dpi=120, metadata=metadata[each])
            pyplot.close(figure)
    return paths(folder)
