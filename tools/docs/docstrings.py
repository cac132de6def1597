"""Docstrings as Markdown: of lines in two columns, a name and what it is, lists are made."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

# A name, and after two spaces or more what it is. A continuation is indented.
_ROW = re.compile(r"(\S+(?: \S+)*) {2,}(\S.*)")
_NAMES = re.compile(r"[\w.]+(?:, [\w.]+)*")
_DUNDER = re.compile(r"(?<!`)\b(__\w+__)\b")


def _row(line: str) -> str:
    row = _ROW.fullmatch(line)
    name, text = row.groups() if row else (line, "")
    shown = f"`{name}`" if _NAMES.fullmatch(name) else name
    return f"- {shown}: {text}" if row else f"- {shown}"


def _as_list(paragraph: str) -> str:
    """A paragraph that begins with a row, or with names alone and a continuation, as a list."""
    first, _, rest = paragraph.partition("\n")
    if not _ROW.fullmatch(first) and rest.startswith("    "):
        if first.endswith(":"):
            return f"{first}\n\n{_as_list(textwrap.dedent(rest))}"
        if not _NAMES.fullmatch(first):
            return paragraph
    elif not _ROW.fullmatch(first):
        return paragraph
    rows: list[str] = []
    for line in paragraph.splitlines():
        if line.startswith("  "):
            joint = " " if ": " in rows[-1] else ": "
            rows[-1] += joint + line.strip()
        else:
            rows.append(_row(line))
    return "\n".join(rows)


def markdown(docstring: str) -> str:
    paragraphs = re.split(r"\n{2,}", docstring)
    return "\n\n".join(
        # A paragraph that is indented as a whole is code.
        each if each.startswith("    ") else _DUNDER.sub(r"`\1`", _as_list(each))
        for each in paragraphs
    )


class Columns(griffe.Extension):
    """Rewrites the docstring of all that is on the page."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
