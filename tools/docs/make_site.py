"""Makes the site: README, docs/ and what they link to, and references of C, Python and Rust.

    make_site.py OUTPUT [--rustdoc FOLDER]

Pages keep their places in the repository, so that their links hold here and in a browser of the
sources. MkDocs says which links and anchors are dead, and then this fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parents[1]
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
    "docs",
    "examples",
    "include",
)
SOURCES = ("lib", "bench/nf4bench")  # folders that pages link to
_SECTION = re.compile(r"^/\* -{3,} (.+?) -+ \*/$", re.MULTILINE)
# The name that a declaration declares: a function, or a struct.
_NAME = re.compile(r"^NF4_API [^;(]*?(\w+)\(|^\} (\w+);", re.MULTILINE)


def c_reference(header: str) -> str:
    """A page of nf4.h: its sections, and of each the declarations with their comments as they
    stand."""
    intro, *parts = _SECTION.split(header)
    lines = ["# C reference", "", "[nf4.h](../include/nf4/nf4.h), section by section.", ""]
    lines += ["```c", intro.strip(), "```", ""]
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        lines += [f"## {title}", ""]
        for block in re.split(r"\n\s*\n(?=\S)", text.strip()):
            names = ["".join(pair) for pair in _NAME.findall(block)]
            if names:
                lines += [f"### {', '.join(names)}", ""]
            lines += ["```c", block.strip(), "```", ""]
    return "\n".join(lines)


PYTHON_REFERENCE = """\
# Python reference

::: nf4
    options:
      members: {members}

::: nf4.torch
"""


def public_names() -> list[str]:
    """What nf4 exports, read from the source: nothing is imported."""
    text = (ROOT / "bindings/python/nf4/__init__.py").read_text()
    listed = re.search(r"^__all__ = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    return re.findall(r'"(\w+)"', listed[1])


def gather(sources: Path, rustdoc: Path | None) -> None:
    """The pages and what is generated, in the layout of the repository."""
    for name in (*PAGES, *SOURCES):
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, sources / name, ignore=shutil.ignore_patterns("meson.build")
            )
        else:
            shutil.copy(ROOT / name, sources / name)
    reference = sources / "reference"
    reference.mkdir()
    header = (ROOT / "include/nf4/nf4.h").read_text()
    (reference / "c.md").write_text(c_reference(header))
    (reference / "python.md").write_text(PYTHON_REFERENCE.format(members=public_names()))
    rust = "# Rust reference\n\n"
    if rustdoc is None:
        rust += (
            "This site was built without cargo: `cargo doc -p nf4 --open` makes the reference.\n"
        )
    else:
        shutil.copytree(rustdoc, sources / "rustdoc")
        rust += "- [nf4](../rustdoc/nf4/index.html)\n- [nf4-sys](../rustdoc/nf4_sys/index.html)\n"
    (reference / "rust.md").write_text(rust)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rustdoc", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "sources"
        (sources / "assets").mkdir(parents=True)
        shutil.copy(TOOLS / "site.css", sources / "assets")
        gather(sources, options.rustdoc)
        config = Path(folder) / "mkdocs.yml"
        text = (TOOLS / "mkdocs.yml").read_text()
        text = text.replace("@PACKAGE@", str(ROOT / "bindings/python"))
        config.write_text(text.replace("@TOOLS@", str(TOOLS)))
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"]
        done = subprocess.run(
            [*command, "-f", config, "-d", options.output.resolve()],
            env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    told = [line for line in done.stderr.splitlines() if not line.startswith("INFO")]
    print("\n".join(told), file=sys.stderr, end="\n" if told else "")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
