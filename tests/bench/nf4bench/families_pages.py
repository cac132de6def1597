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
    "`tests/bench/readme_table.py` makes this page from [figures.json](figures.json); "
    "`./dev bench --families` measures the figures.",
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
        f"The figures were measured on one {found['device']} on {found['date']}. The kernels of "
        f"each family are compiled as machine code of this GPU, without the kernels for Hopper's "
        f"own instructions, and have the shared memory that a CTA has on the GPUs of that family: "
        f"{'; '.join(f'{each}: {each.gpus}' for each in FAMILIES)}. "
        f"This has limits: bitsandbytes and dense products use Hopper's cuBLAS here, which those "
        f"GPUs do not have, and the clocks, the memory and the tensor cores of those GPUs are "
        f"different. libnf4 therefore promises the ratios, and the microseconds are not those of "
        f"the GPUs named.",
        "The times are eager calls that alternate, host overhead included, with inputs that rotate "
        f"past the L2 cache; y is compared with float64 first. bitsandbytes "
        f"{versions['bitsandbytes']} is Linear4bit on its own kernels; the drop-in is the same "
        f"layer served by libnf4; dequantize + dense is libnf4's dequantize and torch "
        f"{found['torch']}'s linear. NF4 has nested scales, and GPTQ has groups of {GROUP_SIZE}. "
        f"\"Better\" is the faster of bitsandbytes and dequantize + dense. NF4Linear is timed "
        f"without the drop-in. Where the drop-in is registered, as it is by default, NF4Linear "
        f"calls bitsandbytes' kernel where that is faster.",
        "## Products",
        *_products(found["products"]),
        "## QLoRA steps",
        f"The model has LLaMA-7B's shape with {STEP.size.layers} layers and gets {batch}×{tokens} "
        f"tokens in bf16, in transformers {versions['transformers']} with PEFT "
        f"{versions['peft']}, as on the page of [QLoRA steps](training.md).",
        tables.STEPS.markdown(found["steps"]),
        "## Experts",
        "The product is the gate and up projections of a layer in bf16, in eager calls. The table "
        "compares `nf4.torch.linear_grouped` with dequantizing all experts for torch's "
        "grouped_mm.",
        tables.EXPERTS.markdown(found["experts"]),
    ]) + "\n"  # fmt: skip
