"""Makes docs/bench/training.md, on QLoRA steps, from docs/bench/figures.json. It needs only
Python."""

from __future__ import annotations

from collections.abc import Collection

from nf4bench import pages, training_cases, training_tables
from nf4bench.table import Row


def _profiles(figures: Row) -> list[str]:
    parts = []
    for title, table in training_tables.profiles(figures["rows"]):
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
        training_tables.CONVERGENCE.markdown(found["convergence"]),
    ]


def page(figures: Row, changed: Collection[str] = ()) -> str:
    found = figures["training"]
    batch, tokens = training_cases.TOKENS
    versions = found["versions"]
    return "\n\n".join([
        "# QLoRA steps",
        "`tests/bench/readme_table.py` makes this page from [figures.json](figures.json); "
        "`./dev bench --training` measures the figures.",
        *pages.note(figures, changed, ["training"]),
        f"The figures were measured on one {found['device']} on {found['date']}. The model has "
        f"LLaMA-7B's shape with {training_cases.SIZE.layers} layers and gets {batch}×{tokens} "
        f"tokens, in transformers {versions['transformers']} with PEFT {versions['peft']}, with "
        f"adapters of rank {training_cases.RANK} on all seven projections and AdamW (fused) on the "
        "adapters. The forms run eagerly and alternate, after the adapters' gradients were "
        "compared. libnf4 is NF4Linear; the drop-in is bitsandbytes' Linear4bit on libnf4's "
        "kernels; dense is PEFT over bf16 weights.",
        "## Times",
        "The ratios to bitsandbytes and to dense are in parentheses.",
        training_tables.STEPS.markdown(found["rows"]),
        "The host needs this time to enqueue a step:",
        training_tables.HOST.markdown(found["rows"]),
        "## Memory of a step",
        "The table has the most memory that a step takes in addition to weights, adapters and "
        "AdamW's state.",
        training_tables.MEMORY.markdown(found["rows"]),
        "## The host overhead of one layer",
        "The table has forward and backward of one row of x through a layer with an adapter, for "
        "calls that are not waited for, and the ratio to a torch.nn.Linear that is trained.",
        training_tables.LAYER.markdown(found["layer"]),
        *_convergence(found),
        "## Single products",
        "The times are CUDA-graph replays that alternate, with weights that rotate past the L2 "
        f"cache, in bf16, nested, with adapters of rank {training_cases.RANK}. The gradient is "
        "dX = dY W; adapted is y = x W^T + s (x A^T) B^T; its backward pass is dX, dA and dB. The "
        "ratio to libnf4's time is in parentheses.",
        training_tables.PRODUCTS.markdown(found["products"]),
        "## What fills a step",
        "The profiles are those of the first step above.",
        *_profiles(found),
    ]) + "\n"  # fmt: skip
