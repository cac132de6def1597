"""Makes docs/bench/families.md, on the kernels of other GPUs, from docs/bench/figures.json. It
needs only Python."""

from __future__ import annotations

from collections.abc import Collection

from nf4bench import pages
from nf4bench.families_cases import (
    BITSANDBYTES,
    DENSE,
    DROP_IN,
    FAMILIES,
    FORMS,
    GROUP_SIZE,
    GROUPED_DENSE,
    INT4,
    INT4_DENSE,
    LAYER,
    STEP,
)
from nf4bench.table import Cell, Row, Table, form, grouped, number, over, shape, text

_TITLES = {LAYER: "NF4Linear", INT4: "Int4Linear", INT4_DENSE: "int4 dequantize + dense"}


def _over(name: str, *others: str) -> Cell:
    return lambda row: f"{over(row, name, *others):.2f}"


_FAMILY = text("kernels", "{family}")
# The last four are at most 1 where libnf4 is never slower.
PRODUCTS = Table(
    _FAMILY, text("shape", shape), number("M", "{m}"),
    *(number(f"{_TITLES.get(name, name)} µs", form(name, "{us:.1f}")) for name in FORMS),
    number("drop-in / bitsandbytes", _over(DROP_IN, BITSANDBYTES)),
    number("drop-in / better", _over(DROP_IN, BITSANDBYTES, DENSE)),
    number("NF4Linear / better", _over(LAYER, BITSANDBYTES, DENSE)),
    number("Int4Linear / dense", _over(INT4, INT4_DENSE)),
)  # fmt: skip
STEPS = Table(
    _FAMILY,
    *(number(f"{_TITLES.get(name, name)} ms", form(name, lambda each: f"{each['us'] / 1e3:.1f}"))
      for name in (BITSANDBYTES, DROP_IN, LAYER)),
    number("drop-in / bitsandbytes", _over(DROP_IN, BITSANDBYTES)),
    number("NF4Linear / bitsandbytes", _over(LAYER, BITSANDBYTES)),
)  # fmt: skip
EXPERTS = Table(
    _FAMILY, text("model", "{model}"), number("tokens", "{tokens}"),
    number("libnf4 µs", form(LAYER, "{us:.1f}")),
    number(f"{GROUPED_DENSE} µs", form(GROUPED_DENSE, "{us:.1f}")),
    number("libnf4 / dense", _over(LAYER, GROUPED_DENSE)),
)  # fmt: skip


def _products(rows: list[Row]) -> list[str]:
    parts = []
    for (family, size), of in grouped(rows, lambda row: (row["family"], shape(row))).items():
        parts += [f"### {family}: {size}, {of[0]['dtype']}", PRODUCTS.markdown(of)]
    return parts


def page(figures: Row, changed: Collection[str] = ()) -> str:
    found = figures["families"]
    batch, tokens = STEP.tokens
    versions = found["versions"]
    return pages.page("By family", "families", figures, changed, [
        f"The figures were measured on one {found['device']} on {found['date']}. The kernels of "
        f"each family are compiled as machine code of this GPU, without the kernels for Hopper's "
        f"own instructions, and have the shared memory that a CTA has on the GPUs of that family: "
        f"{'; '.join(f'{each}: {each.gpus}' for each in FAMILIES)}. "
        f"This has limits: bitsandbytes and dense products use Hopper's cuBLAS here, which those "
        f"GPUs do not have, and the clocks, the memory and the tensor cores of those GPUs are "
        f"different. Therefore compare ratios and not microseconds; on the GPUs named, the ratios "
        f"may differ, too.",
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
        STEPS.markdown(found["steps"]),
        "## Experts",
        "The product is the gate and up projections of a layer in bf16, in eager calls. The table "
        "compares `nf4.torch.linear_grouped` with dequantizing all experts for torch's "
        "grouped_mm.",
        EXPERTS.markdown(found["experts"]),
    ])  # fmt: skip
