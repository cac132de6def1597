"""The tables of the bench: their columns, for a terminal and for markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nf4bench.table import (
    NOTHING,
    Cell,
    Column,
    Row,
    Table,
    by_launch,
    number,
    optional,
    shape,
    text,
)  # fmt: skip

NAMES = {
    "bitsandbytes": "bitsandbytes", "unsloth": "Unsloth", "torch": "torch", "triton": "Triton",
    "dense": "dense", "tinygemm": "int4",
}  # fmt: skip
AS_OPERATOR = " as an operator"  # a peer's name with this: its call, made one of torch's
SPREAD = "{spread[0]:.2f}..{spread[1]:.2f}"


def plain(what: str | Cell) -> Cell:
    """Of a case's plain launch."""
    return optional("plain", what)


def peer_cell(name: str, peers: Mapping[str, Row]) -> Cell:
    def made(case: Mapping[str, Row]) -> str:
        row = case["plain"]
        found = row["peers"].get(name)
        if not found:
            return "missing" if "missing" in peers.get(name, {}) else NOTHING
        over = f" of {row['as_calls']['us']:.1f}" if "as_calls" in row else ""
        return f"{found['us']:.1f} ({found['ratio']:.2f}x{over})"

    return made


def peer_columns(names: Iterable[str], peers: Mapping[str, Row]) -> list[Column]:
    return [number(f"{NAMES[name]} µs (ratio)", peer_cell(name, peers)) for name in names]


# ---- Dequantize and quantize ------------------------------------------------------------

_IDENTITY = ("work", "shape", "dtype", "nested", "blocksize", "format", "placement")


def layout(row: Row) -> str:
    """What sets a row's weight apart besides its shape and dtype."""
    parts = ["nested" if row["nested"] else "flat"]
    if row["format"] != "nf4":
        parts.append({"fp4": "FP4", "own": "own codebook"}[row["format"]])
    if row["blocksize"] != 64:
        parts.append(f"blocksize {row['blocksize']}")
    if row["placement"] != "aligned":
        parts.append(row["placement"])
    return ", ".join(parts)


def cases(rows: Iterable[Row]) -> list[dict[str, Row]]:
    return by_launch(rows, _IDENTITY)


def rows(peers: Mapping[str, Row], names: Sequence[str]) -> Table:
    """Of cases, both ways to launch in a line."""
    return Table(
        text("work", plain("{work}")), text("shape", plain(shape)), text("dtype", plain("{dtype}")),
        text("layout", plain(layout)), number("µs", plain("{us:.1f}")),
        number("GB/s", plain("{gb_per_s:.0f}")),
        number("of the roofline", plain("{of_roofline:.0%}")),
        number("with PDL µs", optional("pdl", "{us:.1f}")),
        number("of the roofline", optional("pdl", "{of_roofline:.0%}")),
        *peer_columns(names, peers),
    )  # fmt: skip


# Every row with its spread, its rooflines and the configuration that was launched.
SPREADS = Table(
    text("work", "{work}"), text("shape", shape), text("dtype", "{dtype}"), text("layout", layout),
    text("launch", "{launch}"),
    text("configuration", lambda row: row.get("configuration") or NOTHING),
    number("µs", "{us:.2f}"), number("deciles", SPREAD),
    number("roofline µs", "{roofline[us]:.2f}"), number("read µs", optional("read", "{us:.2f}")),
    number("write µs", optional("write", "{us:.2f}")),
)  # fmt: skip


def _then_read(name: str) -> Cell:
    return lambda row: f"{row['then_read'][name]['us']:.1f} ({row['alone'][name]['us']:.1f})"


# Times with a reader, and of dequantize alone behind them.
CONSUMER = Table(
    text("shape", shape), text("dtype", "{dtype}"),
    number("output MiB", lambda row: f"{row['bytes'] / 2**20:.0f}"),
    number("libnf4 µs", _then_read("libnf4")), number("normal stores µs", _then_read("normal")),
    number("stores that evict first µs", _then_read("evict_first")),
    number("normal over ours", "{ratio:.2f}x"),
)  # fmt: skip


# ---- Calls and the challenge ------------------------------------------------------------


def named(figures: Mapping[str, Row]) -> list[dict]:
    """Rows of what is kept by name."""
    return [{"name": NAMES.get(name, name), **each} for name, each in figures.items()]


def challenge_rows(figures: Row) -> list[dict]:
    ours = figures["eager"]["libnf4"]["us"]
    found = []
    for name in dict.fromkeys([*figures["eager"], *figures["compiled"]]):
        bare = name.removesuffix(AS_OPERATOR)
        title = NAMES.get(bare, bare) + name.removeprefix(bare)
        eager, compiled = figures["eager"].get(name), figures["compiled"].get(name)
        found.append({
            "name": title, "eager": eager, "compiled": compiled,
            "over": eager and {"ratio": eager["us"] / ours},
        })  # fmt: skip
    return found


