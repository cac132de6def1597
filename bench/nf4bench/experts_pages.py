"""Makes docs/bench/experts.md, on mixture of experts, from docs/bench/figures.json. It needs only
Python."""

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
    number("MB of active experts", lambda row: f"{row['bytes'] / 1e6:.1f}"),
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
        f"The model has {decode['model']}'s shape in transformers {decode['transformers']}, with "
        f"{decode['layers']} layers and a vocabulary of {decode['vocabulary']}. It generates one "
        f"token at batch 1 at the end of a context of {decode['context']}, with torch.compile and "
        f"a CUDA graph, and each launch has another token. libnf4 is "
        f"`quantize_model(experts=True)`. Dense has the same numbers in bf16, multiplied by either "
        f"of transformers' implementations. The error is that of the logits relative to the first "
        f"dense form; a rounding can change the choice of experts.",
        DECODE.markdown(decode["forms"]),
    ]


def page(figures: Row, changed: Collection[str] = ()) -> str:
    found = figures["experts"]
    return pages.page("Mixture of experts", "experts", figures, changed, [
        f"The figures were measured on one {found['device']} on {found['date']}. They are products "
        f"of stacks of experts in bf16, NF4 with nested scales, in CUDA graphs that alternate "
        f"between {ROUTINGS} random routings; some rows of the results were first compared with "
        f"float64. In gate_up, libnf4 reads rows of x by index, without a sorted copy of x. The "
        f"other libraries get a sorted x, and their time does not include the copy. In down, x is "
        f"sorted for all. A layer is gate_up followed by down, without activation. The gradient is "
        f"dX for each row of gate_up's dY. The models are: {_models(found)}.",
        *pages.versions(found["peers"], {
            DENSE: "dense is torch {}'s grouped_mm on bf16 weights",
            DEQUANTIZED: "dequantize + dense is bitsandbytes {}'s dequantize of each active "
            "expert, where the host knows which are active, and grouped_mm",
            GROUPED_NF4: "grouped-nf4-gemm {} has flat scales, and its graph holds the "
            "routings of the capture",
        }),
        f"![{PLOT}](experts.svg)",
        "## Products",
        "The ratio to libnf4's time is in parentheses.",
        ROWS.markdown(found["rows"]),
        *(_decode(found["decode"]) if "decode" in found else []),
        "## An eager call",
        "The table has the host overhead of one product of a small stack, for calls that are not "
        "waited for.",
        CALLS.markdown(found["call"]),
        "## Bytes, spreads and errors",
        "The table has the bytes that a product reads of the active experts, the bandwidth that "
        "this is, and the error ||y - exact|| / ||exact|| with exact in float64.",
        DETAILS.markdown(found["rows"]),
    ])  # fmt: skip
