"""Puts the bench on the path; figures as it writes them: those of docs/bench with other rows."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests" / "python" / "abi")]
_RECORDED = json.loads((ROOT / "docs" / "bench" / "figures.json").read_text())


def figures(name: str, *rows: dict[str, Any], missing: str = "", **changes: Any) -> dict[str, Any]:
    """The recorded figures of that name, with other rows where some are given. missing: a peer."""
    found = deepcopy(_RECORDED[name]) | {"device": "GPU of a test", "date": "2026-01-02"} | changes
    if rows:
        found["rows"] = list(rows)
    if missing:
        found["peers"][missing] = {"missing": "no such library"}
    return found


def timing(us: float) -> dict[str, Any]:
    return {"us": us, "spread": [us - 0.5, us + 0.5]}


def peer(theirs: float, us: float) -> dict[str, Any]:
    return {"variant": 0, **timing(theirs), "ratio": theirs / us}


def row(us: float = 10.0, **changes: Any) -> dict[str, Any]:
    """A row of the bench: bf16 and nested, at 4096x1024, unless said otherwise."""
    return {
        "work": "dequantize", "shape": [4096, 1024], "dtype": "bf16", "nested": True,
        "blocksize": 64, "format": "nf4", "placement": "aligned", "launch": "plain",
        "configuration": "256x2 pdl", "bytes": 10_000_000, **timing(us), "gb_per_s": 1e4 / us,
        "roofline": {"variant": 1, **timing(9.0)}, "of_roofline": 9.0 / us,
        "peers": {"bitsandbytes": peer(25.0, us)}, **changes,
    }  # fmt: skip


def matmul_row(us: float = 10.0, **changes: Any) -> dict[str, Any]:
    """A row of matmul: M = 1, bf16 and nested, at 14336x4096, unless said otherwise."""
    return {
        "shape": [14336, 4096], "weights": 1, "m": 1, "dtype": "bf16", "nested": True,
        "launch": "plain", **timing(us), "tflop_per_s": 11.7,
        "roofline": {"variant": 0, "bytes": 30_000_000, **timing(8.0)}, "of_roofline": 8.0 / us,
        "peers": {"bitsandbytes": peer(30.0, us), "dense": peer(35.0, us)},
        "kernel": "skinny_2", "error": 2.4e-3, **changes,
    }  # fmt: skip


def models_row(us: float = 3000.0, without: str = "", **changes: Any) -> dict[str, Any]:
    """A row of whole models: LLaMA-7B decoding for one sequence in a graph, unless said otherwise.
    without: a form that failed."""
    forms = {
        name: timing(each) | more | {"weights": 4_000_000_000, "step": 20_000_000}
        for name, each, more in (
            ("libnf4", us, {}), ("bitsandbytes", 6000.0, {"ratio": 6000.0 / us}),
            ("dense", 6600.0, {"ratio": 6600.0 / us}),
        )
        if name != without
    }  # fmt: skip
    return {
        "work": "decode", "batch": 1, "tokens": 1, "layers": 32, "hidden": 4096,
        "intermediate": 11008, "compiled": False, "launch": "graph", "error": 1.2e-2,
        "forms": forms, "failed": {without: "RuntimeError: no room"} if without else {}, **changes,
    }  # fmt: skip
