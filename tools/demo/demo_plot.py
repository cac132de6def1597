"""The demo's plot: the error of each 4-bit weight, and the size of each layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

if TYPE_CHECKING:
    from demo import Layer
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which the colour-blind tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = "osD^vPX"
_DENSE, _PACKED = "#c8ccd0", "#0072b2"


def _role(layer: str, weight: str) -> str:
    """What a weight is within its layer: attention.self.query."""
    return weight.removeprefix(f"{layer}.").removesuffix(".weight")


def _draw_errors(axes: Axes, layers: list[Layer], total: float) -> None:
    roles = sorted({_role(layer.name, row["name"]) for layer in layers for row in layer.rows})
    for index, role in enumerate(roles):
        points = [
            (100 * row["rms_relative_error"], place)
            for place, layer in enumerate(layers)
            for row in layer.rows
            if _role(layer.name, row["name"]) == role
        ]
        axes.scatter(
            *zip(*points, strict=True),
            s=42,
            color=_COLOURS[index % len(_COLOURS)],
            marker=_MARKERS[index // len(_COLOURS) % len(_MARKERS)],
            alpha=0.85,
            linewidths=0,
            label=role,
            zorder=3,
        )
    axes.axvline(100 * total, color="#555555", linewidth=1, linestyle="--", zorder=2)
    axes.annotate(
        f"all weights {100 * total:.2f} %",
        (100 * total, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color="#555555",
    )
    axes.set_xlabel("RMS error, % of the weight's own RMS")
    axes.set_title("Error of each 4-bit weight", loc="left", fontsize=11)
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)


def _draw_sizes(axes: Axes, layers: list[Layer], dense_bytes: int) -> None:
    before = [layer.dense_bytes / 1e6 for layer in layers] + [dense_bytes / 1e6]
    after = [layer.bytes / 1e6 for layer in layers]
    texts = [f"{old:.2f} → {new:.2f}" for old, new in zip(before, after, strict=False)]
    axes.barh(range(len(before)), before, height=0.7, color=_DENSE, label="dense", zorder=2)
    axes.barh(range(len(after)), after, height=0.34, color=_PACKED, label="in 4 bits", zorder=3)
    for place, text in enumerate([*texts, f"{before[-1]:.2f}, unchanged"]):
        axes.annotate(
            text,
            (before[place], place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_xlim(0, 1.25 * max(before))
    axes.set_xlabel("size, MB")
    axes.set_title("Size of each layer, before and after", loc="left", fontsize=11)
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)


def draw(path: Path, model: str, layers: list[Layer], totals: dict[str, Any]) -> None:
    """Write the plot as a PNG. totals: those of `nf4 inspect`."""
    height = 2.6 + 0.34 * (len(layers) + 1)
    figure, (errors, sizes) = pyplot.subplots(
        1, 2, figsize=(11.5, height), sharey=True, layout="constrained"
    )
    _draw_errors(errors, layers, totals["rms_relative_error"])
    _draw_sizes(sizes, layers, totals["dense_bytes"])
    labels = [layer.name for layer in layers] + ["left dense"]
    errors.set_yticks(range(len(labels)), labels, fontsize=9)
    errors.invert_yaxis()
    for axes in (errors, sizes):
        axes.grid(axis="x", color="#e6e6e6", zorder=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    weights = sum(layer.dense_bytes for layer in layers)
    figure.suptitle(
        f"{model}: {totals['weights']} weights in NF4, {weights / 1e6:.1f} MB → "
        f"{totals['weight_bytes'] / 1e6:.1f} MB "
        f"({totals['weight_bits_per_weight']:.2f} bits a weight)",
        fontsize=12,
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
