"""README's bench section and docs/bench, made from docs/bench/figures.json.

    python tests/bench/readme_table.py [--check]

With --check, only says what is not up to date. Making the plots needs matplotlib. What there are
no figures of is left out, and named. Of figures whose code has changed since, the pages say so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "bench"), str(ROOT / "tests" / "gpu")]

import sources  # noqa: E402
from nf4bench import matmul_plots, pages, plots, tables  # noqa: E402

README, FOLDER = ROOT / "README.md", ROOT / "docs" / "bench"
DOCUMENT, FIGURES = FOLDER / "README.md", FOLDER / "figures.json"
# By the name of the figures.
PLOTS = {"bench": plots.PLOTS, "matmul": matmul_plots.PLOTS}
SHOWN = {*PLOTS, "models"}  # all that may be shown


def load() -> dict:
    return json.loads(FIGURES.read_text())


def texts(figures: dict) -> dict[Path, str]:
    """What each file should say."""
    changed = sources.changed(figures)
    section = pages.readme(figures, changed)
    return {
        README: tables.with_section(README.read_text(), "bench", section),
        DOCUMENT: pages.document(figures, changed),
    }


def stale(figures: dict) -> list[Path]:
    """The files that are missing or of other figures."""
    made = texts(figures)
    found = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    for name, drawn in PLOTS.items():
        found += drawn.stale(FOLDER, figures[name]) if name in figures else []
    return found


def main() -> int:
    figures = load()
    for name in sorted(SHOWN - figures.keys()):
        print(f"there are no figures of {name}, which is left out")
    if "--check" in sys.argv[1:]:
        found = stale(figures)
        for path in found:
            print(f"not made from figures.json: {path.relative_to(ROOT)}")
        return bool(found)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in texts(figures).items():
        path.write_text(text)
    for name in PLOTS.keys() & figures.keys():
        PLOTS[name].write(FOLDER, figures[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
