"""Writes the tables of docs/design/quality.md and docs/quality.md, and the plot of the latter, from
docs/design/quality.json.

    python tools/quality/page.py [FIGURES.json ...]

adds what study.py wrote into these files to quality.json first. A test compares the pages and
the plot with the figures.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).parents[2] / "docs"
PAGES = (_DOCS / "quality.md", _DOCS / "design" / "quality.md")
FIGURES = _DOCS / "design" / "quality.json"
PLOT, _PLOTTED = _DOCS / "quality.svg", "SmolLM2-135M-trained"
# The designs of the tables with a column for each text.
_FORMAT = "NF4, "
# The design of `nf4 quantize --calibrate`.
CALIBRATED = ", GPTQ by x^2, damped by 0.3"
_Measure = Callable[[dict[str, Any], dict[str, Any]], float]


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _with_error(found: list[float], digits: int) -> str:
    return " ± ".join(f"{each:.{digits}f}" for each in found)


def texts(model: dict[str, Any]) -> str:
    """Each text with its tokens, and what bitsandbytes' scales lose on it."""
    rows = [
        [
            name,
            str(text["tokens"]),
            *(f"{each:.2f}" for each in text["perplexities"]),
            _with_error(text["loss_change"], 3),
            _with_error(text["kl_divergence"], 4),
        ]
        for name, text in model["designs"][f"{_FORMAT}plain"]["texts"].items()
    ]
    header = ["text", "tokens", "perplexity, dense", "NF4", "loss change", "KL divergence"]
    return _table(header, rows)


def _divergence(text: dict[str, Any], base: dict[str, Any]) -> float:
    return text["kl_divergence"][0] / base["kl_divergence"][0]


def _loss(text: dict[str, Any], base: dict[str, Any]) -> float:
    return text["loss_change"][0] / base["loss_change"][0]


def _errors(text: dict[str, Any], _: dict[str, Any]) -> float:
    mean, error = text["loss_over_base"]
    return mean / error if error else 0.0


def _each(model: dict[str, Any], design: str, measure: _Measure) -> list[float]:
    """The measure of each text, over the base of the design."""
    found = model["designs"][design]
    base = model["designs"][found["over"]]["texts"]
    return [measure(text, base[name]) for name, text in found["texts"].items()]


def ratios(model: dict[str, Any], measure: _Measure) -> str:
    """Each design of NF4 over bitsandbytes' scales, by text."""
    names = model["designs"][f"{_FORMAT}plain"]["texts"]
    rows = []
    for design in model["designs"]:
        if design.startswith(_FORMAT):
            each = _each(model, design, measure)
            cells = [*each, math.fsum(each) / len(each), max(each)]
            rows.append([design.removeprefix(_FORMAT), *(f"{cell:.2f}" for cell in cells)])
    return _table(["design", *names, "mean", "worst"], rows)


def others(model: dict[str, Any]) -> str:
    """The designs of other formats, over the format's own base."""
    rows = []
    for design, found in model["designs"].items():
        if design.startswith(_FORMAT) or design == found["over"]:
            continue
        cells = []
        for measure in (_divergence, _loss):
            each = _each(model, design, measure)
            cells += [math.fsum(each) / len(each), max(each)]
        errors = max(_each(model, design, _errors))
        rows.append([design, *(f"{cell:.2f}" for cell in cells), f"{errors:+.1f}"])
    header = ["design", "KL, mean", "worst", "loss, mean", "worst", "worst, in standard errors"]
    return _table(header, rows)


def summary(model: dict[str, Any]) -> str:
    """What the plain and the calibrated weights of each format cost, in the mean of the texts."""
    rows = []
    for design, found in model["designs"].items():
        if not design.endswith(CALIBRATED):
            continue
        pair = [model["designs"][name]["texts"].values() for name in (found["over"], design)]
        means = [
            math.fsum(text[key][0] for text in texts) / len(texts)
            for key in ("kl_divergence", "loss_change")
            for texts in pair
        ]
        rows.append([design.partition(",")[0], *(f"{each:.3f}" for each in means)])
    header = ["format", "KL divergence, plain", "calibrated", "loss change, plain", "calibrated"]
    return _table(header, rows)


def training(model: dict[str, Any]) -> str:
    """How the judge was trained, and what rounding to Q4_1 costs its weights."""
    found = model["training"]
    errors = [found["q4_1_error_before"], found["q4_1_error"]]
    row = [f"{found['steps']}", f"{found['tokens'] / 1e6:.1f}", *(f"{each:.2g}" for each in errors)]
    header = ["steps", "million tokens", "error of Q4_1 before training", "after training"]
    return _table(header, [row]).replace("---", "--:", 1)


_PARTS = {
    "summary": summary,
    "training": training,
    "texts": texts,
    "divergence": lambda model: ratios(model, _divergence),
    "loss": lambda model: ratios(model, _loss),
    "errors": lambda model: ratios(model, _errors),
    "others": others,
}


def rendered(page: str) -> str:
    """The page with the tables of FIGURES in their places: <!-- MODEL PART:begin --> and :end."""
    figures = json.loads(FIGURES.read_text())

    def place(found: re.Match[str]) -> str:
        name, part = found.groups()
        table = _PARTS[part](figures[name])
        return f"<!-- {name} {part}:begin -->\n\n{table}\n\n<!-- {name} {part}:end -->"

    return re.sub(r"<!-- (\S+) (\w+):begin -->\n.*?<!-- \1 \2:end -->", place, page, flags=re.S)


def add(files: list[str]) -> None:
    """Adds figures by model and design. Designs of a model are in the order of study.py."""
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for file in files:
        for name, model in json.loads(Path(file).read_text()).items():
            known = figures.setdefault(name, model)
            known["designs"] |= model["designs"]
            order = {design: at for at, design in enumerate(model["order"])}
            known["designs"] = dict(sorted(known["designs"].items(), key=lambda row: order[row[0]]))
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")


def bars() -> dict[str, list[str]]:
    """The KL divergence of plain and of calibrated NF4 on each text, as the plot has it."""
    designs = json.loads(FIGURES.read_text())[_PLOTTED]["designs"]
    names = {"bitsandbytes": "NF4, plain", "calibrated": f"NF4{CALIBRATED}"}
    return {
        label: [f"{text['kl_divergence'][0]:.3f}" for text in designs[name]["texts"].values()]
        for label, name in names.items()
    }


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "libnf4", "svg.fonttype": "none"}
    from matplotlib import pyplot

    designs = json.loads(FIGURES.read_text())[_PLOTTED]["designs"]
    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    for at, (label, values) in enumerate(bars().items()):
        places = [place + 0.4 * at for place in range(len(values))]
        axes.bar_label(axes.bar(places, [*map(float, values)], 0.4, label=label), values)
    texts = designs["NF4, plain"]["texts"]
    axes.set_xticks([place + 0.2 for place in range(len(texts))], texts)
    axes.set_ylabel("KL divergence (nats)")
    axes.set_title("NF4 of SmolLM2, on texts that no calibration reads", fontsize=10)
    axes.margins(y=0.2)
    axes.legend(frameon=False, ncols=2, loc="upper center")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PLOT, metadata={"Date": None})


if __name__ == "__main__":
    if sys.argv[1:]:
        add(sys.argv[1:])
    draw()
    for page in PAGES:
        page.write_text(rendered(page.read_text()))
