"""docs/bench/experts.md and its tables: mixture of experts. Needs only Python."""

from __future__ import annotations

from collections.abc import Collection

from nf4bench import pages
from nf4bench.experts_cases import DENSE, DEQUANTIZED, GROUPED_NF4, PEERS, ROUTINGS
from nf4bench.table import Row, Table, error, form, grouped, number, text

PLOT = "Experts: microseconds by tokens"
_SPREAD = number("deciles", "{spread[0]:.1f}..{spread[1]:.1f}")
_IDENTITY = [text("model", "{model}"), text("work", "{work}"), number("tokens", "{tokens}")]
ROWS = Table(
    *_IDENTITY, number("libnf4 µs", "{us:.1f}"),
    *(number(f"{name} µs (ratio)", form(name, "{us:.1f} ({ratio:.2f}x)", "peers"))
      for name in PEERS),
)  # fmt: skip
DETAILS = Table(
    *_IDENTITY, number("active experts", "{active:.0f}"),
    number("MB of them", lambda row: f"{row['bytes'] / 1e6:.1f}"),
    number("GB/s", "{gb_per_s:.0f}"), _SPREAD, number("error", error),
)  # fmt: skip
CALLS = Table(
    text("call", "{name}"), number("µs", "{us:.2f}"), number("over grouped_mm", "{ratio:.2f}x"),
    _SPREAD,
)  # fmt: skip
DECODE = Table(
    text("experts", "{name}"), number("µs", "{us:.1f}"), number("over libnf4", "{ratio:.2f}x"),
    _SPREAD, number("error", error),
)  # fmt: skip


def _shape(row: Row) -> str:
    return (
        f"{row['experts']} experts of {row['hidden']} and {row['intermediate']}, {row['top_k']} "
        f"for each token"
    )


def _models(found: Row) -> str:
    return "; ".join(
        f"{model}: {_shape(rows[0])}"
        for model, rows in grouped(found["rows"], lambda row: row["model"]).items()
    )


def _decode(decode: Row) -> list[str]:
    return [
        "## A token of a model",
        f"{decode['model']}'s shape in transformers {decode['transformers']} with "
        f"{decode['layers']} layers and a vocabulary of {decode['vocabulary']}, batch 1, at the "
        f"end of a context of {decode['context']}: torch.compile, from a CUDA graph, "
        f"another token in each launch. libnf4 is `quantize_model(experts=True)`; dense has the "
        f"same numbers in bf16, multiplied by either of transformers' implementations. The "
        f"error is that of the logits beside the first dense form's: a rounding can turn a choice "
        f"of experts.",
        DECODE.markdown(decode["forms"]),
    ]


def page(figures: Row, changed: Collection[str] = ()) -> str:
    found = figures["experts"]
    return pages.page("Mixture of experts", "experts", figures, changed, [
        f"Measured on one {found['device']} on {found['date']}: products of stacks of experts, "
        f"bf16, NF4 with nested scales, in CUDA graphs in which {ROUTINGS} random routings take "
        f"turns, after some rows were compared with float64. gate_up takes its rows of x by index, "
        f"which no sorted copy of x precedes; the others get x sorted, whose copy is not in their "
        f"time. down has x sorted for all; a layer is one after the other, without activation; the "
        f"gradient is dX of each row of gate_up's dY. "
        f"{_models(found)}.",
        *pages.versions(found["peers"], {
            DENSE: "dense is torch {}'s grouped_mm on bf16 weights",
            DEQUANTIZED: "dequantize + dense is bitsandbytes {}'s dequantize of each active "
            "expert, which the host knows, and grouped_mm",
            GROUPED_NF4: "grouped-nf4-gemm {} has flat scales, and its graph is of the "
            "routings that it was captured with",
        }),
        f"![{PLOT}](experts.svg)",
        "## Products",
        "In parentheses the time over libnf4's.",
        ROWS.markdown(found["rows"]),
        *(_decode(found["decode"]) if "decode" in found else []),
        "## An eager call",
        "Host overhead of one product of a small stack, nothing waited for.",
        CALLS.markdown(found["call"]),
        "## Bytes, spreads and errors",
        "What is read of the active experts, and how fast that is; ||y - exact|| / ||exact||, "
        "exact in float64.",
        DETAILS.markdown(found["rows"]),
    ])  # fmt: skip
