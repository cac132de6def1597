"""The tables of the bench: their columns, for a terminal and for markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nf4bench.cases import INT4
from nf4bench.models_cases import FORMS, PEERS
from nf4bench.table import (
    NOTHING,
    Cell,
    Column,
    Filled,
    Row,
    Table,
    cell,
    form,
    grouped,
    number,
    optional,
    shape,
    text,
)  # fmt: skip

NAMES = {
    "bitsandbytes": "bitsandbytes", "unsloth": "Unsloth", "torch": "torch", "triton": "Triton",
    "dense": "dense", "tinygemm": "int4", "humming": "Humming", "split-K": "split-K Triton",
    "AutoGPTQ": "AutoGPTQ's Triton", "awq": "AWQ", "compressed-tensors": "compressed-tensors",
    "public call": "public call", "act order": "act order", "reordered": "reordered",
    "nf4": "NF4", "nf4 nested": "NF4 nested",
    "gptq": "GPTQ", "gptq_v2": "GPTQ v2", "dequantize + dense": "dequantize + dense",
    "grouped-nf4-gemm": "grouped-nf4-gemm",
}  # fmt: skip
AS_OPERATOR = " as an operator"  # a peer's name with this: its call, made one of torch's
SPREAD = number("deciles", "{spread[0]:.2f}..{spread[1]:.2f}")
_IDENTITY = ("work", "shape", "weights", "m", "dtype", "nested", "blocksize", "format", "placement")


def cases(rows: Iterable[Row]) -> list[dict[str, Row]]:
    """The rows of one case or product together: {"plain": row, "pdl": row}, or "plain" alone."""
    found = grouped(rows, lambda row: tuple(str(row.get(name)) for name in _IDENTITY))
    return [{row["launch"]: row for row in each} for each in found.values()]


def plain(what: str | Cell) -> Cell:
    """Of a case's plain launch."""
    return optional("plain", what)


def _peer(name: str, peers: Mapping[str, Row]) -> Cell:
    def made(row: Row) -> str:
        found = row["peers"].get(name)
        if not found:
            return "missing" if "missing" in peers.get(name, {}) else NOTHING
        over = f" of {row['as_calls']['us']:.1f}" if "as_calls" in row else ""
        return f"{found['us']:.1f} ({found['ratio']:.2f}x{over})"

    return plain(made)


def peer_columns(names: Iterable[str], peers: Mapping[str, Row]) -> list[Column]:
    return [number(f"{NAMES[name]} µs (ratio)", _peer(name, peers)) for name in names]


_SHAPE, _DTYPE, _M = text("shape", shape), text("dtype", "{dtype}"), number("M", "{m}")
_US, _ROOFLINE = number("µs", "{us:.2f}"), number("roofline µs", "{roofline[us]:.2f}")
_PLAIN_US = number("µs", plain("{us:.1f}"))
_OF_ROOFLINE = number("of the roofline", plain("{of_roofline:.0%}"))
_PDL_US = number("with PDL µs", optional("pdl", "{us:.1f}"))
_PDL = [_PDL_US, number("of the roofline", optional("pdl", "{of_roofline:.0%}"))]

# ---- Dequantize and quantize ------------------------------------------------------------


def layout(row: Row) -> str:
    """What sets a row's weight apart besides its shape and dtype."""
    if row["format"] in INT4:
        return NAMES[row["format"]]
    parts = ["nested" if row["nested"] else "flat"]
    if row["format"] != "nf4":
        parts.append({"fp4": "FP4", "own": "own codebook"}[row["format"]])
    if row["blocksize"] != 64:
        parts.append(f"blocksize {row['blocksize']}")
    if row["placement"] != "aligned":
        parts.append(row["placement"])
    return ", ".join(parts)


def rows(peers: Mapping[str, Row], names: Sequence[str]) -> Table:
    """Of cases, both ways to launch in a line."""
    return Table(
        text("work", plain("{work}")), text("shape", plain(shape)), text("dtype", plain("{dtype}")),
        text("layout", plain(layout)), _PLAIN_US, number("GB/s", plain("{gb_per_s:.0f}")),
        _OF_ROOFLINE, *_PDL, *peer_columns(names, peers),
    )  # fmt: skip


