"""Freezes nf4.h of this version, before its release: tests/abi/vX.Y/nf4/nf4.h, without comments.

    python tests/abi/freeze.py [--check]

From then on frozen.py holds every later library to it. The program beside it is written by hand:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where it differs")
    check = parser.parse_args().check
    path = folder_of(read_header(HEADER).version) / "nf4" / "nf4.h"
    text = frozen_text(HEADER)
    if not check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    elif not path.exists() or path.read_text() != text:
        sys.exit(
            f"{path.relative_to(HERE.parents[1])} is not the header of this version: run freeze.py"
        )


if __name__ == "__main__":
    main()
