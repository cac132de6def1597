"""tests/gpu/record.json is of this code, and README.md and docs/bench show figures.json."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from conftest import ROOT

sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "bench")]

import gpu_steps  # noqa: E402
import readme_table  # noqa: E402
import record as records  # noqa: E402
import sources  # noqa: E402
from nf4bench import matmul_cases, tables  # noqa: E402


@pytest.fixture(scope="module")
def record() -> dict:
    return records.load()


@pytest.fixture(scope="module")
def figures() -> dict:
    return readme_table.load()


def test_record_is_of_this_code(record: dict) -> None:
    assert record["sources"] == sources.source_hash(), (
        "code that runs on the GPU has changed since tests/gpu/record.json was written; "
        "run ./dev gpu on a machine with a GPU, or ./dev gpu --unverified WHY"
    )
    said = records.warning(record)
    if said:
        warnings.warn(said, stacklevel=1)


def test_everything_in_the_record_passed(record: dict) -> None:
    last = records.verified(record)
    left_out, tests = records.skipped(last), dict(last["tests"])
    families = last.get("families", {})
    for family in gpu_steps.FAMILIES if "unverified" not in record else []:
        of_family = families[str(family)]
        assert family.info.items() <= of_family["build"].items(), family
        tests |= {f"{family}: {name}": of_family[name] for name in ("kernels", "Python")}
    for name in tests.keys() - left_out:
        assert tests[name]["passed"] > 0 and tests[name]["failed"] == 0, name
    steps = last["compute-sanitizer"]
    reports = {step: steps[step]["reports"] for step in steps.keys() - left_out}
    assert not any(reports.values()), reports
    if "unverified" not in record:
        assert steps.keys() == gpu_steps.SANITIZER_STEPS.keys()


def test_errors_of_matmul_are_within_their_bounds(figures: dict) -> None:
    for row in figures["matmul"]["errors"]:
        said = tables.ERROR.line(row)
        assert row["errors"]["libnf4"] <= matmul_cases.MOST_ERROR[row["dtype"]], said
        assert tables.over_dense(row) <= matmul_cases.MOST_OF_DENSE, said


def test_what_the_repository_shows_is_made_from_the_figures(figures: dict) -> None:
    stale = [str(path.relative_to(ROOT)) for path in readme_table.stale(figures)]
    assert stale == [], "run bench/readme_table.py"


def test_figures_say_what_they_are_of(figures: dict) -> None:
    assert {"bench", "challenge", "call", "matmul", "models"} <= figures.keys()
    for name, each in figures.items():
        assert {"commit", "date", "device", "sources"} <= each.keys(), name


# ---- The hash ---------------------------------------------------------------------------


def test_the_hash_sees_every_change(tmp_path: Path) -> None:
    """A changed, an added and a renamed file each give another hash, and so do files of each
    pattern, in both places that the tests may have."""
    hashes = [sources.source_hash(tmp_path)]

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        hashes.append(sources.source_hash(tmp_path))

    write("lib/cuda/a.cuh", "first")
    write("lib/cuda/a.cuh", "changed")
    write("lib/cuda/b.cuh", "added")
    (tmp_path / "lib/core").mkdir()
    (tmp_path / "lib/cuda/b.cuh").rename(tmp_path / "lib/core/b.cuh")
    hashes.append(sources.source_hash(tmp_path))
    for name in (
        "include/nf4/nf4.h", "lib/api.cpp", "lib/problem.hpp", "lib/cuda/matmul/skinny/kernel.cuh",
        "lib/cuda/meson.build", "tests/cuda/check_more.cpp", "tests/support/force_matmul.hpp",
    ):  # fmt: skip
        write(name, "of a pattern")
    assert len(set(hashes)) == len(hashes)
    write("lib/cpu/a.cpp", "no GPU")
    assert hashes[-1] == hashes[-2]


def test_the_checkout_has_files_of_each_pattern() -> None:
    for pattern in (*sources.COVERED, *sources.SCRIPTS):
        assert any(True for _ in ROOT.glob(pattern)), pattern


C = "a.cuh"
SAME = [
    (C, "int a = 1;", "int a = 1;  // one\n\n"),
    (C, "int a = 1;", "/* one\n two */\nint a = 1;\n\n\n"),
    (C, "int a = b / c;", "int a = b / /* by */ c;"),
    (C, "f(1, 2)", "f(/*rows=*/1, /*cols=*/2)"),
    (C, "f(1, 2)", "f(1, 2 /*cols*/)"),
    (C, "int a;\nint b;", "int a;  // one \\\n goes on here\nint b;"),
    (C, "int a;\nint b;", "int a; // /* no block\nint b;"),
    (C, "int a;\nint b;", "int a; /* // */\nint b;"),
    (C, "#define A(x) \\\n  x", "#define A(x) /* says\n more */ \\\n  x  // end"),
    (C, "int a = 1'000; int b;", "int a = 1'000; /* ' */ int b;"),
    (C, "{\n  a;\n}", "{\r\n    a;\t\r\n}"),
    (C, "a", "a\n"),
    ("meson.build", "files = ['a']", "# files\nfiles = ['a']  # one\n\n"),
    ("meson.build", "if a\n  b = 1\nendif", "if a\n  # says\n  b = 1   \nendif"),
    ("a.py", "if a:\n    b = 1", "if a:\n\n    # says\n    b = 1  # more\n"),
]
OTHER = [
    (C, "int a = 1;", "int a = 2;"),
    (C, "int ab;", "int a/**/b;"),
    (C, 'f("a");', 'f("a // b");'),
    (C, 'f("a // b");', 'f("a // c");'),
    (C, 'f("a /* b */");', 'f("a ");'),
    (C, 'f("\\" // b");', 'f("\\" // c");'),
    (C, 'f("a  b");', 'f("a b");'),
    (C, "f('\"'); // a\ng('\"');", "f('\"'); // b\nh('\"');"),
    (C, "a = 1'0 / 2'0;", "a = 1'0;"),
    (C, 'f(R"(a // b\n)");', 'f(R"(a // c\n)");'),
    (C, 'f(R"(a\n\nb)");', 'f(R"(a\nb)");'),
    (C, 'f(R"x(a)" // b\n)x");', 'f(R"x(a)" // c\n)x");'),
    (C, "#define A b\nc", "#define A b c"),
    (C, "#define A(x) x", "#define A (x) x"),
    ("meson.build", "a = 'b # c'", "a = 'b # d'"),
    ("meson.build", "a = '''b\n# c\n'''", "a = '''b\n# d\n'''"),
    ("a.py", "if a:\n    b\n    c", "if a:\n    b\nc"),
    ("a.py", 'a = """b\n# c"""', 'a = """b\n# d"""'),
    ("nf4.map", "a # b", "a # c"),
]


