#!/usr/bin/env python3
"""Turns reports of `nf4 bench` into rows of built-in costs and rows of docs/gpus.md.

    python tools/gpu_report.py REPORT... [--rows FOLDER]

It prints what each report says and the row of the table in docs/gpus.md. --rows writes the costs of
each GPU to a file in FOLDER, in the form that docs/design/tuning.md ("Built-in rows") describes.
A file that is no report, of another version of libnf4 than this checkout's library, or with bits
or errors that are wrong or missing is refused, and so are the rows of a second report of the same
GPU. Exit status: 0, or 1 if a report is refused. It needs libnf4, but neither a GPU nor PyTorch.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bindings" / "python"))

import nf4  # noqa: E402
from nf4 import _costs  # noqa: E402
from nf4._load import library  # noqa: E402
from nf4.checkpoint.errors import FormatError  # noqa: E402
from nf4.tuning import report, summary  # noqa: E402
from nf4.tuning.result import Check, over_best  # noqa: E402

# The columns of the table in docs/gpus.md: the products, the rows of x, and the dtype.
FEW, LARGE = 16, 1 << 25
INTEGERS = ("gptq", "awq", "compressed_tensors")
BASIS = "timed on this GPU by an owner"


class Refused(Exception):
    """A report that cannot be used."""


def usable(path: Path) -> dict[str, Any]:
    """Returns a report whose figures can be relied on. Raises Refused, FormatError and OSError."""
    document = report.read(path)
    made, ours = document["versions"]["libnf4"], nf4.version()
    if made != ours:
        raise Refused(f"{path}: it is of libnf4 {made}; this is {ours}")
    doubts = report.doubts(document)
    if doubts:
        raise Refused(f"{path}: {'; '.join(doubts[:3])}")
    refused = _costs.set_costs(library(), document["costs"])
    _costs.set_costs(library(), None)
    if refused:
        raise Refused(f"{path}: its costs are refused: {refused}")
    return document


# ---- Rows of costs -----------------------------------------------------------------------


def file_name(document: Mapping[str, Any]) -> str:
    gpu = document["gpu"]
    return re.sub(r"[^a-z0-9]+", "_", f"{gpu['name']} {gpu['kernels']}".lower()).strip("_") + ".inc"


def write_rows(document: Mapping[str, Any], folder: Path, written: set[Path]) -> Path:
    """Writes the built-in costs, and returns their file. Raises Refused if it is among those that
    were written, and OSError."""
    made = folder / file_name(document)
    if made in written:
        raise Refused(f"{made}: another of these reports is of the same GPU")
    made.write_text(built_in(document))
    written.add(made)
    return made


def built_in(document: Mapping[str, Any]) -> str:
    """Returns the source of a GPU's built-in costs. They are for any driver, which 0 stands for."""
    gpu, versions = document["gpu"], document["versions"]
    checks = [Check(**each) for each in document["checks"]]
    mean, most = over_best(checks, "after")
    rows = [report.gpu_line(gpu, 0), *report.cost_rows(document)]
    return "\n".join(
        [
            f"// {gpu['name']}: measured by nf4 bench with libnf4 {versions['libnf4']}, torch "
            f"{versions['torch']},",
            f"// CUDA {versions['cuda']}. {len(checks)} products that were not fitted took "
            f"{mean:.3f} times as long as the",
            f"// fastest way on average, {most:.2f} at most. tools/gpu_report.py makes this file.",
            *(f'"{row}\\n"' for row in rows),
            "",
        ]
    )


# ---- A row of docs/gpus.md -----------------------------------------------------------------


def _fused(document: Mapping[str, Any], product: str, large: bool, few: bool) -> dict[int, bool]:
    """Returns by rows of x whether libnf4's own kernel runs, in fp16 and with the costs."""
    return {
        each["m"]: each["fused"]["after"]
        for each in document["figures"]
        if each["product"] == product
        and each["dtype"] == "fp16"
        and (each["shape"][0] * each["shape"][1] >= LARGE) == large
        and (each["m"] <= FEW) == few
    }


def _of_products(document: Mapping[str, Any], products: tuple[str, ...], few: bool) -> str:
    """Says how far libnf4's own kernels go. A product that differs from the first is named, and so
    are large weights."""
    said = {}
    for product in products:
        typical, large = (
            summary.ranges(_fused(document, product, of_large, few)) for of_large in (False, True)
        )
        said[product] = typical if typical == large else f"{typical}, large weights {large}"
    first = said[products[0]]
    others = [f"{name}: {text}" for name, text in said.items() if text != first]
    return "; ".join([first, *others])


def table_row(document: Mapping[str, Any]) -> str:
    """Returns the row of the table in docs/gpus.md."""
    gpu, experts = document["gpu"], document["experts_rows"]
    cells = (
        gpu["name"],
        gpu["kernels"],
        _of_products(document, ("codebook",), few=True),
        _of_products(document, INTEGERS, few=True),
        _of_products(document, ("codebook", *INTEGERS), few=False),
        "; ".join(
            _of_products(document, ("gradient", "gradient_lora"), few=few) for few in (True, False)
        ),
        f"libnf4 up to {experts}" if experts else "dense",
        BASIS,
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="reports of nf4 bench into rows")
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT")
    parser.add_argument("--rows", type=Path, metavar="FOLDER", help="write built-in costs there")
    args = parser.parse_args(arguments)
    status, written = 0, set[Path]()
    for path in args.reports:
        try:
            document = usable(path)
            print("\n".join([*summary.lines(document), table_row(document)]))
            if args.rows:
                print(f"wrote {write_rows(document, args.rows, written)}")
        except (Refused, FormatError, OSError) as error:
            print(f"gpu_report: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