CHALLENGE = Table(
    text("implementation", "{name}"), number("eager µs", optional("eager", "{us:.1f}")),
    number(
        "compiled µs",
        optional("compiled", lambda each: f"{each['us']:.1f}" if "us" in each else "refused"),
    ),
    number("eager, over libnf4's", optional("over", "{ratio:.2f}x")),
)  # fmt: skip
POINTS = Table(
    text("asked", "{asked}"), text("evidence", "{evidence}"), number("points", "{points} of {of}")
)


def waited(figures: Row) -> Table:
    return Table(
        text(f"one call at {shape(figures)} and a device synchronize", "{name}"),
        number("µs", "{us:.1f}"), number("ratio", "{ratio:.2f}x"),
    )  # fmt: skip


def host(figures: Row) -> Table:
    title = f"host overhead of one call at {shape(figures)}"
    return Table(text(title, "{name}"), number("µs", "{us:.2f}"))


# ---- Matmul -----------------------------------------------------------------------------

_PRODUCT = ("shape", "weights", "m", "dtype", "nested")


def weight(row: Row) -> str:
    return f"{row['dtype']}, {'nested' if row['nested'] else 'flat'}"


def products(rows: Iterable[Row]) -> list[dict[str, Row]]:
    return by_launch(rows, _PRODUCT)


def of_dense(row: Row) -> str:
    dense = row["peers"].get("dense")
    return f"{dense['us'] / row['us']:.0%}" if dense else NOTHING


def matmul(peers: Mapping[str, Row], many: bool = False, several: bool = False) -> Table:
    """Of products, both ways to launch in a line.

    many     of many rows of x: TFLOPS and percent of dense, else of the bandwidth roofline
    several  of several weights, so that there are calls for each to compare with
    """

    def apart(launch: str) -> Cell:
        return optional(launch, optional("apart", "{us:.1f} ({ratio:.2f}x)"))

    few_rows = [
        number("of the roofline", plain("{of_roofline:.0%}")),
        number("with PDL µs", optional("pdl", "{us:.1f}")),
        number("of the roofline", optional("pdl", "{of_roofline:.0%}")),
    ]
    many_rows = [
        number("TFLOPS", plain("{tflop_per_s:.0f}")), number("of dense", plain(of_dense)),
        number("with PDL µs", optional("pdl", "{us:.1f}")),
    ]  # fmt: skip
    of_several = [
        number("a call each µs (ratio)", apart("plain")),
        number("with PDL µs (ratio)", apart("pdl")),
    ]
    return Table(
        text("shape", plain(shape)), text("weight", plain(weight)), number("M", plain("{m}")),
        number("µs", plain("{us:.1f}")), *(many_rows if many else few_rows),
        *(of_several if several else []), *peer_columns(peers, peers),
    )  # fmt: skip


# Every row with its kernel, its spread and its error.
MATMUL_SPREADS = Table(
    text("shape", lambda row: (f"{row['weights']} of " if row["weights"] > 1 else "") + shape(row)),
    text("weight", weight), text("launch", "{launch}"), text("kernel", "{kernel}"),
    number("M", "{m}"), number("µs", "{us:.2f}"), number("deciles", SPREAD),
    number("TFLOPS", "{tflop_per_s:.0f}"), number("roofline µs", "{roofline[us]:.2f}"),
    number("error", "{error:.2e}"),
)  # fmt: skip


def over_dense(row: Row) -> float:
    """Our error over that of a dense product with the rounded weight."""
    return row["errors"]["libnf4"] / row["errors"]["dense"]


