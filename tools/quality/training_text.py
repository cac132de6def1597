"""Gathers the text that train_judge.py trains on: prose, documentation and Python sources, none of
which calibrates or judges.

    python tools/quality/training_text.py OUT.xz DEBIAN RUST

DEBIAN is a folder with Debian's packages anarchism, jargon-text, fortunes and perl-doc unpacked,
and RUST the folder share/doc/rust/html of a Rust toolchain. The rest comes from this Python.
"""

from __future__ import annotations

import gzip
import html
import lzma
import random
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import texts

_CHARACTERS, _PIECE, _DOCUMENT = 31_000_000, 30_000, 1_500_000
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
_PACKAGES = Path(sysconfig.get_path("purelib"))
_OF_PACKAGES = (
    "torch", "transformers", "numpy", "peft", "pytest", "_pytest", "hypothesis", "rich", "pip",
    "setuptools", "matplotlib", "accelerate", "huggingface_hub", "mypy", "docutils", "jinja2",
)  # fmt: skip
_OF_RUST = (
    "book", "reference", "nomicon", "edition-guide", "cargo", "rustc", "rust-by-example", "clippy",
    "embedded-book", "style-guide",
)  # fmt: skip


def _text(path: Path) -> str:
    """The content without tags and empty lines; nothing if it is not UTF-8."""
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return ""
    if path.suffix == ".html":
        text = re.sub(r"(?s)<(script|style|nav|head).*?</\1>", "", text)
        text = re.sub(r"(?i)</?(p|h\d|li|div|tr|br|pre|dt|dd)[^>]*>", "\n", text)
        text = html.unescape(re.sub(r"<[^>]+>", "", text))
    return re.sub(r"\s*\n\s*\n\s*\n", "\n\n", text)


def _taken(paths: Iterable[Path], most: int) -> list[str]:
    """Documents in random order, until there are so many characters."""
    found, count = [], 0
    for path in random.sample(ordered := sorted(paths), len(ordered)):
        if count < most and len(text := _text(path)[: min(_DOCUMENT, most - count)]) > 400:
            found.append(text)
            count += len(text)
    return found


def documents(debian: Path, rust: Path) -> list[str]:
    share, used = debian / "usr/share", texts.calibrating_modules()
    modules = (
        path
        for path in _STANDARD_LIBRARY.rglob("*.py")
        if path not in used and not {"site-packages", "test", "pydoc_data"} & {*path.parts}
    )
    pages = (path for name in _OF_RUST for path in (rust / name).rglob("*.html"))
    return [
        *_taken((share / "doc/anarchism").rglob("*.md*"), 5_000_000),
        *_taken([share / "doc/jargon-text/jargon.txt.gz"], 1_500_000),
        *_taken((each for each in (share / "games").rglob("*") if not each.suffix), 1_600_000),
        *_taken((share / "perl").rglob("*.pod"), 4_000_000),
        *_taken((path for path in pages if path.name != "print.html"), 5_000_000),
        *_taken(_PACKAGES.glob("*.dist-info/METADATA"), 2_000_000),
        *_taken(modules, 8_000_000),
        *_taken((p for name in _OF_PACKAGES for p in (_PACKAGES / name).rglob("*.py")), 11_000_000),
    ]


def main() -> None:
    out, debian, rust = map(Path, sys.argv[1:])
    random.seed(0)
    found = documents(debian, rust)
    pieces = [each[at : at + _PIECE] for each in found for at in range(0, len(each), _PIECE)]
    random.shuffle(pieces)
    out.write_bytes(lzma.compress("\0".join(pieces)[:_CHARACTERS].encode()))


if __name__ == "__main__":
    main()