@pytest.mark.parametrize("name, one, other", SAME + OTHER)
def test_the_hash_is_of_code_and_not_of_comments(
    name: str, one: str, other: str, tmp_path: Path
) -> None:
    path = tmp_path / "lib" / "cuda" / name
    path.parent.mkdir(parents=True)
    hashes = set()
    for text in (one, other):
        path.write_bytes(text.encode())
        hashes.add(sources.source_hash(tmp_path))
    assert len(hashes) == (1 if (name, one, other) in SAME else 2)


def test_comments_of_the_checkout_are_left_out_and_all_else_is_kept() -> None:
    """An end of a comment in code, or a comment that stays, would be a token taken wrongly."""
    for path in (ROOT / "lib" / "cuda").rglob("*.cu*"):
        text = sources.code(path.read_text(), sources._C)
        assert "//" not in text.replace("://", "") and "*/" not in text, path
        assert text.count("{") == text.count("}"), path


# ---- Figures of older code --------------------------------------------------------------


def test_figures_are_stale_where_their_own_code_changes(tmp_path: Path) -> None:
    files = {
        "matmul": "lib/cuda/matmul/product.cpp",
        "bench": "lib/cuda/dequant/dequant.cpp",
        "call": "bindings/python/nf4/matmul.py",
    }
    for name in files.values():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    stamped = {
        name: {"sources": sources.source_hash(tmp_path, patterns)}
        for name, patterns in sources.FIGURES.items()
    }
    assert sources.changed(stamped, tmp_path) == set()
    expected = {
        "matmul": {"experts", "families", "int4", "matmul", "matmul-sweep", "models", "training"},
        "bench": {"bench", "challenge", "families", "int4", "models", "sweep", "training"},
        "call": {"call", "challenge", "experts", "families", "models", "training"},
    }
    for name, file in files.items():
        (tmp_path / file).write_text("after")
        assert sources.changed(stamped, tmp_path) == expected[name]
        (tmp_path / file).write_text("before")


