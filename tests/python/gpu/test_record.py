"""tests/gpu/record.json is of these sources, and README.md and docs/bench show its figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "tests" / "bench")]

import readme_table  # noqa: E402
import sources  # noqa: E402
from nf4bench import matmul_cases, matmul_tables  # noqa: E402


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((ROOT / "tests" / "gpu" / "record.json").read_text())


def test_record_is_of_these_sources(record: dict) -> None:
    assert record["sources"] == sources.source_hash(), (
        "sources that run on the GPU have changed since tests/gpu/record.json was written; "
        "run ./dev gpu on a machine with a GPU"
    )


def test_everything_in_the_record_passed(record: dict) -> None:
    for name, counts in record["tests"].items():
        assert counts["passed"] > 0 and counts["failed"] == 0, name
    assert {tool: each["reports"] for tool, each in record["compute-sanitizer"].items()} == {
        "memcheck": 0,
        "racecheck": 0,
        "initcheck": 0,
        "synccheck": 0,
    }


def test_errors_of_matmul_are_within_their_bounds(record: dict) -> None:
    for row in record["matmul"]["errors"]:
        said = matmul_tables.error_line(row)
        assert row["errors"]["libnf4"] <= matmul_cases.MOST_ERROR[row["dtype"]], said
        assert matmul_tables.over_dense(row) <= matmul_cases.MOST_OF_DENSE, said


def test_what_the_repository_shows_is_made_from_the_record(record: dict) -> None:
    stale = [str(path.relative_to(ROOT)) for path in readme_table.stale(record)]
    assert stale == [], "run tests/bench/readme_table.py"


def test_the_hash_sees_every_change(tmp_path: Path) -> None:
    """A changed, an added and a renamed file each give another hash."""
    for folder in sources.COVERED:
        (tmp_path / folder).mkdir(parents=True)
    for name in (*sources.COVERED_FILES, "lib/cuda/a.cuh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    hashes = [sources.source_hash(tmp_path)]
    (tmp_path / "lib/cuda/a.cuh").write_text("changed")
    hashes.append(sources.source_hash(tmp_path))
    (tmp_path / "lib/cuda/b.cuh").write_text("added")
    hashes.append(sources.source_hash(tmp_path))
    (tmp_path / "lib/cuda/b.cuh").rename(tmp_path / "lib/core/b.cuh")
    hashes.append(sources.source_hash(tmp_path))
    (tmp_path / "tests").mkdir(exist_ok=True)
    (tmp_path / "tests/check_cuda_more.cpp").write_text("of a pattern")
    hashes.append(sources.source_hash(tmp_path))
    assert len(set(hashes)) == len(hashes)
