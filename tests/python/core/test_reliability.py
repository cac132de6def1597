"""docs/reliability.md: that it is up to date, and how the counts of proofs come into it."""

import importlib.util
import json
import re

import pytest
from conftest import ROOT

SPEC = importlib.util.spec_from_file_location("reliability", ROOT / "tools" / "reliability.py")
reliability = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reliability)


def test_the_page_is_that_of_the_rows():
    assert reliability.PAGE.read_text() == reliability.page(reliability.read()), (
        "run ./dev reliability"
    )


def test_rows_name_tests_that_exist():
    for rows in reliability.read().values():
        for row in rows:
            assert set(row) - {"cases", "planted"} == {"proof", "promise", "test", "unit", "runs"}
            assert re.fullmatch(r"[a-z0-9-]+", row["proof"])
            assert (ROOT / row["test"]).is_file(), row["test"]


JUNIT = """<testsuites><testsuite>
<testcase classname="a" name="one" /><testcase classname="a" name="two"><failure /></testcase>
<testcase classname="a" name="three"><skipped /></testcase><testcase classname="b" name="one" />
</testsuite></testsuites>"""


def row(slug, **more):
    return {"proof": slug, "promise": slug, "test": "dev", "unit": "runs", "runs": {}, **more}


def test_counts_of_the_last_runs_are_taken_up(tmp_path):
    (tmp_path / "proofs").mkdir()
    (tmp_path / "proofs" / "test").write_text("first 100\nfirst 20\nsecond 7 2\n")
    (tmp_path / "proofs" / "nightly").write_text("first 5000000\n")
    (tmp_path / "test" / "python").mkdir(parents=True)
    (tmp_path / "test" / "python" / "python.xml").write_text(JUNIT)
    old = {"count": 1, "failed": 0, "date": "2026-01-01"}
    rows = [
        row("first", planted="a bug"),
        row("second"),
        row("third", cases={"step": "python", "match": "^a: "}),
        row("fourth", cases={"step": "python", "match": "nothing"}, runs={"test": old}),
        row("fifth", runs={"test": old, "fuzz": old}),
    ]
    assert reliability.record({"topic": rows}, tmp_path) == []
    got = [
        {name: (run["count"], run["failed"]) for name, run in row["runs"].items()} for row in rows
    ]
    assert got[0] == {"test": (120, 0), "nightly": (5000000, 0)}
    # A command that ran and left nothing did not show it: the old run goes; that of others stays.
    assert got[1:] == [{"test": (7, 2)}, {"test": (2, 1)}, {}, {"fuzz": (1, 0)}]
    lines = reliability.page({"topic": rows}).splitlines()
    assert "## Topic" in lines
    shown = next(line for line in lines if "first" in line)
    assert "a bug" in shown and "5,000,000 runs" in shown and "`./dev nightly`" in shown
    assert any("| 120 runs | 0 failed, " in line for line in lines)
    assert reliability.record({"topic": rows[1:]}, tmp_path) == ["first"]


def test_a_slug_is_of_one_row(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps([row("same")]))
    with pytest.raises(ValueError, match="several rows are of same"):
        reliability.read(tmp_path)