def worst_errors(rows: Iterable[Row]) -> list[dict]:
    """Of each kind of weight and of x and each M: the largest over all shapes."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((weight(row), row["x"], row["m"]), []).append(row)
    names = ("libnf4", "bitsandbytes", "dense")
    found = []
    for (kind, x, m), some in groups.items():
        ratios = [over_dense(row) for row in some if "dense" in row["errors"]]
        worst = {name: max(row["errors"].get(name, 0) for row in some) for name in names}
        found.append({"kind": kind, "x": x, "m": m, "over": max(ratios, default=0), **worst})
    return found


def _error(name: str) -> Column:
    return number(name, lambda row: f"{row[name]:.2e}" if row[name] else NOTHING)


ERRORS = Table(
    text("weight", "{kind}"), text("x", "{x}"), number("M", "{m}"),
    *map(_error, ("libnf4", "bitsandbytes", "dense")),
    number("libnf4 over dense", lambda row: f"{row['over']:.3f}x" if row["over"] else NOTHING),
)  # fmt: skip
ERROR = Table(
    text("shape", shape), text("weight", weight), text("x", "{x}"), number("M", "{m}"),
    text("errors", lambda row: " ".join(f"{n} {e:.2e}" for n, e in row["errors"].items())),
)  # fmt: skip


def matmul_calls(figures: Row) -> list[dict]:
    return [
        {"name": NAMES.get(name, name), "host": each, "waited": figures["waited"][name]}
        for name, each in figures["host"].items()
    ]


def matmul_call(figures: Row) -> Table:
    return Table(
        text(f"one call at {shape(figures)}, M = {figures['m']}", "{name}"),
        number("host overhead µs", "{host[us]:.2f}"), number("ratio", "{host[ratio]:.2f}x"),
        number("with a synchronize µs", "{waited[us]:.1f}"),
        number("ratio", "{waited[ratio]:.2f}x"),
    )  # fmt: skip


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


def sweep(title: str, rows: Sequence[Row], column: Cell) -> Table:
    """Of configurations, {"name", "index"}, a column for each row of the sweep."""
    return Table(
        text(title, "{name}"),
        *(number(column(row), lambda each, row=row: mark(row, each["index"])) for row in rows),
    )


def sweep_line(figures: Row, row: Row) -> str:
    names, chosen = figures["configurations"], row["chosen"]
    what = f"{shape(row)} {row['dtype']}" + (f" M={row['m']}" if "m" in row else "")
    if chosen < 0:
        return f"{what}: best {names[best(row)]} {mark(row, best(row))}; the library takes none"
    return (
        f"{what}: best {names[best(row)]} {row['times'][best(row)]['us']:.2f} us; "
        f"chosen {names[chosen]} {mark(row, chosen)}"
    )


# ---- Whole models -----------------------------------------------------------------------

WORKS = {
    "decode": "decode", "prefill": "prefill", "training": "forward + backward",
    "mlp": "MLP, forward",
}  # fmt: skip
FORMS = ("libnf4", "bitsandbytes", "dense")


def layers(row: Row) -> str:
    return "1 layer" if row["layers"] == 1 else f"{row['layers']} layers"


def work(row: Row) -> str:
    """The work and its size: sequences, and tokens of each."""
    decode = row["work"] == "decode"
    size = f"batch {row['batch']}" if decode else f"{row['batch']}×{row['tokens']}"
    made = f"{WORKS[row['work']]} {size}"
    return f"{made}, {row['hidden']}/{row['intermediate']}" if row["work"] == "mlp" else made


def launched(row: Row) -> str:
    parts = ["compiled"] if row["compiled"] else []
    return ", ".join([*parts, *(["CUDA graph"] if row["launch"] == "graph" else [])]) or "eager"


def _milliseconds(us: float) -> str:
    return f"{us / 1e3:.2f}" if us < 1e5 else f"{us / 1e3:.0f}"


def _form_time(name: str) -> Cell:
    def made(row: Row) -> str:
        each = row["forms"].get(name)
        if each is None:
            return "failed" if name in row["failed"] else NOTHING
        ratio = f" ({each['ratio']:.2f}x)" if "ratio" in each else ""
        return _milliseconds(each["us"]) + ratio

    return made


def _form_memory(name: str) -> Cell:
    def made(row: Row) -> str:
        each = row["forms"].get(name)
        return f"{each['weights'] / 1e9:.2f} + {each['step'] / 1e9:.2f}" if each else NOTHING

    return made


_MODEL = [text("work", work), text("model", layers), text("launched", launched)]
MODELS = Table(
    *_MODEL, number("ms", _form_time("libnf4")),
    *(number(f"{name} ms (ratio)", _form_time(name)) for name in FORMS[1:]),
)  # fmt: skip
MODELS_MEMORY = Table(
    text("work", lambda row: work(row) + (", compiled" if row["compiled"] else "")), _MODEL[1],
    *(number(f"{name} GB", _form_memory(name)) for name in FORMS),
)  # fmt: skip


def memory_rows(rows: Iterable[Row]) -> list[Row]:
    """The first of each work: launched another way it takes as much."""
    found: dict[tuple, Row] = {}
    for row in rows:
        found.setdefault((work(row), layers(row), row["compiled"]), row)
    return list(found.values())


def forms(rows: Iterable[Row]) -> list[dict]:
    """A row for each form; the error is NF4Linear's."""
    return [
        {
            **row, "form": name, "ms": _milliseconds(each["us"]),
            "spread": "..".join(map(_milliseconds, each["spread"])),
            "error": row["error"] if name == "libnf4" else None,
        }
        for row in rows
        for name, each in row["forms"].items()
    ]  # fmt: skip


MODELS_SPREADS = Table(
    *_MODEL, text("form", "{form}"), number("ms", "{ms}"), number("deciles", "{spread}"),
    number("error", lambda row: NOTHING if row["error"] is None else f"{row['error']:.2e}"),
)  # fmt: skip


def layer_calls(figures: Row) -> list[dict]:
    return [{"name": name, "ratio": 1, **each} for name, each in figures["forms"].items()]


def layer_call(figures: Row) -> Table:
    return Table(
        text(f"one eager call of a layer at {shape(figures)}, M = 1", "{name}"),
        number("host overhead µs", "{us:.2f}"), number("ratio", "{ratio:.2f}x"),
    )  # fmt: skip
