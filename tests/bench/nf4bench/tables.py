"""The figures as text for a terminal and as markdown. Needs nothing but Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
NAMES = {
    "bitsandbytes": "bitsandbytes", "unsloth": "Unsloth", "torch": "torch", "triton": "Triton",
}  # fmt: skip
AS_OPERATOR = " as an operator"  # a peer's name with this: its call, made one of torch's
NOTHING = "–"


def shape_text(row: Row, times: str = "×") -> str:
    return times.join(map(str, row["shape"]))


def kind_text(row: Row) -> str:
    """What sets a row's weight apart besides its shape and dtype."""
    parts = ["nested" if row["nested"] else "flat"]
    if row["format"] != "nf4":
        parts.append({"fp4": "FP4", "own": "own codebook"}[row["format"]])
    if row["blocksize"] != 64:
        parts.append(f"blocksize {row['blocksize']}")
    if row["placement"] != "aligned":
        parts.append(row["placement"])
    return ", ".join(parts)


# ---- For a terminal ---------------------------------------------------------------------


def line(row: Row) -> str:
    """One row of the bench."""
    low, high = row["spread"]
    text = (
        f"{row['work']:10} {shape_text(row, 'x'):>11} {row['dtype']} {kind_text(row)}"
        f"{', PDL' if row['launch'] == 'pdl' else ''}: "
        f"{row['us']:.2f} us ({low:.2f}..{high:.2f}) {row['gb_per_s']:.0f} GB/s, "
        f"{row['of_limit']:.1%} of stream {row['limit']['us']:.2f} us"
    )
    for bound in ("read", "write"):
        if bound in row:
            text += f", {bound} {row[bound]['us']:.2f} us"
    if "as_calls" in row:
        text += f", as calls {row['as_calls']['us']:.2f} us"
    for name, peer in row["peers"].items():
        text += f", {name} {peer['us']:.2f} us ({peer['ratio']:.2f}x)"
    return text


def consumer_line(row: Row) -> str:
    found = {
        name: f"{each['us']:.2f} us ({row['alone'][name]['us']:.2f} alone)"
        for name, each in row["then_read"].items()
    }
    return (
        f"dequantize, then read all of it, {shape_text(row, 'x')} {row['dtype']}: "
        f"{found['libnf4']}; normal stores {found['normal']} ({row['ratio']:.2f}x); stores that "
        f"evict first {found['evict_first']}"
    )


def sweep_best(row: Row) -> int:
    """The index of the fastest configuration."""
    timed = [index for index, each in enumerate(row["times"]) if "us" in each]
    return min(timed, key=lambda index: row["times"][index]["us"])


def sweep_line(figures: Row, row: Row) -> str:
    names, best, chosen = figures["configurations"], sweep_best(row), row["chosen"]
    text = f"{shape_text(row, 'x'):>11} {row['dtype']}: best {names[best]} "
    text += f"{row['times'][best]['us']:.2f} us"
    if chosen < 0:
        return f"{text}; the library takes one of none"
    return f"{text}; chosen {names[chosen]} {sweep_cell(row['times'][chosen])}"


def challenge_text(figures: Row) -> str:
    lines = [f"nine dequantizes an iteration, {figures['iterations']} iterations, microseconds"]
    for mode in ("eager", "compiled"):
        for name, each in figures[mode].items():
            found = f"{each['us']:.1f}" if "us" in each else f"refused: {each['refused']}"
            lines.append(f"  {mode:8} {name:22} {found}")
    for name, each in figures["peers"].items():
        if "missing" in each:
            lines.append(f"  {name}: missing: {each['missing']}")
    summary = figures["summary"]
    score = summary["score"]
    lines.append(f"score (Unsloth over libnf4): {'missing' if score is None else f'{score:.2f}'}")
    lines.append(
        f"stream kernels + {summary['calls']} calls: {summary['budget_us']:.1f} us; "
        f"libnf4 takes {summary['of_budget']:.2f} of it"
    )
    for row in figures["points"]:
        lines.append(f"  {row['points']:2} of {row['of']}  {row['asked']}: {row['evidence']}")
    total = sum(row["points"] for row in figures["points"])
    return "\n".join([*lines, f"  {total:2} of {sum(row['of'] for row in figures['points'])}"])


