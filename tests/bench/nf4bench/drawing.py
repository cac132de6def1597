"""Plots as files, PNG and SVG, that say which figures they are of.

Each carries a digest of the figures and of the code in its metadata, by which a test knows
whether it is up to date: bytes differ between versions of matplotlib.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMATS = ("svg", "png")
STYLE = {
    "svg.hashsalt": "libnf4", "svg.fonttype": "none", "font.family": "DejaVu Sans",
    "font.size": 9, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """draw: onto axes; or onto a list of them, where `panels` says how many the figures need."""

    draw: Callable[[Any, Mapping[str, Any]], None]
    panels: Callable[[Mapping[str, Any]], int] | None = None

    def drawn(self, pyplot: Any, figures: Mapping[str, Any]) -> Any:
        """A figure; panels are in two columns."""
        if self.panels is None:
            figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
            self.draw(axes, figures)
            return figure
        rows = -(-max(1, self.panels(figures)) // 2)
        figure, grid = pyplot.subplots(
            rows, 2, figsize=(9, 3.75 * rows), layout="constrained", squeeze=False
        )
        self.draw(list(grid.flat), figures)
        return figure


@dataclass(frozen=True)
class Plots:
    """What one file of code, `source`, draws of some figures, by name."""

    source: str
    of: Mapping[str, Plot]

    def digest(self, figures: Mapping[str, Any]) -> str:
        """SHA-256 of what the plots are made from and of."""
        made = hashlib.sha256(Path(self.source).read_bytes())
        made.update(Path(__file__).read_bytes())
        made.update(json.dumps(figures, sort_keys=True).encode())
        return made.hexdigest()

    def paths(self, folder: Path) -> list[Path]:
        return [folder / f"{name}.{each}" for name in self.of for each in FORMATS]

    def stale(self, folder: Path, figures: Mapping[str, Any]) -> list[Path]:
        """The plots that are missing or of other figures."""
        wanted = self.digest(figures).encode()
        return [p for p in self.paths(folder) if not p.is_file() or wanted not in p.read_bytes()]

    def write(self, folder: Path, figures: Mapping[str, Any]) -> list[Path]:
        """Makes every plot; the files that were written."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        label = self.digest(figures)
        metadata = {
            "svg": {"Date": None, "Creator": None, "Description": label},
            "png": {"Software": None, "Description": label},
        }
        with pyplot.rc_context(STYLE):
            for name, plot in self.of.items():
                figure = plot.drawn(pyplot, figures)
                _legend(figure)
                for each in FORMATS:
                    target = folder / f"{name}.{each}"
                    figure.savefig(target, dpi=120, metadata=metadata[each])
                pyplot.close(figure)
        return self.paths(folder)


def _legend(figure: Any) -> None:
    """One for all panels, each label once."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=6)
