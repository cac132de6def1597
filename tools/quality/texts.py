"""The texts of the study of calibration (study.py): those that judge, those that calibrate, and
those that the small judge is trained on.

The judging texts are of five kinds and under clear licences: book.txt is a part of Newton's Opticks
of 1730 (public domain), dialogue.txt was written for this, code and documentation are libnf4's at
one commit, and the last is the demo's story. Calibration reads other parts of the same book, and
Python's standard library. The small judge is trained on the rest of the standard library.
"""

from __future__ import annotations

import subprocess
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
        "the demo's": _unwrapped((_HERE.parent / "demo" / "held_out.txt").read_text()),
    }


def calibrating() -> dict[str, str]:
    """A text of books, one of code, and one of documentation."""
    from pydoc_data.topics import topics

    code = [(_STANDARD_LIBRARY / name).read_text()[:15000] for name in _CALIBRATING]
    return {
        "book": _unwrapped((_HERE / "texts" / "calibration.txt").read_text()),
        "code": "\n".join(code),
        "documentation": "\n".join(topics[name] for name in sorted(topics))[:40000],
    }


def training(size: int) -> str:
    """The first `size` characters of the standard library's modules and of Python's manual."""
    from pydoc_data.topics import topics

    used = {_STANDARD_LIBRARY / name for name in _CALIBRATING}
    folders = ("", "asyncio", "email", "http", "importlib", "json", "logging", "unittest", "xml")
    files = [each for name in folders for each in sorted((_STANDARD_LIBRARY / name).glob("*.py"))]
    parts = ["\n".join(topics[name] for name in sorted(topics))[40000:]]
    parts += [each.read_text() for each in files if each not in used]
    return "\n".join(parts)[:size]
