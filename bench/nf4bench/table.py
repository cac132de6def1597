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


def form(name: str, what: str | Cell, kept: str = "forms") -> Cell:
    """The cell of one of a row's forms, or of its peers."""
    made = optional(name, what)
    return lambda row: made(row[kept])


def over(row: Row, name: str, *others: str) -> float:
    """The time of a form over the least of the others'."""
    return row["forms"][name]["us"] / min(row["forms"][each]["us"] for each in others)


def error(row: Row) -> str:
    return f"{row['error']:.1e}"


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

    def told(self, rows: Iterable[Any], report: Callable[[str], None]) -> list[Any]:
        """All rows, each of which is reported as it comes."""
        found = []
        for row in rows:
            found.append(row)
            report(self.line(row))
        return found

    def markdown(self, rows: Iterable[Any]) -> str:
        head = [column.title for column in self.columns]
        rule = ["--:" if column.number else "---" for column in self.columns]
        cells = [[column.cell(row) for column in self.columns] for row in rows]
        return "\n".join(f"| {' | '.join(each)} |" for each in [head, rule, *cells])


class Filled(NamedTuple):
    """A table of which all rows are there."""

    table: Table
    rows: Sequence[Any]

    def lines(self) -> list[str]:
        return [self.table.line(row) for row in self.rows]

    def markdown(self) -> str:
        return self.table.markdown(self.rows)


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """The rows of each key, in order."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def with_section(page: str, name: str, body: str) -> str:
    """`page` with what is between its markers of that name made anew. Raises ValueError."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"there is no {begin} with an {end} after it")
    return f"{before}{begin}\n{body}\n{end}{after}"
