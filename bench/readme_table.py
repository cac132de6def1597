"""Makes README's bench section and the pages and plots of docs/bench from docs/bench/figures.json.

    python bench/readme_table.py [--check]

With --check, it only says what is not up to date. The plots need matplotlib. Parts without figures
are left out and named. The pages mark figures whose code has changed since.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests" / "gpu")]

import sources  # noqa: E402
from nf4bench import experts_pages, families_pages, pages, plots, training_pages  # noqa: E402
from nf4bench.table import with_section  # noqa: E402

README, FOLDER = ROOT / "README.md", ROOT / "docs" / "bench"
FIGURES = FOLDER / "figures.json"
_WRAPPER = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False)
# The pages of docs/bench, and the figures that each needs.
PAGES = {
    "README.md": (pages.document, {"bench"}),
    "int4.md": (pages.int4, {"int4"}),
    "training.md": (training_pages.page, {"training"}),
    "experts.md": (experts_pages.page, {"experts"}),
    "families.md": (families_pages.page, {"families"}),
    "sweeps.md": (pages.sweeps, pages.SWEEPS),
}


def load() -> dict:
    return json.loads(FIGURES.read_text())


def texts(figures: dict) -> dict[Path, str]:
    """Returns the text of each file."""
    changed = sources.changed(figures)
    section = pages.readme(figures, changed)
    made = {README: with_section(README.read_text(), "bench", section)}
    for file, (page, needed) in PAGES.items():
        if needed <= figures.keys():
            made[FOLDER / file] = wrapped(page(figures, changed))
    return made


def wrapped(text: str) -> str:
    """Returns Markdown with paragraphs in lines of at most 120 characters; tables stay."""
    lines = text.split("\n")
    return "\n".join(line if line[:1] in "|#!<" else _WRAPPER.fill(line) for line in lines)


def stale(figures: dict) -> list[Path]:
    """Returns the files that are missing or were made from other figures."""
    made = texts(figures)
    found = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    for name in plots.PLOTS.keys() & figures.keys():
        found += plots.stale(FOLDER, name, figures[name])
    return found


def main() -> int:
    figures = load()
    for name in sorted({*pages.SHOWN, *pages.SWEEPS} - figures.keys()):
        print(f"there are no figures of {name}, which is left out")
    if "--check" in sys.argv[1:]:
        found = stale(figures)
        for path in found:
            print(f"not made from figures.json: {path.relative_to(ROOT)}")
        return bool(found)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in texts(figures).items():
        path.write_text(text)
    for name in plots.PLOTS.keys() & figures.keys():
        plots.write(FOLDER, name, figures[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
