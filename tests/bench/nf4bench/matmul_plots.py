"""The plot of matmul: time by rows of x."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nf4bench import matmul_tables, tables
from nf4bench.drawing import Plot, Plots

Row = Mapping[str, Any]
OURS = {"plain": "#0072b2", "pdl": "#d55e00"}
PEERS = {"bitsandbytes": "#cc79a7", "dense": "#009e73", "tinygemm": "#e69f00"}
FLOOR = "#333333"


def _lines(rows: Sequence[Row], peers: Mapping[str, Row]) -> dict[str, tuple[str, str, list]]:
    """By label, a colour, how it is drawn, and the points: M, microseconds."""
    plain = [row for row in rows if row["launch"] == "plain"]
    found = {
        f"libnf4{', PDL' if launch == 'pdl' else ''}": (
            colour, "o-", [(row["m"], row["us"]) for row in rows if row["launch"] == launch]
        )
        for launch, colour in OURS.items()
    }  # fmt: skip
    for name in peers:
        points = [(row["m"], row["peers"][name]["us"]) for row in plain if name in row["peers"]]
        found[matmul_tables.NAMES[name]] = (PEERS[name], ".-", points)
    found["reading the weight once"] = (
        FLOOR, "--", [(row["m"], row["floor"]["us"]) for row in plain]
    )  # fmt: skip
    return found


def _by_weight(figures: Row) -> dict[str, list[Row]]:
    """The rows of single weights in bf16, by shape."""
    found: dict[str, list[Row]] = {}
    for row in figures["rows"]:
        if row["dtype"] == "bf16" and row["weights"] == 1:
            found.setdefault(tables.shape_text(row), []).append(row)
    return found


def time_by_rows(panels: Sequence[Any], figures: Row) -> None:
    """Log-log, a panel for each weight in bf16: ours, the peers, the floor."""
    by_weight = _by_weight(figures)
    for axes, (shape, rows) in zip(panels, by_weight.items(), strict=False):
        for label, (colour, style, points) in _lines(rows, figures["peers"]).items():
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    style,
                    color=colour,
                    label=label,
                    linewidth=1,
                    markersize=4,
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = [2**power for power in range(0, 13, 2)]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("M, rows of x")
        axes.set_ylabel("µs")
        axes.set_title(f"{shape}, bf16, nested")
    for axes in panels[len(by_weight) :]:
        axes.set_axis_off()


PLOTS = Plots(__file__, {"matmul": Plot(time_by_rows, lambda figures: len(_by_weight(figures)))})
