"""docs/bench/training.md: QLoRA steps, made from docs/bench/figures.json. Needs only Python."""

from __future__ import annotations

from collections.abc import Collection

from nf4bench import pages, training_cases, training_tables
from nf4bench.table import Row


def _profiles(figures: Row) -> list[str]:
    parts = []
    for title, table in training_tables.profiles(figures["rows"]):
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
        training_tables.CONVERGENCE.markdown(found["convergence"]),
    ]


def page(figures: Row, changed: Collection[str] = ()) -> str:
    found = figures["training"]
    batch, tokens = training_cases.TOKENS
    versions = found["versions"]
    return "\n\n".join([
        "# QLoRA steps",
        "Made by `bench/readme_table.py` from [figures.json](figures.json); "
        "`./dev bench --training` measures.",
        *pages.note(figures, changed, ["training"]),
        f"Measured on one {found['device']} on {found['date']}: LLaMA-7B's shape with "
        f"{training_cases.SIZE.layers} layers, {batch}×{tokens} tokens, in transformers "
        f"{versions['transformers']} with PEFT {versions['peft']}, adapters of rank "
        f"{training_cases.RANK} on all seven projections, AdamW (fused) on the adapters; eager, in "
        "turns, the adapters' gradients compared first. libnf4 is NF4Linear; the drop-in is "
        "bitsandbytes' Linear4bit on libnf4's kernels; dense is PEFT over bf16 weights.",
        "## Times",
        "In parentheses: over bitsandbytes, over dense.",
        training_tables.STEPS.markdown(found["rows"]),
        "Until the host has enqueued a step:",
        training_tables.HOST.markdown(found["rows"]),
        "## Memory of a step",
        "The most beside weights, adapters and AdamW's state.",
        training_tables.MEMORY.markdown(found["rows"]),
        "## The host overhead of one layer",
        "Forward and backward of one row of x through a layer with an adapter, nothing waited for; "
        "over a torch.nn.Linear that is trained.",
        training_tables.LAYER.markdown(found["layer"]),
        *_convergence(found),
        "## Single products",
        "CUDA-graph replays in turns, weights rotating past the L2 cache, bf16 nested; adapters of "
        f"rank {training_cases.RANK}. The gradient is dX = dY W; adapted is y = x W^T + s (x A^T) "
        "B^T; its backward pass is dX, dA and dB. In parentheses the time over libnf4's.",
        training_tables.PRODUCTS.markdown(found["products"]),
        "## What fills a step",
        "Of the first step above.",
        *_profiles(found),
    ]) + "\n"  # fmt: skip
