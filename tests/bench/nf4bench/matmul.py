"""The figures of matmul: rows beside peers and floor, errors, and the cost of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nf4bench import matmul_call, matmul_error, matmul_rows, matmul_tables
from nf4bench.matmul_cases import Group
from nf4bench.options import Shape
from nf4bench.peers import described
from nf4bench.suite import Bench, Report


def run(
    bench: Bench, peers: Mapping[str, Any], groups: Iterable[Group], shapes: Sequence[Shape],
    report: Report,
) -> dict:  # fmt: skip
    """All figures, as the record holds them; `shapes` are those of the errors. Raises
    WrongResult before a product is timed."""
    torch.manual_seed(0)
    figures: dict[str, Any] = {
        "device": bench.gpu.name,
        "torch": torch.__version__,
        "peers": described(peers),
    }
    for name, each in figures["peers"].items():
        report(f"{name}: {each.get('version') or 'missing: ' + each['missing']}")
    figures["rows"] = matmul_rows.run(bench, peers, groups, report)
    figures["errors"] = matmul_error.run(bench, peers, shapes, report)
    figures["call"] = matmul_call.run(bench, peers)
    report(matmul_tables.call_text(figures["call"]))
    return figures
