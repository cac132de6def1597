"""The counts of a step of ./dev, from what its tests left (tools/tally.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

TALLY = ROOT / "tools" / "tally.py"


def _tally(folder: Path, name: str, status: int) -> tuple[list[int], str]:
    done = subprocess.run(
        [sys.executable, str(TALLY), name, str(folder), str(status)],
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(count) for count in (folder / "counts").read_text().split()], done.stdout


CARGO = """\
running 4 tests
test info::versions_agree ... ok
skipped: no CUDA: built without it
test cuda::one ... ok
test cuda::two ... skipped: no CUDA: built without it
ok
test info::tables ... ok

test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s

running 2 tests
test one ... FAILED
test two ... ignored

test result: FAILED. 0 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s
"""


def test_rust_tests_that_skip_are_not_passed(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(CARGO)
    (tmp_path / "rust.cargo").write_text(CARGO)
    counts, said = _tally(tmp_path, "rust", 101)
    assert counts == [2, 1, 3]
    assert "failed: one" in said
    assert "skipped 2: no CUDA: built without it" in said


JUNIT = """\
<testsuites><testsuite>
<testcase classname="a" name="one"/>
<testcase classname="a" name="two"><skipped message="no GPU"/></testcase>
<testcase classname="a" name="three"><failure message="differs"/></testcase>
</testsuite></testsuites>
"""


@pytest.mark.parametrize(
    "name, status, log, junit, counts",
    [
        ("python", 1, "", JUNIT, [1, 1, 1]),
        ("python", 0, "", "<testsuites/>", [0, 1, 0]),
        ("python", 139, "", JUNIT.replace("failure", "system-out"), [2, 1, 1]),
        ("format", 0, "", None, [1, 0, 0]),
        ("format", 1, "", None, [0, 1, 0]),
        ("build", 0, "", None, [0, 0, 0]),
        ("rust", 77, "skipped: no cargo", None, [0, 0, 1]),
    ],
)
def test_counts_of_a_step(name, status, log, junit, counts, tmp_path) -> None:
    (tmp_path / "log").write_text(log)
    if junit is not None:
        (tmp_path / "results.xml").write_text(junit)
    assert _tally(tmp_path, name, status)[0] == counts
