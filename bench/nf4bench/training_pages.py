"""docs/bench/training.md and its tables: QLoRA steps. Needs only Python."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from nf4bench import pages, training_cases
from nf4bench.models_cases import FORMS
from nf4bench.table import (
    NOTHING,
    Cell,
    Column,
    Filled,
    Row,
    Table,
    form,
    number,
    optional,
    over,
    shape,
    text,
)


def _time(name: str) -> Cell:
    """Milliseconds; in parentheses over bitsandbytes, and over dense."""

    def made(row: Row) -> str:
        if name not in row["forms"]:
            return NOTHING
        others = [each for each in ("bitsandbytes", "dense") if each in row["forms"]]
        ratios = [f"{over(row, name, each):.2f}" for each in others if each != name]
        return f"{row['forms'][name]['us'] / 1e3:.1f} ({', '.join(ratios)})"

    return made


def _of_each(title: str, made: Cell) -> list[Column]:
    return [number(f"{name} {title}", form(name, made)) for name in FORMS]


def _others(row: Row) -> str:
    """What was timed beside libnf4, and its time over ours."""
    return ", ".join(
        f"{name} {each['us']:.1f} ({over(row, name, 'libnf4'):.2f}x)"
        for name, each in row["forms"].items()
        if name != "libnf4"
    )


_STEP = [
    text("adapters", "{adapters}"),
    text("checkpointing", lambda row: "yes" if row["checkpointing"] else "no"),
]
STEPS = Table(*_STEP, *(number(f"{name} ms", _time(name)) for name in FORMS))
HOST = Table(*_STEP, *_of_each("host ms", lambda each: f"{each['host_us'] / 1e3:.1f}"))
MEMORY = Table(*_STEP, *_of_each("GB", lambda each: f"{each['step_bytes'] / 1e9:.2f}"))
LAYER = Table(
    text("layer", "{name}"), text("adapters", "{adapters}"), number("µs", "{us:.1f}"),
    number("over nn.Linear", "{ratio:.2f}x"),
)  # fmt: skip
CONVERGENCE = Table(
    text("layer", "{form}"), text("computes in", "{dtype}"), number("steps", "{steps}"),
    number("largest difference of a loss", "{largest:.1e}"),
    number("of a mean of 10", "{largest_mean:.1e}"),
    number("from fp32's", optional("from_fp32", "{:.1e}".format)),
    number("bitsandbytes' from them", optional("bitsandbytes_from_fp32", "{:.1e}".format)),
    number("last mean", "{last:.4f}"),
    number("bitsandbytes'", "{last_bitsandbytes:.4f}"),
)  # fmt: skip
PRODUCTS = Table(
    text("work", "{work}"), text("shape", shape), number("rows", "{m}"),
    number("libnf4 µs", form("libnf4", "{us:.1f}")), text("beside it, µs", _others),
)  # fmt: skip
_PROFILE = Table(text("name", "{name}"), number("ms", "{ms:.2f}"), number("calls", "{calls}"))


def profiles(rows: Iterable[Row]) -> list[tuple[str, Filled]]:
    """Of each form of the first step: a title, and a table of the GPU's or the host's time."""
    found = []
    for name, each in ((n, e) for row in rows for n, e in row["forms"].items() if "profile" in e):
        made = each["profile"]
        gpu = f"{name}: {made['gpu_ms']} ms of the GPU in {made['launches']} launches"
        for title, events in ((gpu, made["kernels"]), (f"{name}: the host", made["operators"])):
            largest = [dict(zip(("name", "ms", "calls"), event, strict=True)) for event in events]
            found.append((title, Filled(_PROFILE, largest)))
    return found


def _profiles(figures: Row) -> list[str]:
    parts = []
    for title, table in profiles(figures["rows"]):
        parts += [f"### {title[0].upper()}{title[1:]}", table.markdown()]
    return parts


def _convergence(found: Row) -> list[str]:
    if not found.get("convergence"):
        return []
    return [
        "## Convergence",
        "Losses of the model of examples/python/qlora.py beside those of PEFT over bitsandbytes' "
        "own kernels, from the same seed; from fp32's: of a mean of 10 from bitsandbytes' in fp32, "
        "and bitsandbytes' own in bf16. dense is PEFT over the dequantized weights, which of so "
        "many rows is what bitsandbytes multiplies, too.",
        CONVERGENCE.markdown(found["convergence"]),
    ]


def page(figures: Row, changed: Collection[str] = ()) -> str:
    found = figures["training"]
    batch, tokens = training_cases.TOKENS
    versions = found["versions"]
    return pages.page("QLoRA steps", "training", figures, changed, [
        f"Measured on one {found['device']} on {found['date']}: LLaMA-7B's shape with "
        f"{training_cases.SIZE.layers} layers, {batch}×{tokens} tokens, in transformers "
        f"{versions['transformers']} with PEFT {versions['peft']}, adapters of rank "
        f"{training_cases.RANK} on all seven projections, AdamW (fused) on the adapters; eager, in "
        "turns, the adapters' gradients compared first. libnf4 is NF4Linear; the drop-in is "
        "bitsandbytes' Linear4bit on libnf4's kernels; dense is PEFT over bf16 weights.",
        "## Times",
        "In parentheses: over bitsandbytes, over dense.",
        STEPS.markdown(found["rows"]),
        "Until the host has enqueued a step:",
        HOST.markdown(found["rows"]),
        "## Memory of a step",
        "The most beside weights, adapters and AdamW's state.",
        MEMORY.markdown(found["rows"]),
        "## The host overhead of one layer",
        "Forward and backward of one row of x through a layer with an adapter, nothing waited for; "
        "over a torch.nn.Linear that is trained.",
        LAYER.markdown(found["layer"]),
        *_convergence(found),
        "## Single products",
        "CUDA-graph replays in turns, weights rotating past the L2 cache, bf16 nested; adapters of "
        f"rank {training_cases.RANK}. The gradient is dX = dY W; adapted is y = x W^T + s (x A^T) "
        "B^T; its backward pass is dX, dA and dB. In parentheses the time over libnf4's.",
        PRODUCTS.markdown(found["products"]),
        "## What fills a step",
        "Of the first step above.",
        *_profiles(found),
    ])  # fmt: skip
