"""Writes the tables of docs/design/quality.md from quality.json beside it, which study.py adds to.

    python tools/quality/page.py

A test compares the page with the figures.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "design" / "quality.md"
FIGURES = PAGE.with_suffix(".json")


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(map(_row, [header, ["---", *["--:"] * (len(header) - 1)], *rows]))


def texts(model: dict[str, Any]) -> str:
    """Each text with its tokens, and what bitsandbytes' scales lose on it."""
    first = next(iter(model["designs"].values()))["texts"]
    rows = [
        [
            name,
            str(text["tokens"]),
            f"{text['perplexities'][0]:.2f}",
            f"{text['perplexities'][1]:.2f}",
            f"{text['loss_change'][0]:.3f} ± {text['loss_change'][1]:.3f}",
            f"{text['kl_divergence']:.4f}",
        ]
        for name, text in first.items()
    ]
    header = ["text", "tokens", "perplexity, dense", "NF4", "loss change", "KL divergence"]
    return _table(header, rows)


def _loss(text: dict[str, Any]) -> float:
    return text["loss_change"][0]


def _divergence(text: dict[str, Any]) -> float:
    return text["kl_divergence"]


def ratios(model: dict[str, Any], measure: Callable[[dict[str, Any]], float]) -> str:
    """Each design over bitsandbytes' scales, by text."""
    first = next(iter(model["designs"].values()))["texts"]
    rows = []
    for design, found in model["designs"].items():
        each = [measure(found["texts"][name]) / measure(text) for name, text in first.items()]
        cells = [*each, math.fsum(each) / len(each), max(each)]
        rows.append([design, *(f"{cell:.2f}" for cell in cells)])
    return _table(["scales", *first, "mean", "worst"], rows)


_PARTS = {
    "texts": texts,
    "divergence": lambda model: ratios(model, _divergence),
    "loss": lambda model: ratios(model, _loss),
}


def rendered(page: str) -> str:
    """The page with the tables of FIGURES in their places: <!-- MODEL PART:begin --> and :end."""
    figures = json.loads(FIGURES.read_text())

    def place(found: re.Match[str]) -> str:
        name, part = found.groups()
        table = _PARTS[part](figures[name])
        return f"<!-- {name} {part}:begin -->\n\n{table}\n\n<!-- {name} {part}:end -->"

    return re.sub(r"<!-- (\S+) (\w+):begin -->\n.*?<!-- \1 \2:end -->", place, page, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