# ---- Code that no GPU has run -----------------------------------------------------------


def tool(*arguments: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "tests/gpu/record.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_record_with_a_step_left_out_warns_and_is_no_release(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    steps = {"memcheck": {"reports": 0}, "racecheck": {"skipped": "it takes an hour"}}
    about = {"sources": sources.source_hash(), "date": "2026-01-02", "device": "a GPU"}
    records.save(path, about | {"compute-sanitizer": steps})
    for argument, status in (("--warn", 0), ("--release", 1)):
        done = tool(argument, "--record", path)
        assert done.returncode == status
        assert "WARNING" in done.stderr and "2026-01-02 a GPU (a GPU)" in done.stderr
        assert "\nracecheck: it takes an hour\n" in done.stderr


def test_an_unverified_record_warns_and_is_no_release(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    before = {"sources": "of older code", "date": "2026-01-02", "device": "a GPU", "tests": {}}
    records.save(path, before)
    stale = tool("--release", "--record", path)
    assert stale.returncode == 1 and "of other code" in stale.stderr
    assert "./dev gpu" in tool("--unverified", "no GPU today", "--record", path).stderr
    record = records.load(path)
    assert record["sources"] == sources.source_hash()
    assert (record["unverified"], record["verified"]) == ("no GPU today", before)
    for arguments, status in ((["--warn"], 0), (["--release"], 1)):
        done = tool(*arguments, "--record", path)
        assert done.returncode == status
        assert "WARNING" in done.stderr and "no GPU today" in done.stderr
        assert "2026-01-02 (a GPU)" in done.stderr
    # The last verified record stays through another change.
    tool("--unverified", "still none", "--record", path)
    assert records.load(path)["verified"] == before
    records.save(path, before | {"sources": sources.source_hash()})
    assert (tool("--release", "--record", path).returncode, tool("--warn").returncode) == (0, 0)


def test_no_reason_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    records.save(path, {"sources": "of older code"})
    done = tool("--unverified", " ", "--record", path)
    assert done.returncode == 2 and "expected the reason" in done.stderr
    assert records.load(path) == {"sources": "of older code"}


def test_measured_figures_are_added_to_those_of_other_names(tmp_path: Path) -> None:
    measured, figures = tmp_path / "sweep.json", tmp_path / "figures.json"
    measured.write_text('{"device": "a GPU", "rows": []}')
    given = ("--figures", figures, "--commit", "abc")
    assert tool("--add", "sweep", measured, *given).returncode == 0
    found = records.load(figures)
    assert found["sweep"]["rows"] == [] and found["sweep"]["commit"] == "abc"
    assert "bench" in found and "sweep" not in sources.changed(found)
    refused = tool("--add", "speed", measured, *given)
    assert refused.returncode == 2 and "expected one of bench, challenge" in refused.stderr


def test_a_row_of_figures_is_a_line(tmp_path: Path) -> None:
    content = {"bench": {"device": "a", "rows": [{"us": 1, "peers": {"b": [2]}}, {}], "none": []}}
    records.save(tmp_path / "a.json", content)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == content
    assert '   {"us": 1, "peers": {"b": [2]}},\n' in text
