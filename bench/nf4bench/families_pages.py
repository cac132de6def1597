"""Makes docs/bench/families.md, on the kernels of other GPUs, from docs/bench/figures.json. It
needs only Python."""

from __future__ import annotations

from collections.abc import Collection

from nf4bench import families_tables as tables
from nf4bench import pages
from nf4bench.families_cases import FAMILIES, GROUP_SIZE, STEP
from nf4bench.table import Row, grouped, shape

_HEAD = (
    "# By family",
    "Made by `bench/readme_table.py` from [figures.json](figures.json); "
    "`./dev bench --families` measures.",
)


def _named(row: Row) -> str:
    return row["family"]


def _products(rows: list[Row]) -> list[str]:
    parts = []
    for (family, size), of in grouped(rows, lambda row: (_named(row), shape(row))).items():
        parts += [f"### {family}: {size}, {of[0]['dtype']}", tables.PRODUCTS.markdown(of)]
    return parts


def page(figures: Row, changed: Collection[str] = ()) -> str:
    found = figures.get("families")
    if found is None:
        return "\n\n".join([*_HEAD, "There are no figures yet."]) + "\n"
    batch, tokens = STEP.tokens
    versions = found["versions"]
    return "\n\n".join([
        *_HEAD,
        *pages.note(figures, changed, ["families"]),
        f"Measured on one {found['device']} on {found['date']}. The kernels of each family are "
        f"compiled as machine code of this GPU, without the kernels for Hopper's own instructions, "
        f"and have the shared memory that a CTA has on the GPUs of that family: "
        f"{'; '.join(f'{each}: {each.gpus}' for each in FAMILIES)}. "
        f"What this cannot show: bitsandbytes and dense products have Hopper's cuBLAS here, which "
        f"those GPUs have not, and their clocks, memory and tensor cores are others. So the ratios "
        f"are what libnf4 promises, and the microseconds are not those of the GPUs named.",
        "Eager calls in turns, host overhead included, inputs rotating past the L2 cache; y is "
        f"compared with float64 first. bitsandbytes {versions['bitsandbytes']} is Linear4bit on "
        f"its own kernels; the drop-in is the same layer served by libnf4; dequantize + dense is "
        f"libnf4's dequantize and torch {found['torch']}'s linear. NF4 has nested scales, GPTQ "
        f"groups of {GROUP_SIZE}. \"Better\" is the faster of bitsandbytes and dequantize + "
        f"dense. NF4Linear is timed without the drop-in. Where the drop-in is registered, as it is "
        f"by default, NF4Linear calls bitsandbytes' kernel where that is faster.",
        "## Products",
        *_products(found["products"]),
        "## QLoRA steps",
        f"LLaMA-7B's shape with {STEP.size.layers} layers, {batch}×{tokens} tokens in bf16, in "
        f"transformers {versions['transformers']} with PEFT {versions['peft']}, as on the page of "
        "[QLoRA steps](training.md).",
        tables.STEPS.markdown(found["steps"]),
        "## Experts",
        "The gate and up projections of a layer, bf16, in eager calls: `nf4.torch.linear_grouped` "
        "beside dequantizing all experts for torch's grouped_mm.",
        tables.EXPERTS.markdown(found["experts"]),
    ]) + "\n"  # fmt: skip