# Every row with its spread, its rooflines and the configuration that was launched.
SPREADS = Table(
    text("work", "{work}"), _SHAPE, _DTYPE, text("layout", layout), text("launch", "{launch}"),
    text("configuration", lambda row: row.get("configuration") or NOTHING), _US, SPREAD, _ROOFLINE,
    number("read µs", optional("read", "{us:.2f}")),
    number("write µs", optional("write", "{us:.2f}")),
)  # fmt: skip
# Times with a reader, and of dequantize alone behind them.
CONSUMER = Table(
    _SHAPE, _DTYPE, number("output MiB", lambda row: f"{row['bytes'] / 2**20:.0f}"),
    *(
        number(f"{title} µs", f"{{then_read[{name}][us]:.1f}} ({{alone[{name}][us]:.1f}})")
        for title, name in (
            ("libnf4", "libnf4"), ("normal stores", "normal"),
            ("stores that evict first", "evict_first"),
        )
    ),
    number("normal over ours", "{ratio:.2f}x"),
)  # fmt: skip

# ---- Calls and the challenge ------------------------------------------------------------


def _named(figures: Mapping[str, Row], **more: Mapping[str, Row]) -> list[dict]:
    """Rows of what is kept by name."""
    return [
        {"name": NAMES.get(name, name), "ratio": 1, **each, **{k: v[name] for k, v in more.items()}}
        for name, each in figures.items()
    ]


def calls(figures: Row) -> list[Filled]:
    """Of dequantize: with a synchronize, and host overhead alone."""
    waited, host = figures["waited"], figures["host"]
    title = f"one call at {shape(waited)} and a device synchronize"
    columns = [number("µs", "{us:.1f}"), number("ratio", "{ratio:.2f}x")]
    of_host = Table(text(f"host overhead of one call at {shape(host)}", "{name}"), _US)
    return [
        Filled(Table(text(title, "{name}"), *columns), _named(waited["calls"])),
        Filled(of_host, _named(host["calls"])),
    ]


def matmul_calls(figures: Row) -> Filled:
    made = Table(
        text(f"one call at {shape(figures)}, M = {figures['m']}", "{name}"),
        number("host overhead µs", "{us:.2f}"), number("ratio", "{ratio:.2f}x"),
        number("with a synchronize µs", "{waited[us]:.1f}"),
        number("ratio", "{waited[ratio]:.2f}x"),
    )  # fmt: skip
    return Filled(made, _named(figures["host"], waited=figures["waited"]))


def layer_calls(figures: Row) -> Filled:
    title = f"one eager call of a layer at {shape(figures)}, M = 1"
    columns = (
        number("host overhead µs", "{us:.2f}"), number("ratio", "{ratio:.2f}x"),
        number("with gradients µs", optional("gradients", "{us:.2f}")),
        number("ratio", optional("gradients", lambda each: f"{each.get('ratio', 1):.2f}x")),
    )  # fmt: skip
    return Filled(Table(text(title, "{name}"), *columns), _named(figures["forms"]))


_COMPILED = optional("compiled", lambda each: f"{each['us']:.1f}" if "us" in each else "refused")
CHALLENGE = Table(
    text("implementation", "{name}"), number("eager µs", optional("eager", "{us:.1f}")),
    number("compiled µs", _COMPILED),
    number("eager, over libnf4's", optional("over", "{:.2f}x".format)),
)  # fmt: skip
POINTS = Table(
    text("asked", "{asked}"), text("evidence", "{evidence}"), number("points", "{points} of {of}")
)


def challenge(figures: Row) -> list[Filled]:
    """Times, and points."""
    eager, compiled = figures["eager"], figures["compiled"]
    found = []
    for name in {**eager, **compiled}:
        bare = name.removesuffix(AS_OPERATOR)
        found.append({
            "name": NAMES.get(bare, bare) + name.removeprefix(bare),
            "eager": eager.get(name), "compiled": compiled.get(name),
            "over": name in eager and eager[name]["us"] / eager["libnf4"]["us"],
        })  # fmt: skip
    return [Filled(CHALLENGE, found), Filled(POINTS, figures["points"])]