def call_text(figures: Row) -> str:
    waited, host = figures["waited"], figures["host"]
    lines = [f"one call at {shape_text(waited, 'x')} and a device synchronise, microseconds"]
    for name, each in waited["calls"].items():
        lines.append(f"  {name:28} {each['us']:7.2f} ({each['ratio']:.2f}x)")
    for name, each in figures["peers"].items():
        if "missing" in each:
            lines.append(f"  {name}: missing: {each['missing']}")
    lines.append(f"host time of one call at {shape_text(host, 'x')}, microseconds")
    for name, each in host["calls"].items():
        lines.append(f"  {name:28} {each['us']:7.2f}")
    return "\n".join([*lines, f"  beyond torch.empty           {host['beyond_empty_us']:7.2f}"])


# ---- Markdown ---------------------------------------------------------------------------


def markdown(head: Sequence[str], numeric: int, rows: Iterable[Sequence[str]]) -> str:
    """A table whose last `numeric` columns are numbers."""
    rule = ["---"] * (len(head) - numeric) + ["--:"] * numeric
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *rows])


def peer_cell(row: Row, name: str, peers: Mapping[str, Row]) -> str:
    found = row["peers"].get(name)
    if found:
        over = f" of {row['as_calls']['us']:.1f}" if "as_calls" in row else ""
        return f"{found['us']:.1f} ({found['ratio']:.2f}x{over})"
    return "missing" if "missing" in peers.get(name, {}) else NOTHING


def missing_peers(peers: Mapping[str, Row], names: Mapping[str, str] = NAMES) -> list[str]:
    """A sentence for each peer that is missing."""
    return [
        f"{names[name]} is missing: {each['missing']}."
        for name, each in peers.items()
        if "missing" in each
    ]


_IDENTITY = ("work", "shape", "dtype", "nested", "blocksize", "format", "placement")


def by_launch(rows: Iterable[Row]) -> list[dict[str, Row]]:
    """The rows of one case together: {"plain": row, "pdl": row}, or "plain" alone."""
    cases: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        identity = tuple(str(row[name]) for name in _IDENTITY)
        cases.setdefault(identity, {})[row["launch"]] = row
    return list(cases.values())


def _pdl_cells(case: Mapping[str, Row]) -> list[str]:
    row = case.get("pdl")
    return [f"{row['us']:.1f}", f"{row['of_limit']:.0%}"] if row else [NOTHING, NOTHING]


def rows_table(bench: Row, keep: Callable[[Row], bool], peers: Sequence[str]) -> str:
    """A line for each case whose plain row is wanted, both ways to launch in it."""
    names = [f"{NAMES[name]} µs (ratio)" for name in peers]
    pdl = ["with PDL µs", "of its limit"]
    head = ["work", "shape", "dtype", "layout", "µs", "GB/s", "of the limit", *pdl, *names]
    rows = []
    for case in by_launch(bench["rows"]):
        row = case["plain"]
        if not keep(row):
            continue
        first = [row["work"], shape_text(row), row["dtype"], kind_text(row)]
        figures = [f"{row['us']:.1f}", f"{row['gb_per_s']:.0f}", f"{row['of_limit']:.0%}"]
        figures += _pdl_cells(case)
        rows.append([*first, *figures, *(peer_cell(row, name, bench["peers"]) for name in peers)])
    return markdown(head, len(head) - 4, rows)


def spread_table(bench: Row) -> str:
    """Every row with its spread, its limits and the configuration that was launched."""
    head = [
        "work", "shape", "dtype", "layout", "launch", "configuration",
        "µs", "first..last decile", "stream µs", "read µs", "write µs",
    ]  # fmt: skip
    rows = []
    for row in bench["rows"]:
        low, high = row["spread"]
        bounds = [
            f"{row[name]['us']:.2f}" if name in row else NOTHING for name in ("read", "write")
        ]
        rows.append([
            row["work"], shape_text(row), row["dtype"], kind_text(row), row["launch"],
            row.get("configuration") or NOTHING, f"{row['us']:.2f}", f"{low:.2f}..{high:.2f}",
            f"{row['limit']['us']:.2f}", *bounds,
        ])  # fmt: skip
    return markdown(head, 5, rows)


