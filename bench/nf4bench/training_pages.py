"""Makes docs/bench/training.md, on QLoRA steps, from docs/bench/figures.json. It needs only
Python."""

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
    """Returns milliseconds, with the ratios to bitsandbytes and to dense in parentheses."""

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
    """Returns the forms that were timed beside libnf4, with the ratios to its time."""
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
    number("largest difference of a mean of 10", "{largest_mean:.1e}"),
    number("same from bitsandbytes in fp32", optional("from_fp32", "{:.1e}".format)),
    number("bitsandbytes' own from fp32", optional("bitsandbytes_from_fp32", "{:.1e}".format)),
    number("last mean", "{last:.4f}"),
    number("bitsandbytes' last mean", "{last_bitsandbytes:.4f}"),
)  # fmt: skip
PRODUCTS = Table(
    text("work", "{work}"), text("shape", shape), number("rows", "{m}"),
    number("libnf4 µs", form("libnf4", "{us:.1f}")), text("others, µs (ratio)", _others),
)  # fmt: skip
_PROFILE = Table(text("name", "{name}"), number("ms", "{ms:.2f}"), number("calls", "{calls}"))


def profiles(rows: Iterable[Row]) -> list[tuple[str, Filled]]:
    """Returns titles and tables of the GPU's and the host's time for each form of a step."""
    found = []
    for name, each in ((n, e) for row in rows for n, e in row["forms"].items() if "profile" in e):
        made = each["profile"]
        gpu = f"GPU time of {name}: {made['gpu_ms']} ms in {made['launches']} launches"
        for title, events in ((gpu, made["kernels"]), (f"Host time of {name}", made["operators"])):
            largest = [dict(zip(("name", "ms", "calls"), event, strict=True)) for event in events]
            found.append((title, Filled(_PROFILE, largest)))
    return found


def _profiles(figures: Row) -> list[str]:
    parts = []
    for title, table in profiles(figures["rows"]):
        parts += [f"### {title}", table.markdown()]
    return parts


def _convergence(found: Row) -> list[str]:
    if not found.get("convergence"):
        return []
    return [
        "## Convergence",
        "The table compares the losses of the model of examples/python/qlora.py with those of PEFT "
        "over bitsandbytes' own kernels, from the same seed. The columns have the largest "
        "difference from bitsandbytes in one loss and in a mean of 10; the largest difference of a "
        "mean of 10 from bitsandbytes in fp32, and the same for bitsandbytes itself in bf16; and "
        "the last mean of both. Dense is PEFT over the dequantized weights. With this many rows, "
        "bitsandbytes multiplies dequantized weights as well.",
        CONVERGENCE.markdown(found["convergence"]),
    ]


def page(figures: Row, changed: Collection[str] = ()) -> str:
    found = figures["training"]
    batch, tokens = training_cases.TOKENS
    versions = found["versions"]
    return pages.page("QLoRA steps", "training", figures, changed, [
        f"The figures were measured on one {found['device']} on {found['date']}. The model has "
        f"LLaMA-7B's shape with {training_cases.SIZE.layers} layers and gets {batch}×{tokens} "
        f"tokens, in transformers {versions['transformers']} with PEFT {versions['peft']}, with "
        f"adapters of rank {training_cases.RANK} on all seven projections and AdamW (fused) on the "
        "adapters. The forms run eagerly and alternate, after the adapters' gradients were "
        "compared. libnf4 is NF4Linear; the drop-in is bitsandbytes' Linear4bit on libnf4's "
        "kernels; dense is PEFT over bf16 weights.",
        "## Times",
        "The ratios to bitsandbytes and to dense are in parentheses.",
        STEPS.markdown(found["rows"]),
        "The host needs this time to enqueue a step:",
        HOST.markdown(found["rows"]),
        "## Memory of a step",
        "The table has the most memory that a step takes in addition to weights, adapters and "
        "AdamW's state.",
        MEMORY.markdown(found["rows"]),
        "## The host overhead of one layer",
        "The table has forward and backward of one row of x through a layer with an adapter, for "
        "calls without synchronization, and the ratio to a trained torch.nn.Linear.",
        LAYER.markdown(found["layer"]),
        *_convergence(found),
        "## Single products",
        "The times are CUDA-graph replays that alternate, with weights that rotate past the L2 "
        f"cache, in bf16, nested, with adapters of rank {training_cases.RANK}. The gradient is "
        "dX = dY W; adapted is y = x W^T + s (x A^T) B^T; its backward pass is dX, dA and dB. The "
        "ratio to libnf4's time is in parentheses.",
        PRODUCTS.markdown(found["products"]),
        "## What fills a step",
        "The profiles are those of the first step above.",
        *_profiles(found),
    ])  # fmt: skip