# ---- Matmul -----------------------------------------------------------------------------


def weight(row: Row) -> str:
    if row.get("format") in INT4:
        return f"{row['dtype']}, {NAMES[row['format']]}"
    return f"{row['dtype']}, {'nested' if row['nested'] else 'flat'}"


def of_dense(row: Row) -> str:
    dense = row["peers"].get("dense")
    return f"{dense['us'] / row['us']:.0%}" if dense else NOTHING


def matmul(peers: Mapping[str, Row], many: bool = False, several: bool = False) -> Table:
    """Of products, both ways to launch in a line.

    many     of many rows of x: TFLOPS and percent of dense, else of the bandwidth roofline
    several  of several weights, so that there are calls for each to compare with
    """
    of_dense_columns = [
        number("TFLOPS", plain("{tflop_per_s:.0f}")), number("of dense", plain(of_dense)), _PDL_US,
    ]  # fmt: skip
    apart = optional("apart", "{us:.1f} ({ratio:.2f}x)")
    of_several = [
        number("a call each µs (ratio)", plain(apart)),
        number("with PDL µs (ratio)", optional("pdl", apart)),
    ]
    return Table(
        text("shape", plain(shape)), text("weight", plain(weight)), number("M", plain("{m}")),
        _PLAIN_US, *(of_dense_columns if many else [_OF_ROOFLINE, *_PDL]),
        *(of_several if several else []), *peer_columns(peers, peers),
    )  # fmt: skip


# Every row with its kernel, its spread and its error.
MATMUL_SPREADS = Table(
    text("shape", lambda row: (f"{row['weights']} of " if row["weights"] > 1 else "") + shape(row)),
    text("weight", weight), text("launch", "{launch}"), text("kernel", "{kernel}"), _M, _US, SPREAD,
    number("TFLOPS", "{tflop_per_s:.0f}"), _ROOFLINE, number("error", "{error:.2e}"),
)  # fmt: skip


def over_dense(row: Row) -> float | None:
    """Our error over that of a dense product with the rounded weight."""
    errors = row["errors"]
    return errors["libnf4"] / errors["dense"] if "dense" in errors else None


_ERROR_NAMES = ("libnf4", "bitsandbytes", "dense")
ERRORS = Table(
    text("weight", weight), text("x", "{x}"), _M,
    *(number(name, optional(name, "{:.2e}".format)) for name in _ERROR_NAMES),
    number("libnf4 over dense", optional("over", "{:.3f}x".format)),
)  # fmt: skip
ERROR = Table(
    _SHAPE, text("weight", weight), text("x", "{x}"), _M,
    text("errors", lambda row: " ".join(f"{n} {e:.2e}" for n, e in row["errors"].items())),
)  # fmt: skip


def worst_errors(rows: Iterable[Row]) -> Filled:
    """Of each kind of weight and of x and each M: the largest over all shapes."""
    groups = grouped(rows, lambda row: (weight(row), row["x"], row["m"]))
    found = [
        {
            **some[0], **{n: max(row["errors"].get(n, 0) for row in some) for n in _ERROR_NAMES},
            "over": max(over_dense(row) or 0 for row in some),
        }
        for some in groups.values()
    ]  # fmt: skip
    return Filled(ERRORS, found)


# ---- Sweeps -----------------------------------------------------------------------------


def best(row: Row) -> int:
    """The index of the fastest configuration."""
    timed = [index for index, each in enumerate(row["times"]) if "us" in each]
    return min(timed, key=lambda index: row["times"][index]["us"])


def mark(row: Row, index: int) -> str:
    """A configuration's time over the best one's, which has its microseconds; the chosen is
    bold."""
    each = row["times"][index]
    if "us" not in each:
        return "refused"
    made = f"{each['ratio']:.3f}"
    if index == best(row):
        made = f"{made} = {each['us']:.2f} µs"
    return f"**{made}**" if index == row["chosen"] else made


