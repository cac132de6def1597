"""The texts of the study of calibration (study.py): those that judge, and those that calibrate.

The judging texts are of five kinds and under clear licences: book.txt is a part of Newton's Opticks
of 1730 (public domain), dialogue.txt was written for this, code and documentation are libnf4's at
one commit, and the story is the demo's with a sequel that was written for this. Calibration reads
other parts of the same book, and Python's standard library.

    python tools/quality/texts.py FILE.json

writes them into a file, for a machine that has neither the commit nor the same Python.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

_HERE = Path(__file__).parent
_COMMIT = "2e6da329"
_CODE = ("lib/cpu/reference.cpp", "bindings/python/nf4/checkpoint/source.py")
_DOCUMENTATION = ("docs/c.md",)
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
# Modules that calibrate, and are therefore not trained on.
_CALIBRATING = ("argparse.py", "tarfile.py", "statistics.py", "asyncio/events.py")


def _at_commit(paths: tuple[str, ...]) -> str:
    """The files as they were at _COMMIT, which a shallow clone lacks."""
    names = [f"{_COMMIT}:{path}" for path in paths]
    return subprocess.run(
        ["git", "-C", str(_HERE), "show", *names], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def _unwrapped(text: str) -> str:
    """Paragraphs without line breaks."""
    return "\n\n".join(" ".join(each.split()) for each in text.split("\n\n"))


def judging() -> dict[str, str]:
    return {
        "book": _unwrapped((_HERE / "texts" / "book.txt").read_text()),
        "code": _at_commit(_CODE),
        "dialogue": (_HERE / "texts" / "dialogue.txt").read_text(),
        "documentation": _at_commit(_DOCUMENTATION),
        "story": "\n\n".join(
            _unwrapped(path.read_text())
            for path in (_HERE.parent / "demo" / "held_out.txt", _HERE / "texts" / "story.txt")
        ),
    }


def calibrating_modules() -> list[Path]:
    return [_STANDARD_LIBRARY / name for name in _CALIBRATING]


def calibrating() -> dict[str, str]:
    """A text of books, one of code, and one of documentation."""
    from pydoc_data.topics import topics

    code = [path.read_text()[:15000] for path in calibrating_modules()]
    return {
        "book": _unwrapped((_HERE / "texts" / "calibration.txt").read_text()),
        "code": "\n".join(code),
        "documentation": "\n".join(topics[name] for name in sorted(topics))[:40000],
    }


if __name__ == "__main__":
    both = {"judging": judging(), "calibrating": calibrating()}
    Path(sys.argv[1]).write_text(json.dumps(both))
