"""README's bench section and docs/bench, made from tests/gpu/record.json.

    python tests/bench/readme_table.py [--check]

With --check, only says what is not up to date. Making the plots needs matplotlib. What the record
has no figures of is left out, and named.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "bench"))

from nf4bench import matmul_plots, pages, plots, tables  # noqa: E402

README, FOLDER = ROOT / "README.md", ROOT / "docs" / "bench"
DOCUMENT = FOLDER / "README.md"
# By the record's name for the figures.
PLOTS = {"bench": plots.PLOTS, "matmul": matmul_plots.PLOTS}
FIGURES = {*PLOTS, "models"}  # all that may be shown


def texts(record: dict) -> dict[Path, str]:
    """What each file should say."""
    return {
        README: tables.with_section(README.read_text(), "bench", pages.readme(record)),
        DOCUMENT: pages.document(record),
    }


def stale(record: dict) -> list[Path]:
    """The files that are missing or of another record."""
    made = texts(record)
    found = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    for name, drawn in PLOTS.items():
        found += drawn.stale(FOLDER, record[name]) if name in record else []
    return found


def main() -> int:
    record = json.loads((ROOT / "tests" / "gpu" / "record.json").read_text())
    for name in sorted(FIGURES - record.keys()):
        print(f"the record has no figures of {name}, which is left out")
    if "--check" in sys.argv[1:]:
        found = stale(record)
        for path in found:
            print(f"not made from the record: {path.relative_to(ROOT)}")
        return bool(found)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in texts(record).items():
        path.write_text(text)
    for name in PLOTS.keys() & record.keys():
        PLOTS[name].write(FOLDER, record[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
