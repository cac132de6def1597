"""Freezes nf4.h of this version, before its release: tests/abi/vX.Y/nf4/nf4.h, without comments.

    python tests/abi/freeze.py [--check | --force]

From then on frozen.py holds every later library to it; what is frozen is altered with --force
alone, before the release. The program beside it is written by hand:
that of the version before, and calls of the functions that came since. A release asks with --check
whether the frozen header is the one that it publishes.
"""

import argparse
import re
import sys
from pathlib import Path

from nf4_header import read_header, without_comments

HERE = Path(__file__).resolve().parent
HEADER = HERE.parents[1] / "include" / "nf4" / "nf4.h"


def folder_of(version: str) -> Path:
    """That of a version's header; a patch version has the interface of its minor version."""
    return HERE / f"v{version.rpartition('.')[0]}"


def frozen_text(header: Path) -> str:
    text = re.sub(r"[ \t]+$", "", without_comments(header.read_text()), flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).lstrip("\n")


def of_all_patches(text: str) -> str:
    """Without the version, of which a patch release alters the last number."""
    return re.sub(r"^#define NF4_VERSION_.*\n", "", text, flags=re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where it differs")
    parser.add_argument("--force", action="store_true", help="write over what is frozen")
    options = parser.parse_args()
    path = folder_of(read_header(HEADER).version) / "nf4" / "nf4.h"
    text = frozen_text(HEADER)
    name = path.relative_to(HERE.parents[1])
    same = path.exists() and of_all_patches(path.read_text()) == of_all_patches(text)
    if same:
        return
    if options.check:
        sys.exit(f"{name} is not the header of this version: run freeze.py")
    if path.exists() and not options.force:
        sys.exit(f"{name} is frozen, and nf4.h is another; before its release: --force")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    main()
