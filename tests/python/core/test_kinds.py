"""Code that names MXFP4 and NVFP4 is on their pages, and in the modules of ROWS, which have a row
or a branch for each kind of weight (docs/design/house.md). Comments and messages do not count."""

import io
import re
import tokenize
from pathlib import Path

import nf4

PACKAGE = Path(nf4.__file__).parent
PAGES = ("checkpoint/e2m1*.py", "vllm/gpt_oss.py")
ROWS = (
    "_abi.py",
    "_formats.py",
    "checkpoint/kinds.py",
    "checkpoint/repack.py",
    "torch/_stored_state.py",
    "torch/quantizing.py",
    "typing.py",
    "vllm/config.py",
)


def names_them(path: Path) -> bool:
    """Tells if a name, or a string without spaces, has one of the names."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    words = (each.string for each in tokens if each.type in (tokenize.NAME, tokenize.STRING))
    return any(re.search("mxfp4|nvfp4|e2m1", each, re.I) and " " not in each for each in words)


def test_few_modules_name_a_kind_of_weight():
    pages = {path for pattern in PAGES for path in PACKAGE.glob(pattern)}
    assert pages and all(map(names_them, pages))
    found = {path for path in PACKAGE.rglob("*.py") if names_them(path)} - pages
    assert {path.relative_to(PACKAGE).as_posix() for path in found} == set(ROWS)
