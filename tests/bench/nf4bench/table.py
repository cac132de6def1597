"""A table as data: its columns give a line for a terminal and markdown. Needs only Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Cell = Callable[[Any], str]
NOTHING = "–"


def cell(what: str | Cell) -> Cell:
    """A function of a row; a string is a format of the row's fields: "{us:.1f}"."""
    return what.format_map if isinstance(what, str) else what


def optional(name: str, what: str | Cell) -> Cell:
    """The cell of a part that a row may lack."""
    made = cell(what)
    return lambda row: made(row[name]) if row.get(name) else NOTHING


def shape(row: Row) -> str:
    return "×".join(map(str, row["shape"]))


class Column(NamedTuple):
    title: str
    cell: Cell
    number: bool


def text(title: str, what: str | Cell) -> Column:
    return Column(title, cell(what), False)


def number(title: str, what: str | Cell) -> Column:
    return Column(title, cell(what), True)


class Table:
    def __init__(self, *columns: Column) -> None:
        self.columns = columns

    def line(self, row: Any) -> str:
        """For a terminal: each number with its title, as rows come one at a time."""
        return ", ".join(
            f"{made} {column.title}" if column.number else made
            for column in self.columns
            if (made := column.cell(row)) not in ("", NOTHING)
        )

    def markdown(self, rows: Iterable[Any]) -> str:
        head = [column.title for column in self.columns]
        rule = ["--:" if column.number else "---" for column in self.columns]
        cells = [[column.cell(row) for column in self.columns] for row in rows]
        return "\n".join(f"| {' | '.join(each)} |" for each in [head, rule, *cells])


def missing(peers: Mapping[str, Row], names: Mapping[str, str]) -> list[str]:
    """A sentence for each peer that is missing."""
    return [
        f"{names[name]} is missing: {each['missing']}."
        for name, each in peers.items()
        if "missing" in each
    ]


def by_launch(rows: Iterable[Row], identity: Sequence[str]) -> list[dict[str, Row]]:
    """The rows of one case together: {"plain": row, "pdl": row}, or "plain" alone."""
    cases: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(tuple(str(row[name]) for name in identity), {})[row["launch"]] = row
    return list(cases.values())


def with_section(page: str, name: str, body: str) -> str:
    """`page` with what is between its markers of that name made anew. Raises ValueError."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"there is no {begin} with an {end} after it")
    return f"{before}{begin}\n{body}\n{end}{after}"
