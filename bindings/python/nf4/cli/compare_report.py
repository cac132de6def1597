"""What `nf4 compare` prints and draws."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nf4.cli.console import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which the colour-blind tell apart.
_LAYER, _WORST, _TEXT = "#56b4e9", "#d55e00", "#0072b2"


def _plain(number: float) -> str:
    return f"{number:.4g}"


def report_lines(document: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of the report."""
    if document["layers"]:
        header = ["layer", "worst tensor", "tensors", "relative square error"]
        rows = [
            [
                layer["name"],
                _within(layer),
                str(layer["tensors"]),
                _plain(layer["relative_square_error"]),
            ]
            for layer in document["layers"]
        ]
        yield from table(header, rows, left=2)
        yield ""
        yield (
            f"weights  {len(document['tensors'])} tensors: relative square error "
            f"{_plain(document['relative_square_error'])}; worst layer {document['worst_layer']}"
        )
    yield f"equal    {document['equal_dense_tensors']} dense tensors"
    if document["logits"] is not None:
        yield ""
        yield from _logits(document["logits"])


def _within(layer: dict[str, Any]) -> str:
    """The worst tensor's name within its layer."""
    return layer["worst_tensor"].removeprefix(f"{layer['name']}.").removesuffix(".weight")


def _logits(logits: dict[str, Any]) -> Iterator[str]:
    rows = [[each["text"], *_judged(each)] for each in logits["texts"]]
    if len(rows) > 1:
        rows.append(["all", *_judged(logits["all"])])
    header = ["text", "tokens", "windows", "reference", "quantized", "loss change"]
    yield from table([*header, "KL divergence", "same top token"], rows)
    yield ""
    yield (
        f"Windows of {logits['window']} tokens at a stride of {logits['stride']}; both models in "
        f"{logits['dtype']}. Perplexities; losses and divergences in nats a token."
    )


def _judged(row: dict[str, Any]) -> list[str]:
    return [
        str(row["tokens"]),
        str(row["windows"]),
        f"{row['reference_perplexity']:.3f}",
        f"{row['perplexity']:.3f}",
        f"{row['loss_change']:.4f} ± {row['loss_change_standard_error']:.4f}",
        f"{row['kl_divergence']:.5f}",
        f"{100 * row['same_top_token']:.2f} %",
    ]


def draw(path: str, document: dict[str, Any]) -> None:
    """Draws the error of each layer and, if there are texts, the divergence on each."""
    from matplotlib.figure import Figure

    logits = document["logits"]
    height = 1.6 + 0.22 * max(len(document["layers"]), 6)
    figure = Figure(figsize=(11 if logits else 6.5, height), layout="constrained")
    axes = figure.subplots(1, 2 if logits else 1, squeeze=False)[0]
    _draw_layers(axes[0], document)
    if logits:
        _draw_texts(axes[1], logits)
    figure.savefig(path, dpi=150)


def _draw_layers(axes: Axes, document: dict[str, Any]) -> None:
    layers = document["layers"]
    names = [layer["name"] for layer in layers]
    colours = [_WORST if name == document["worst_layer"] else _LAYER for name in names]
    axes.barh(names, [layer["relative_square_error"] for layer in layers], color=colours)
    axes.set_title("Error of the weights by layer", loc="left", fontsize=11)
    _finish(axes, "relative square error; the worst layer in red")


def _draw_texts(axes: Axes, logits: dict[str, Any]) -> None:
    texts = logits["texts"]
    places = range(len(texts))
    axes.barh(places, [text["kl_divergence"] for text in texts], color=_TEXT)
    axes.set_yticks(
        places,
        [
            f"{os.path.basename(text['text'])}\n"
            f"{text['reference_perplexity']:.2f} → {text['perplexity']:.2f}"
            for text in texts
        ],
    )
    axes.set_title("Text, and its perplexity before and after", loc="left", fontsize=11)
    _finish(axes, "KL divergence of the logits from the reference's, nats a token")


def _finish(axes: Axes, label: str) -> None:
    axes.invert_yaxis()
    axes.set_xlabel(label, fontsize=9)
    axes.tick_params(labelsize=8, axis="both")
    axes.grid(axis="x", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