def sweep(figures: Row, group: str | Cell, kind: str, column: str | Cell) -> list[Filled]:
    """For each group of rows a table: configurations, by the rows."""
    column = cell(column)
    names = [{"name": n, "index": i} for i, n in enumerate(figures["configurations"])]
    return [
        Filled(
            Table(
                text(f"{title}: {kind}", "{name}"),
                *(
                    number(column(row), lambda each, row=row: mark(row, each["index"]))
                    for row in rows
                ),
            ),
            names,
        )
        for title, rows in grouped(figures["rows"], cell(group)).items()
    ]


def sweep_line(figures: Row, row: Row) -> str:
    names, chosen, fastest = figures["configurations"], row["chosen"], best(row)
    what = f"{shape(row)} {row['dtype']}" + (f" M={row['m']}" if "m" in row else "")
    found = f"{what}: best {names[fastest]} {row['times'][fastest]['us']:.2f} us; "
    if chosen < 0:
        return f"{found}the library takes none"
    return f"{found}chosen {names[chosen]} {mark(row, chosen)}"


# ---- Whole models -----------------------------------------------------------------------

WORKS = {
    "decode": "decode", "prefill": "prefill", "training": "forward + backward",
    "mlp": "MLP, forward",
}  # fmt: skip


def layers(row: Row) -> str:
    return "1 layer" if row["layers"] == 1 else f"{row['layers']} layers"


def work(row: Row) -> str:
    """The work and its size: sequences, and tokens of each."""
    decode = row["work"] == "decode"
    size = f"batch {row['batch']}" if decode else f"{row['batch']}×{row['tokens']}"
    made = f"{WORKS[row['work']]} {size}"
    return f"{made}, {row['hidden']}/{row['intermediate']}" if row["work"] == "mlp" else made


def _compiled_work(row: Row) -> str:
    return work(row) + (", compiled" if row["compiled"] else "")


def launched(row: Row) -> str:
    parts = ["compiled"] * row["compiled"] + ["CUDA graph"] * (row["launch"] == "graph")
    return ", ".join(parts) or "eager"


def _milliseconds(us: float) -> str:
    return f"{us / 1e3:.2f}" if us < 1e5 else f"{us / 1e3:.0f}"


def _form_time(name: str) -> Cell:
    def timed(each: Row) -> str:
        ratio = f" ({each['ratio']:.2f}x)" if "ratio" in each else ""
        return _milliseconds(each["us"]) + ratio

    made = form(name, timed)
    return lambda row: "failed" if name in row["failed"] else made(row)


def _memory_of(each: Row) -> str:
    return f"{each['weights'] / 1e9:.2f} + {each['step'] / 1e9:.2f}"


_MODEL = [text("work", work), text("model", layers), text("launched", launched)]
MODELS = Table(
    *_MODEL, number("ms", _form_time("libnf4")),
    *(number(f"{name} ms (ratio)", _form_time(name)) for name in FORMS[1:]),
)  # fmt: skip
_MEMORY = Table(
    text("work", _compiled_work), _MODEL[1],
    *(number(f"{name} GB", form(name, _memory_of)) for name in ("libnf4", *PEERS)),
)  # fmt: skip
_SPREADS = Table(
    *_MODEL, text("form", "{form}"), number("ms", "{ms}"), number("deciles", "{spread}"),
    number("error", lambda row: NOTHING if row["error"] is None else f"{row['error']:.2e}"),
)  # fmt: skip


def memory(rows: Iterable[Row]) -> Filled:
    """Of the first of each work: launched another way it takes as much."""
    works = grouped(rows, lambda row: (_compiled_work(row), layers(row)))
    return Filled(_MEMORY, [some[0] for some in works.values()])


def forms(rows: Iterable[Row]) -> Filled:
    """A row for each form; the error is NF4Linear's."""
    found = [
        {
            **row, "form": name, "ms": _milliseconds(each["us"]),
            "spread": "..".join(map(_milliseconds, each["spread"])),
            "error": row["error"] if name == "libnf4" else None,
        }
        for row in rows
        for name, each in row["forms"].items()
    ]  # fmt: skip
    return Filled(_SPREADS, found)
