"""README's bench section and docs/bench, made from tests/gpu/record.json.

    python tests/bench/readme_table.py [--check]

With --check, only says what is not up to date. Making the plots needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "bench"))

from nf4bench import pages, plots, tables  # noqa: E402

README, FOLDER = ROOT / "README.md", ROOT / "docs" / "bench"
DOCUMENT = FOLDER / "README.md"


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
    return found + plots.stale(FOLDER, record["bench"])


def main() -> int:
    record = json.loads((ROOT / "tests" / "gpu" / "record.json").read_text())
    if "--check" in sys.argv[1:]:
        found = stale(record)
        for path in found:
            print(f"not made from the record: {path.relative_to(ROOT)}")
        return bool(found)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in texts(record).items():
        path.write_text(text)
    plots.write(FOLDER, record["bench"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
