"""What the repository shows of matmul in the GPU record: a table in README's section, and a
section of docs/bench. Needs nothing but Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nf4bench import matmul_tables, tables
from nf4bench.matmul_cases import LARGE, MOST_OF_DENSE

Row = Mapping[str, Any]
PLOT, TITLE = "matmul", "Matmul: microseconds by rows of x, for each weight"
# The rows of x that README shows, at the weight that shows most and at the others.
LARGE_MS, OTHER_MS = (1, 4, 16, 64, 128, 300, 1024, 4096), (1, 16, 128, 1024)


def alone(row: Row) -> bool:
    return row["weights"] == 1


def matters(row: Row) -> bool:
    """Is it one of the rows that README shows?"""
    usual = alone(row) and (row["dtype"], row["nested"]) == ("bf16", True)
    return usual and row["m"] in (LARGE_MS if tuple(row["shape"]) == LARGE else OTHER_MS)


def method(figures: Row) -> str:
    peers = figures["peers"]
    versions = {name: each["version"] for name, each in peers.items() if "version" in each}
    theirs = {
        "bitsandbytes": "bitsandbytes {} is its matmul_4bit, at M = 1 its gemv_4bit if faster",
        "dense": "dense is torch {}'s linear (cuBLAS) with the dequantized weight",
        "tinygemm": "int4 is torch {}'s int4 kernel in groups of 64, on rearranged bytes of a "
        "weight of its own",
    }
    described = [theirs[name].format(version) for name, version in versions.items()]
    return " ".join([
        "Times are taken as above, with M rows of x; each result is first compared with the "
        "product in float64. The floor is reading the packed weight and its scales once, launched "
        "alike.",
        *([f"{'; '.join(described)}."] if described else []),
        *tables.missing_peers(peers, matmul_tables.NAMES),
    ])  # fmt: skip


def errors(figures: Row) -> str:
    """How our errors are beside those of a dense product, in a sentence."""
    ratios = [
        matmul_tables.over_dense(row) for row in figures["errors"] if "dense" in row["errors"]
    ]
    if not ratios:
        return ""
    return (
        f"The error ||y - exact|| / ||exact|| is at most {max(ratios):.2f} times that of a dense "
        f"product with the rounded weight (aim: {MOST_OF_DENSE:.2f})."
    )


def readme(figures: Row) -> list[str]:
    """Paragraphs of README's section."""
    return [
        f"**Matmul**, y = x W^T. {method(figures)} {errors(figures)}".rstrip(),
        matmul_tables.rows_table(figures, matters),
        f"![{TITLE}](docs/bench/{PLOT}.svg)",
    ]


def document(figures: Row, note: Sequence[str] = ()) -> list[str]:
    """Paragraphs of docs/bench/README.md; `note` beneath the title."""
    return [
        "## Matmul",
        *note,
        method(figures),
        f"![{TITLE}]({PLOT}.svg)",
        matmul_tables.rows_table(figures, alone),
        "### Two weights that share x",
        "As gate and up of an MLP do: one call of ours, beside a call for each weight, of ours and "
        "of each peer, and the floor of both weights in one.",
        matmul_tables.rows_table(figures, lambda row: not alone(row), several=True),
        "### Errors of matmul",
        "Exact is the product in float64 with the unrounded weight; the table has the largest over "
        f"the shapes above. {errors(figures)}".rstrip(),
        matmul_tables.error_table(figures["errors"]),
        "### A call of matmul from Python",
        "On the host, where nothing is waited for; and with a device synchronise.",
        matmul_tables.call_table(figures["call"]),
        "### Kernels and spreads of matmul",
        matmul_tables.spread_table(figures["rows"]),
    ]
