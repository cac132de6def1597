"""The plots, as SVG files that say which figures they are of.

Each carries a digest of the figures and of this code in its metadata, by which a test knows whether
it is up to date: bytes differ between versions of matplotlib.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nf4bench import experts_cases
from nf4bench.table import Row, grouped, shape
from nf4bench.tables import NAMES

STYLE = {
    "svg.hashsalt": "libnf4", "svg.fonttype": "none", "font.family": "DejaVu Sans",
    "font.size": 10, "axes.titlesize": 10, "figure.titlesize": 11,
    "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip
COLOURS = {"plain": "#0072b2", "pdl": "#d55e00"}
# With programmatic dependent launch a kernel starts while the one before it ends.
LAUNCHES = {"plain": "", "pdl": ", early start (PDL)"}
LABELS = NAMES | {
    "dense": "unquantized weight (cuBLAS)",
    "humming": "Humming (4-bit library)",
    "tinygemm": "torch's int4 matmul",
}
WIDTH, HEIGHT = 5, 3.4  # inches of a panel: so narrow that a telephone shows letters of 11 pixels
PEERS = {
    "bitsandbytes": "#cc79a7", "dense": "#009e73", "humming": "#56b4e9", "tinygemm": "#e69f00",
}  # fmt: skip
EXPERTS = {
    experts_cases.DENSE: "#009e73", experts_cases.DEQUANTIZED: "#cc79a7",
    experts_cases.GROUPED_NF4: "#e69f00",
}  # fmt: skip
DARK = "#333333"


# ---- Dequantize and quantize ------------------------------------------------------------


def _usual(bench: Row) -> list[Row]:
    """Dequantize as most have it: bf16, NF4, nested, blocks of 64, aligned, even, no PDL."""
    wanted = {
        "work": "dequantize", "nested": True, "blocksize": 64, "format": "nf4",
        "placement": "aligned", "dtype": "bf16", "launch": "plain",
    }  # fmt: skip
    even = (row for row in bench["rows"] if row["shape"][1] % 64 == 0)
    return [row for row in even if wanted.items() <= row.items()]


def speedup(axes: Any, bench: Row) -> None:
    """Bars: each peer's time over ours, by shape."""
    rows = [row for row in _usual(bench) if row["peers"]]
    rows.sort(key=lambda row: row["shape"][0] * row["shape"][1])
    # torch's own operators are so much slower that nothing else could be seen beside them.
    shown = [name for name in bench["peers"] if name != "torch"]
    names = [name for name in shown if any(name in row["peers"] for row in rows)]
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        found = [(at, row["peers"][name]) for at, row in enumerate(rows) if name in row["peers"]]
        where = [at + (index - (len(names) - 1) / 2) * width for at, _ in found]
        axes.bar(where, [peer["ratio"] for _, peer in found], width, label=LABELS[name])
    axes.axhline(1, color=DARK, linewidth=1)
    axes.set_xticks(range(len(rows)), [shape(row) for row in rows], rotation=45)
    axes.set(ylabel="time over libnf4's (1: as fast)", xlabel="weight")


# ---- Matmul -----------------------------------------------------------------------------


def _by_weight(matmul: Row) -> dict[str, list[Row]]:
    """The rows of single weights in bf16, by shape."""
    rows = [row for row in matmul["rows"] if row["dtype"] == "bf16" and row["weights"] == 1]
    return grouped(rows, shape)


def _lines(rows: Sequence[Row], peers: Iterable[str]) -> Iterable[tuple[str, str, str, list]]:
    """A label, a colour, how it is drawn, and the points: M, microseconds."""
    by_launch = grouped(rows, lambda row: row["launch"])
    for launch, colour in COLOURS.items():
        points = [(row["m"], row["us"]) for row in by_launch.get(launch, ())]
        yield f"libnf4{LAUNCHES[launch]}", colour, "o-", points
    plain = by_launch.get("plain", [])
    for name in peers:
        points = [(row["m"], row["peers"][name]["us"]) for row in plain if name in row["peers"]]
        yield LABELS[name], PEERS[name], ".-", points
    read = [(row["m"], row["roofline"]["us"]) for row in plain]
    yield "limit: read the weight once", DARK, "--", read


def _draw(axes: Any, lines: Iterable[tuple[str, str, str, list]]) -> None:
    for label, colour, style, points in lines:
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, style, color=colour, label=label, linewidth=1, markersize=4)


