"""Puts the bench on the path, and figures in it that no GPU has measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests" / "bench"), str(ROOT / "tests" / "python" / "abi")]


def timing(us: float) -> dict[str, Any]:
    return {"us": us, "spread": [us - 0.5, us + 0.5]}


def row(us: float = 10.0, **changes: Any) -> dict[str, Any]:
    """A row of the bench: bf16 and nested, at 4096x1024, unless said otherwise."""
    return {
        "work": "dequantize", "shape": [4096, 1024], "dtype": "bf16", "nested": True,
        "blocksize": 64, "format": "nf4", "placement": "aligned", "launch": "plain",
        "configuration": "256x2 pdl", "bytes": 10_000_000, **timing(us), "gb_per_s": 1e4 / us,
        "roofline": {"variant": 1, **timing(9.0)}, "of_roofline": 9.0 / us,
        "peers": {"bitsandbytes": {"variant": 0, **timing(25.0), "ratio": 25.0 / us}},
        **changes,
    }  # fmt: skip


def bench(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "device": "GPU of a test", "torch": "2",
        "peers": {
            "bitsandbytes": {"version": "0.1"}, "triton": {"version": "3"},
            "unsloth": {"missing": "no such library"},
        },
        "rows": list(rows),
        "consumer": [
            {
                "shape": [4096, 1024], "dtype": "bf16", "bytes": 8 << 20,
                "then_read": {
                    "libnf4": timing(6.0), "normal": timing(7.5), "evict_first": timing(6.5),
                },
                "alone": {
                    "libnf4": timing(4.0), "normal": timing(4.5), "evict_first": timing(4.25),
                },
                "ratio": 1.25,
            }
        ],
    }  # fmt: skip


def challenge() -> dict[str, Any]:
    return {
        "device": "GPU of a test", "iterations": 10,
        "peers": {"unsloth": {"version": "x"}, "triton": {"missing": "no compiler"}},
        "eager": {
            "libnf4": timing(100.0), "unsloth": timing(250.0),
            "libnf4 as an operator": timing(130.0),
        },
        "compiled": {"libnf4": timing(110.0), "unsloth": {"refused": "it calls ctypes"}},
        "summary": {
            "libnf4_us": 100.0, "roofline_us": 60.0, "calls": 9, "budget_us": 114.0,
            "of_budget": 0.8772, "ratios": {"unsloth": 2.5}, "score": 2.5,
        },
        "points": [
            {"asked": "one kernel", "points": 3, "of": 3, "evidence": "1 in the graph"},
            {"asked": "compiled", "points": -1, "of": 1, "evidence": "refused"},
        ],
    }  # fmt: skip


def call() -> dict[str, Any]:
    return {
        "device": "GPU of a test",
        "peers": {"unsloth": {"version": "x"}, "triton": {"missing": "no compiler"}},
        "waited": {
            "shape": [4096, 1024],
            "calls": {
                "libnf4": timing(16.0) | {"ratio": 1.0}, "unsloth": timing(64.0) | {"ratio": 4.0}
            },
        },
        "host": {
            "shape": [256, 256],
            "calls": {"torch.empty": timing(4.5), "torch tensors, a new output": timing(8.25)},
            "beyond_empty_us": 3.75,
        },
    }  # fmt: skip


def matmul_row(us: float = 10.0, **changes: Any) -> dict[str, Any]:
    """A row of matmul: M = 1, bf16 and nested, at 14336x4096, unless said otherwise."""
    return {
        "shape": [14336, 4096], "weights": 1, "m": 1, "dtype": "bf16", "nested": True,
        "launch": "plain", **timing(us), "tflop_per_s": 11.7,
        "roofline": {"variant": 0, "bytes": 30_000_000, **timing(8.0)}, "of_roofline": 8.0 / us,
        "peers": {
            "bitsandbytes": {"variant": 0, **timing(30.0), "ratio": 30.0 / us},
            "dense": {"variant": 0, **timing(35.0), "ratio": 35.0 / us},
        },
        "kernel": "skinny_2", "error": 2.4e-3, **changes,
    }  # fmt: skip


def matmul_error(ours: float = 2.2e-3, **changes: Any) -> dict[str, Any]:
    """A row of matmul's errors: M = 1, normal x, bf16 and nested, unless said otherwise."""
    return {
        "shape": [14336, 4096], "dtype": "bf16", "nested": True, "x": "normal", "m": 1,
        "errors": {"libnf4": ours, "bitsandbytes": 2.5e-3, "dense": 2e-3}, **changes,
    }  # fmt: skip


def matmul(*rows: dict[str, Any]) -> dict[str, Any]:
    calls = {"libnf4": timing(8.0) | {"ratio": 1.0}, "dense": timing(12.0) | {"ratio": 1.5}}
    return {
        "device": "GPU of a test", "torch": "2",
        "peers": {
            "bitsandbytes": {"version": "0.1"}, "dense": {"version": "2"},
            "tinygemm": {"missing": "no such operator"},
        },
        "rows": list(rows), "errors": [matmul_error()],
        "call": {"shape": [4096, 4096], "m": 1, "host": calls, "waited": calls},
    }  # fmt: skip


def models_row(us: float = 3000.0, **changes: Any) -> dict[str, Any]:
    """A row of whole models: LLaMA-7B decoding for one sequence in a graph, unless said
    otherwise."""
    memory = {"weights": 4_000_000_000, "step": 20_000_000}
    return {
        "work": "decode", "batch": 1, "tokens": 1, "layers": 32, "hidden": 4096,
        "intermediate": 11008, "compiled": False, "launch": "graph", "error": 1.2e-2,
        "forms": {
            "libnf4": timing(us) | memory,
            "bitsandbytes": timing(6000.0) | {"ratio": 6000.0 / us} | memory,
            "dense": timing(6600.0) | {"ratio": 6600.0 / us, "weights": 13_500_000_000, "step": 0},
        },
        "failed": {}, **changes,
    }  # fmt: skip


def models(*rows: dict[str, Any]) -> dict[str, Any]:
    calls = {"libnf4": timing(8.0), "bitsandbytes": timing(20.0) | {"ratio": 2.5}}
    return {
        "device": "GPU of a test", "torch": "2",
        "peers": {"bitsandbytes": {"version": "0.1"}, "dense": {"missing": "no such library"}},
        "rows": list(rows), "left_out": [], "build_seconds": 2.0, "seconds": 40.0,
        "call": {"shape": [4096, 4096], "forms": calls, "failed": {"dense": "no kernel"}},
    }  # fmt: skip


def stamp(figures: dict[str, Any]) -> dict[str, Any]:
    return {"commit": "abc", "date": "2026-01-02", "sources": "of older code"} | figures


def record(*rows: dict[str, Any]) -> dict[str, Any]:
    parts = {"bench": bench(*rows), "challenge": challenge(), "call": call()}
    return {name: stamp(figures) for name, figures in parts.items()}
