"""No time limit ends a test that is only slow (limits.py)."""

import re

import hypothesis
from conftest import ROOT
from limits import HANG

FILES = [
    path
    for pattern in ("tests/**/*.py", "tests/**/*.build", "tests/**/*.[ch]pp", "examples/**/*.build")
    for path in sorted(ROOT.glob(pattern))
]


def test_the_limits_are_one() -> None:
    assert f"kHang{{{HANG}}}" in (ROOT / "tests/support/threads.hpp").read_text()
    setup = re.search(
        r"add_test_setup\('\w+', timeout_multiplier: (\d+), is_default: true\)",
        (ROOT / "meson.build").read_text(),
    )
    assert setup and 30 * int(setup[1]) == HANG  # Meson's own limit is 30 s


def test_no_test_has_one_of_its_own() -> None:
    assert len(FILES) > 100
    own = re.compile(r"\b(?:timeout|deadline|seconds)\s*[=:{]\s*(?!HANG)[\d(]")
    found = [f"{path}: {line}" for path in FILES for line in own.findall(path.read_text())]
    assert found == []


def test_examples_of_hypothesis_have_none() -> None:
    used = hypothesis.settings()
    assert used.deadline is None
    assert hypothesis.HealthCheck.too_slow in used.suppress_health_check
