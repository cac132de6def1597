"""What a report says, for people: lines of text, and how far libnf4's own kernels go."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from nf4.tuning import report
from nf4.tuning.result import Check, over_best

_SHOWN = ("codebook", "fp16", [4096, 4096])
_COLUMNS = ("M", "rules", "costs", "dense", *report.PEERS)


def _cells(figure: Mapping[str, Any]) -> list[str]:
    times = (figure["before"], figure["after"], figure["us"].get("dense"))
    peers = (figure["peers"].get(name) for name in report.PEERS)
    return [str(figure["m"]), *("-" if us is None else f"{us:.1f}" for us in (*times, *peers))]


def lines(document: Mapping[str, Any]) -> list[str]:
    """Returns the summary that `nf4 bench` prints."""
    gpu, versions, rates = document["gpu"], document["versions"], document["rates"]
    product, dtype, shape = _SHOWN
    rows = [
        _cells(each)
        for each in document["figures"]
        if (each["product"], each["dtype"], list(each["shape"])) == (product, dtype, shape)
    ]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    checks = [Check(**each) for each in document["checks"]]
    ratios = (over_best(checks, when) for when in ("before", "after"))
    rules, costs = (f"{mean:.3f} on average and {most:.2f} at most" for mean, most in ratios)
    peer = versions["bitsandbytes"] or f"not timed ({document['missing'].get('bitsandbytes', '')})"
    return [
        f"{gpu['name']}: libnf4 {versions['libnf4']}, torch {versions['torch']}, "
        f"bitsandbytes {peer}",
        f"copies at {rates['copy_gb_per_s']:.0f} GB/s, multiplies in fp16 at "
        f"{rates['matmul_tflops']:.0f} TFLOPS; {document['seconds']:.0f} s",
        f"NF4, {shape[0]}x{shape[1]}, {dtype}, microseconds by rows of x:",
        *(
            "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
            for cells in (_COLUMNS, *rows)
        ),
        f"{len(checks)} products that were not fitted, over the fastest way: by the "
        f"rules {rules}, by the costs {costs}",
        *(f"doubtful: {each}" for each in report.doubts(document)),
    ]


def ranges(fused: Mapping[int, bool]) -> str:
    """Says for which numbers of rows of x libnf4's own kernel runs, such as "libnf4", "dense",
    "libnf4 up to 64" or "libnf4 from 9 to 64"."""
    if not fused:
        return "not measured"
    parts, least = [], min(fused)
    for runs, group in itertools.groupby(sorted(fused), key=fused.__getitem__):
        ms = list(group)
        if runs:
            first = "" if ms[0] == least else f" from {ms[0]}"
            last = "" if ms[-1] == max(fused) else f" {'to' if first else 'up to'} {ms[-1]}"
            parts.append(first + last)
    return f"libnf4{' and'.join(parts)}" if parts else "dense"
