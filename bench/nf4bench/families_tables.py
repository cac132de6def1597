"""Makes the tables of other GPUs' kernels: products, QLoRA steps, experts. It needs only Python."""

from __future__ import annotations

from nf4bench.families_cases import (
    BITSANDBYTES,
    DENSE,
    DROP_IN,
    FORMS,
    INT4,
    INT4_DENSE,
    LAYER,
)
from nf4bench.table import Cell, Row, Table, number, shape, text

_TITLES = {LAYER: "NF4Linear", INT4: "Int4Linear", INT4_DENSE: "int4 dequantize + dense"}


def _time(form: str) -> Cell:
    return lambda row: f"{row['forms'][form]['us']:.1f}"


def over(row: Row, form: str, *others: str) -> float:
    """Returns the time of a form over the least of the others'."""
    return row["forms"][form]["us"] / min(row["forms"][each]["us"] for each in others)


def _over(form: str, *others: str) -> Cell:
    return lambda row: f"{over(row, form, *others):.2f}"


_FAMILY = text("kernels", "{family}")
# The last four are at most 1 where libnf4 is never slower.
PRODUCTS = Table(
    _FAMILY, text("shape", shape), number("M", "{m}"),
    *(number(f"{_TITLES.get(form, form)} µs", _time(form)) for form in FORMS),
    number("drop-in / bitsandbytes", _over(DROP_IN, BITSANDBYTES)),
    number("drop-in / better", _over(DROP_IN, BITSANDBYTES, DENSE)),
    number("NF4Linear / better", _over(LAYER, BITSANDBYTES, DENSE)),
    number("Int4Linear / dense", _over(INT4, INT4_DENSE)),
)  # fmt: skip


def _milliseconds(form: str) -> Cell:
    return lambda row: f"{row['forms'][form]['us'] / 1e3:.1f}"


STEPS = Table(
    _FAMILY,
    *(number(f"{_TITLES.get(each, each)} ms", _milliseconds(each))
      for each in (BITSANDBYTES, DROP_IN, LAYER)),
    number("drop-in / bitsandbytes", _over(DROP_IN, BITSANDBYTES)),
    number("NF4Linear / bitsandbytes", _over(LAYER, BITSANDBYTES)),
)  # fmt: skip

GROUPED_DENSE = "dequantize + grouped_mm"
EXPERTS = Table(
    _FAMILY, text("model", "{model}"), number("tokens", "{tokens}"),
    number("libnf4 µs", _time(LAYER)), number(f"{GROUPED_DENSE} µs", _time(GROUPED_DENSE)),
    number("libnf4 / dense", _over(LAYER, GROUPED_DENSE)),
)  # fmt: skip
