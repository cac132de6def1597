"""Writes docs/reliability.md, a table of what is promised and how it was last shown.

    reliability.py [--record [CACHE]]

tests/reliability/*.json has a row for each proof: its promise, its test, what is counted, and its
last runs by each command of ./dev. --record takes up what the last runs left in CACHE (.cache): a
line "SLUG COUNT [FAILED]" in proofs/COMMAND for each part of a proof, and for a row with "cases"
the JUnit files of that step of `./dev test`. What a command that ran left nothing of is a run no
longer. A row's "planted" is a defect that the proof was shown
to find.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import re
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROWS, PAGE = ROOT / "tests" / "reliability", ROOT / "docs" / "reliability.md"
# The page's parts, in its order, by the name of their file.
TITLES = {
    "abi": "The ABI",
    "arguments": "Arguments",
    "cpu": "The CPU",
    "cuda": "The GPU, and the CUDA runtime",
    "fuzz": "Fuzzing",
    "threads": "Threads and memory",
    "files": "Files",
    "security": "Security",
}
HEAD = """\
# Reliability

This page lists what libnf4 promises, the test that holds each promise, how much the test tried, and
its last result. The column "finds" names a defect that was planted once to show that the test finds
it. If a proof fails, its command fails. To repeat the proofs, run in a clone:

```sh
./dev test            # what every change runs
./dev nightly         # the longer runs
./dev reliability     # writes this page from what the last runs counted
```

The rows of the page are in `tests/reliability`. Tests that ran on a GPU have a record of their own,
`tests/gpu/record.json`.
"""

Row = dict[str, Any]
Run = dict[str, Any]


def read(folder: Path = ROWS) -> dict[str, list[Row]]:
    """The rows of each file, by its name. Raises ValueError where two have one slug."""
    topics = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    slugs = collections.Counter(row["proof"] for rows in topics.values() for row in rows)
    twice = [slug for slug, count in slugs.items() if count > 1]
    if twice:
        raise ValueError(f"several rows are of {', '.join(twice)}")
    return topics


def day_of(path: Path) -> str:
    moment = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)
    return moment.date().isoformat()


def counted(path: Path) -> dict[str, Run]:
    """The runs in a file of proofs, by slug."""
    runs: dict[str, Run] = {}
    for line in path.read_text().splitlines():
        slug, count, *failed = line.split()
        run = runs.setdefault(slug, {"count": 0, "failed": 0, "date": day_of(path)})
        run["count"] += int(count)
        run["failed"] += int(failed[0]) if failed else 0
    return runs


def run_of_cases(cache: Path, step: str, pattern: str) -> Run | None:
    """The JUnit cases of a step whose "class: name" the pattern finds; None where none ran."""
    run: Run = {"count": 0, "failed": 0, "date": ""}
    for path in sorted((cache / "test" / step).glob("*.xml")):
        for case in xml.etree.ElementTree.parse(path).iter("testcase"):
            name = f"{case.get('classname', '')}: {case.get('name', '')}"
            if not re.search(pattern, name) or case.find("skipped") is not None:
                continue
            run["count"] += 1
            run["failed"] += case.find("failure") is not None or case.find("error") is not None
            run["date"] = day_of(path)
    return run if run["count"] else None


def take_up(row: Row, command: str, run: Run | None) -> None:
    if run is not None:
        row["runs"][command] = run
    else:
        row["runs"].pop(command, None)


def record(topics: dict[str, list[Row]], cache: Path) -> list[str]:
    """Takes up the last runs. Returns the slugs that no row has."""
    found = {path.name: counted(path) for path in sorted((cache / "proofs").glob("*"))}
    known = set()
    for row in (row for rows in topics.values() for row in rows):
        known.add(row["proof"])
        for command, runs in found.items():
            if "cases" not in row:
                take_up(row, command, runs.get(row["proof"]))
        if "cases" in row and (cache / "test").exists():
            take_up(row, "test", run_of_cases(cache, row["cases"]["step"], row["cases"]["match"]))
    return sorted({slug for runs in found.values() for slug in runs} - known)


def write(topics: dict[str, list[Row]], folder: Path = ROWS) -> None:
    for name, rows in topics.items():
        text = json.dumps(rows, indent=2, ensure_ascii=False) + "\n"
        if text != (folder / f"{name}.json").read_text():
            (folder / f"{name}.json").write_text(text)


def table(rows: list[Row]) -> list[str]:
    lines = ["| promise | test | finds | count | last result |", "| --- | --- | --- | ---: | --- |"]
    for row in rows:
        about = f"{row['promise']} | `{row['test']}` | {row.get('planted', '–')}"
        for command, run in sorted(row["runs"].items()) or [("", None)]:
            if run is None:
                lines.append(f"| {about} | – | not run yet |")
                continue
            unit = row["unit"].removesuffix("s") if run["count"] == 1 else row["unit"]
            count = f"{run['count']:,} {unit}"
            result = f"{run['failed']} failed, {run['date']}, `./dev {command}`"
            lines.append(f"| {about} | {count} | {result} |")
            about = " | | "
    return lines


def page(topics: dict[str, list[Row]]) -> str:
    order = [*TITLES, *sorted(set(topics) - set(TITLES))]
    parts = [HEAD]
    for name in order:
        if name in topics:
            title = TITLES.get(name, name.capitalize())
            parts.append("\n".join([f"## {title}", "", *table(topics[name]), ""]))
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, nargs="?", const=ROOT / ".cache", metavar="CACHE")
    cache = parser.parse_args().record
    topics = read()
    if cache:
        unknown = record(topics, cache)
        if unknown:
            sys.exit(f"no row in tests/reliability is of {', '.join(unknown)}")
        write(topics)
    PAGE.write_text(page(topics))


if __name__ == "__main__":
    main()
