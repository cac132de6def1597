"""The bookkeeping of Unsloth's puzzle: its MLPs, its score and its 14 points."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nf4bench.cases import Case
from nf4bench.options import ROOT

CALL_BUDGET_US = 6  # what a call may add to the stream kernel's time
SPEEDUP_POINTS = ((1.05, 1), (1.10, 2), (1.15, 2))  # each adds to the one before
NO_SPEEDUP_POINTS = -3


@dataclass(frozen=True)
class Mlp:
    """gate and up are [inner, hidden], down is [hidden, inner]; NF4, 64, double-quantized."""

    hidden: int
    inner: int
    dtype: str

    def cases(self) -> list[Case]:
        up = Case((self.inner, self.hidden), self.dtype)
        return [up, up, Case((self.hidden, self.inner), self.dtype)]


MLPS = (Mlp(2048, 8192, "fp16"), Mlp(1024, 4096, "bf16"), Mlp(4096, 14336, "bf16"))


def cases() -> list[Case]:
    """The nine weights of an iteration."""
    return [case for mlp in MLPS for case in mlp.cases()]


def source_lines(pattern: str, root: Path = ROOT) -> list[str]:
    """FILE:LINE of what matches in what dequantize's kernels are made of."""
    found = []
    cuda = root / "lib" / "cuda"
    for path in sorted([*(cuda / "ptx").glob("*.cuh"), *(cuda / "dequant").glob("*.cuh")]):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(root).as_posix()}:{number}")
    return found


def speedup_points(speedup: float) -> int:
    if speedup <= 1:
        return NO_SPEEDUP_POINTS
    return sum(points for least, points in SPEEDUP_POINTS if speedup >= least)


@dataclass(frozen=True)
class Evidence:
    """What a run found. speedup is None where Unsloth's sequence is missing; kernels are GPU
    operations of one dequantize; compiled says why it is not, or is empty."""

    speedup: float | None
    kernels: int
    compiled_refusal: str
    dtypes: tuple[str, ...]
    asm: list[str]
    eviction: list[str]


def points(evidence: Evidence) -> list[dict]:
    """The rows of the puzzle's marking: what is asked, points had and possible, evidence."""
    speedup = evidence.speedup
    compiled = not evidence.compiled_refusal
    both = {"fp16", "bf16"} <= set(evidence.dtypes)
    rows = [
        (
            "one kernel for both dequantizations", 3 * (evidence.kernels == 1), 3,
            f"{evidence.kernels} in the graph of one dequantize",
        ),
        (
            "at least 1.15x as fast as Unsloth", 0 if speedup is None else speedup_points(speedup),
            5, "Unsloth's sequence is missing here" if speedup is None else f"{speedup:.2f}x here",
        ),
        (
            "works under torch.compile", 1 if compiled else -1, 1,
            "fullgraph=True, bits compared, as an operator that the harness registers"
            if compiled else evidence.compiled_refusal,
        ),
        ("custom asm", 3 * bool(evidence.asm), 3, ", ".join(evidence.asm) or "none"),
        (
            "cache eviction", int(bool(evidence.eviction)), 1,
            ", ".join(evidence.eviction) or "none",
        ),
        (
            "tested in fp16 and bf16", 1 if both else -1, 1,
            f"bits compared in {' and '.join(sorted(set(evidence.dtypes)))}",
        ),
    ]  # fmt: skip
    names = ("asked", "points", "of", "evidence")
    return [dict(zip(names, row, strict=True)) for row in rows]


def summary(totals: Mapping[str, float], stream_us: float) -> dict:
    """Score and budget from microseconds of an iteration of each implementation."""
    ours, calls = totals["libnf4"], len(cases())
    budget = stream_us + calls * CALL_BUDGET_US
    result = {
        "libnf4_us": round(ours, 2),
        "stream_us": round(stream_us, 2),
        "calls": calls,
        "budget_us": round(budget, 2),
        "of_budget": round(ours / budget, 4),
    }
    ratios = {
        name: round(us / ours, 3) for name, us in totals.items() if not name.startswith("libnf4")
    }
    return result | {"score": ratios.get("unsloth"), "ratios": ratios}