def _logarithmic(axes: Any, x: str, title: str = "") -> None:
    axes.set_xscale("log", base=2)
    ticks = [2**power for power in range(0, 13, 2)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(yscale="log", xlabel=x, ylabel="µs (lower is better)", title=title)
    axes.yaxis.set_major_formatter("{x:g}")


def overview(axes: Any, matmul: Row) -> None:
    """README's: the first weight, launched plainly, beside what readers know."""
    for title, rows in list(_by_weight(matmul).items())[:1]:
        plain = [row for row in rows if row["launch"] == "plain"]
        _draw(axes, _lines(plain, [name for name in matmul["peers"] if name != "tinygemm"]))
        _logarithmic(axes, "rows of x (tokens in a batch)", f"NF4 weight of {title}, bf16 x")


def time_by_rows(panels: Sequence[Any], matmul: Row) -> None:
    """Log-log, a panel for each weight in bf16: ours, the peers, the roofline."""
    by_weight = _by_weight(matmul)
    for axes, (title, rows) in zip(panels, by_weight.items(), strict=True):
        _draw(axes, _lines(rows, matmul["peers"]))
        _logarithmic(axes, "rows of x (tokens in a batch)", f"NF4 weight of {title}, bf16 x")


# ---- Experts ----------------------------------------------------------------------------


def _by_stack(experts: Row) -> dict[str, list[Row]]:
    return grouped(experts["rows"], lambda row: f"{row['model']}, {row['work']}")


def time_by_tokens(panels: Sequence[Any], experts: Row) -> None:
    """Log-log, a panel for each work of each model: ours and the peers."""
    for axes, (title, rows) in zip(panels, _by_stack(experts).items(), strict=True):
        ours = [(row["tokens"], row["us"]) for row in rows]
        lines = [("libnf4", COLOURS["plain"], "o-", ours)]
        for name, colour in EXPERTS.items():
            some = [row for row in rows if name in row["peers"]]
            points = [(row["tokens"], row["peers"][name]["us"]) for row in some]
            label = "unquantized (grouped_mm)" if name == experts_cases.DENSE else name
            lines.append((label, colour, ".-", points))
        _draw(axes, lines)
        _logarithmic(axes, "tokens", title)


# ---- Files ------------------------------------------------------------------------------


class Plot(NamedTuple):
    title: str  # "{}" is the GPU
    draw: Callable  # onto one axes, or onto one for each of `panels`
    panels: Callable | None = None


# The plots, by the name of their figures.
PLOTS: dict[str, dict[str, Plot]] = {
    "bench": {
        "speedup": Plot(
            "Dequantize NF4 (double quantization) on one {}:\nhow much longer others take, to bf16",
            speedup,
        ),
    },
    "matmul": {
        "matmul": Plot("Time of a matmul with a 4-bit weight, one {}", overview),
        "matmul_by_weight": Plot(
            "Time of a matmul with a 4-bit weight, one {}", time_by_rows, _by_weight
        ),
    },
    "experts": {
        "experts": Plot("Time of experts with 4-bit weights, one {}", time_by_tokens, _by_stack)
    },
}


def _drawn(pyplot: Any, plot: Plot, figures: Row) -> Any:
    """With one legend for all panels, each label once."""
    rows = max(1, len(plot.panels(figures))) if plot.panels else 1
    size = {"figsize": (WIDTH, HEIGHT * rows + 1), "squeeze": False}
    figure, grid = pyplot.subplots(rows, 1, layout="constrained", **size)
    figure.suptitle(plot.title.format(figures["device"]))
    if plot.panels is None:
        plot.draw(grid[0, 0], figures)
    else:
        plot.draw(list(grid.flat)[: len(plot.panels(figures))], figures)
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=2)
    return figure


def digest(figures: Row) -> str:
    """SHA-256 of what the plots are made from and of."""
    made = hashlib.sha256(Path(__file__).read_bytes())
    made.update(json.dumps(figures, sort_keys=True).encode())
    return made.hexdigest()


def paths(folder: Path, name: str) -> list[Path]:
    return [folder / f"{file}.svg" for file in PLOTS[name]]


def stale(folder: Path, name: str, figures: Row) -> list[Path]:
    """The plots that are missing or of other figures."""
    wanted = digest(figures).encode()
    return [p for p in paths(folder, name) if not p.is_file() or wanted not in p.read_bytes()]


def write(folder: Path, name: str, figures: Row) -> list[Path]:
    """Makes every plot of these figures, one of PLOTS; the files that were written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    metadata = {"Date": None, "Creator": None, "Description": digest(figures)}
    with pyplot.rc_context(STYLE):
        for path, plot in zip(paths(folder, name), PLOTS[name].values(), strict=True):
            figure = _drawn(pyplot, plot, figures)
            figure.savefig(path, metadata=metadata)
            pyplot.close(figure)
    return paths(folder, name)