def consumer_table(rows: Iterable[Row]) -> str:
    """Times with a reader, and of dequantize alone behind them."""
    head = [
        "shape", "dtype", "output MiB", "libnf4 µs", "normal stores µs",
        "stores that evict first µs", "normal over libnf4",
    ]  # fmt: skip
    lines = []
    for row in rows:
        times = [
            f"{each['us']:.1f} ({row['alone'][name]['us']:.1f})"
            for name, each in row["then_read"].items()
        ]
        size = f"{row['bytes'] / 2**20:.0f}"
        lines.append([shape_text(row), row["dtype"], size, *times, f"{row['ratio']:.2f}x"])
    return markdown(head, 5, lines)


def sweep_cell(each: Row) -> str:
    return f"{each['us']:.2f} us ({each['ratio']:.3f})" if "us" in each else "refused"


def sweep_tables(figures: Row) -> str:
    """A table for each dtype: configurations by shapes, each its time over the best one's; the
    best has its microseconds, and the library's choice is bold."""
    parts = [
        f"Measured on one {figures['device']}: times over the best of each column, which has its "
        "microseconds; what the library chooses is bold."
    ]
    for dtype in dict.fromkeys(row["dtype"] for row in figures["rows"]):
        rows = [row for row in figures["rows"] if row["dtype"] == dtype]
        head = [f"{dtype}: configuration", *map(shape_text, rows)]
        lines = [
            [name, *(sweep_mark(row, index) for row in rows)]
            for index, name in enumerate(figures["configurations"])
        ]
        parts.append(markdown(head, len(rows), lines))
    return "\n\n".join(parts)


def sweep_mark(row: Row, index: int) -> str:
    each = row["times"][index]
    if "us" not in each:
        return "refused"
    text = f"{each['ratio']:.3f}"
    if index == sweep_best(row):
        text = f"{text} = {each['us']:.2f} µs"
    return f"**{text}**" if index == row["chosen"] else text


def challenge_table(figures: Row) -> str:
    head = ["implementation", "eager µs", "compiled µs", "eager, over libnf4's"]
    ours = figures["eager"]["libnf4"]["us"]
    rows = []
    for name in dict.fromkeys([*figures["eager"], *figures["compiled"]]):
        eager, compiled = figures["eager"].get(name), figures["compiled"].get(name)
        cells = [f"{eager['us']:.1f}", f"{eager['us'] / ours:.2f}x"] if eager else [NOTHING] * 2
        bare = name.removesuffix(AS_OPERATOR)
        title = NAMES.get(bare, bare) + name.removeprefix(bare)
        rows.append([title, cells[0], _compiled_cell(compiled), cells[1]])
    return markdown(head, 3, rows)


def _compiled_cell(figures: Row | None) -> str:
    if figures is None:
        return NOTHING
    return f"{figures['us']:.1f}" if "us" in figures else "refused"


def points_table(points: Iterable[Row]) -> str:
    rows = [
        [each["asked"], each["evidence"], f"{each['points']} of {each['of']}"] for each in points
    ]
    return markdown(["asked", "evidence", "points"], 1, rows)


def call_tables(figures: Row) -> str:
    waited, host = figures["waited"], figures["host"]
    first = markdown(
        [f"one call at {shape_text(waited)} and a device synchronise", "µs", "ratio"], 2,
        [
            [NAMES.get(name, name), f"{each['us']:.1f}", f"{each['ratio']:.2f}x"]
            for name, each in waited["calls"].items()
        ],
    )  # fmt: skip
    second = markdown(
        [f"host time of one call at {shape_text(host)}", "µs"], 1,
        [[name, f"{each['us']:.2f}"] for name, each in host["calls"].items()],
    )  # fmt: skip
    return f"{first}\n\n{second}"


def with_section(text: str, name: str, body: str) -> str:
    """`text` with what is between its markers of that name made anew. Raises ValueError."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"there is no {begin} with an {end} after it")
    return f"{before}{begin}\n{body}\n{end}{after}"
