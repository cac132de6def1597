"""Makes the tables of a QLoRA step: times, memory, and what fills it. It needs only Python."""

from __future__ import annotations

from collections.abc import Iterable

from nf4bench.models_cases import FORMS
from nf4bench.table import NOTHING, Cell, Column, Filled, Row, Table, number, optional, text


def _over(row: Row, name: str, other: str) -> str:
    forms = row["forms"]
    return f"{forms[name]['us'] / forms[other]['us']:.2f}" if {name, other} <= set(forms) else ""


def _form(name: str) -> Cell:
    def made(row: Row) -> str:
        if name not in row["forms"]:
            return NOTHING
        each = row["forms"][name]
        over = [_over(row, name, peer) for peer in ("bitsandbytes", "dense") if peer != name]
        return f"{each['us'] / 1e3:.1f} ({', '.join(filter(None, over))})"

    return made


def _of(name: str, field: str, unit: float, digits: int) -> Cell:
    def made(row: Row) -> str:
        each = row["forms"].get(name)
        return f"{each[field] / unit:.{digits}f}" if each else NOTHING

    return made


def _of_each(title: str, field: str, unit: float, digits: int) -> list[Column]:
    return [number(f"{name} {title}", _of(name, field, unit, digits)) for name in FORMS]


_STEP = [
    text("adapters", "{adapters}"),
    text("checkpointing", lambda row: "yes" if row["checkpointing"] else "no"),
]
# The ratios to bitsandbytes and to dense are in parentheses.
STEPS = Table(*_STEP, *(number(f"{name} ms", _form(name)) for name in FORMS))
HOST = Table(*_STEP, *_of_each("host ms", "host_us", 1e3, 1))
MEMORY = Table(*_STEP, *_of_each("GB", "step_bytes", 1e9, 2))
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


def _others(row: Row) -> str:
    """Returns the forms that were timed beside libnf4, with the ratios to its time."""
    ours = row["forms"]["libnf4"]["us"]
    return ", ".join(
        f"{name} {each['us']:.1f} ({each['us'] / ours:.2f}x)"
        for name, each in row["forms"].items()
        if name != "libnf4"
    )


PRODUCTS = Table(
    text("work", "{work}"), text("shape", lambda row: "×".join(map(str, row["shape"]))),
    number("rows", "{m}"), number("libnf4 µs", lambda row: f"{row['forms']['libnf4']['us']:.1f}"),
    text("others, µs (ratio)", _others),
)  # fmt: skip
_PROFILE = Table(text("name", "{name}"), number("ms", "{ms:.2f}"), number("calls", "{calls}"))


def _largest(found: Iterable[list]) -> list[dict]:
    return [{"name": name, "ms": ms, "calls": calls} for name, ms, calls in found]


def profiles(rows: Iterable[Row]) -> list[tuple[str, Filled]]:
    """Returns titles and tables of the GPU's and the host's time for each form of a step."""
    found = []
    for row in rows:
        for name, form in row["forms"].items():
            if "profile" not in form:
                continue
            made = form["profile"]
            gpu = f"GPU time of {name}: {made['gpu_ms']} ms in {made['launches']} launches"
            found.append((gpu, Filled(_PROFILE, _largest(made["kernels"]))))
            found.append((f"Host time of {name}", Filled(_PROFILE, _largest(made["operators"]))))
    return found
