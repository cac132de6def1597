"""The list of what a wheel holds, tools/sbom.py, on a wheel of a few files."""

import hashlib
import importlib.util
import json
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT

PROGRAM = ROOT / "tools" / "sbom.py"
SPEC = importlib.util.spec_from_file_location("sbom", PROGRAM)
sbom = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sbom)

INFO = "libnf4-1.2.3.dist-info"
LIST = f"{INFO}/sboms/libnf4.cdx.json"


@pytest.fixture
def wheel(tmp_path, request):
    """A wheel whose library has the CUDA that the test names."""
    cuda = getattr(request, "param", "13.0.88\ncuda_runtime: 12.9\ncuda_archs: 90")
    built = f"\0compiler: gcc 12.2.0\ncpu_variants: avx2 scalar\ncuda: {cuda}\0".encode()
    files = {
        "nf4/__init__.py": b"",
        "nf4/lib/libnf4.so.0": b"\x7fELF" + built,
        f"{INFO}/METADATA": b"Name: libnf4\nVersion: 1.2.3\nLicense-Expression: MIT\n\nAbout.\n",
        f"{INFO}/RECORD": b"",
    }
    path = tmp_path / "libnf4-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def check(wheel):
    done = subprocess.run(
        [sys.executable, PROGRAM, "--check", wheel], capture_output=True, text=True
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("wheel", "linked"),
    [("13.0.88\ncuda_runtime: 12.9\ncuda_archs: 90", ["12.9"]), ("none", [])],
    indirect=["wheel"],
)
def test_every_file_is_listed(wheel, linked):
    before = sbom.read(wheel)
    assert check(wheel)[0] == 1
    sbom.add(wheel)
    after = sbom.read(wheel)
    assert after.keys() == before.keys() | {LIST}
    document = json.loads(after[LIST])
    main = document["metadata"]["component"]
    assert (main["name"], main["version"]) == ("libnf4", "1.2.3")
    listed = {each["name"]: each["hashes"][0]["content"] for each in main["components"]}
    assert listed == {
        name: hashlib.sha256(content).hexdigest()
        for name, content in before.items()
        if not name.endswith("RECORD")
    }
    assert [each["version"] for each in document["components"]] == linked
    recorded = after[f"{INFO}/RECORD"].decode().splitlines()
    assert sorted(line.split(",")[0] for line in recorded) == sorted(after)
    assert check(wheel) == (0, "")


def test_a_second_time_changes_nothing(wheel):
    sbom.add(wheel)
    once = wheel.read_bytes()
    sbom.add(wheel)
    assert wheel.read_bytes() == once


def test_a_file_that_was_changed_is_found(wheel):
    sbom.add(wheel)
    files = sbom.read(wheel)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content + (b"#" if name.endswith(".py") else b""))
    status, said = check(wheel)
    assert status == 1 and LIST in said and "RECORD" in said


def test_exchanged_hashes_are_found(wheel):
    """Which leave the list the same lines, in another order."""
    sbom.add(wheel)
    files = sbom.read(wheel)
    first, second = (hashlib.sha256(files[name]).hexdigest() for name in sorted(files)[-2:])
    text = files[LIST].decode().replace(first, "?").replace(second, first).replace("?", second)
    files[LIST] = text.encode()
    record = f"{INFO}/RECORD"
    files[record] = sbom.record_of(files, record)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    status, said = check(wheel)
    assert status == 1 and LIST in said
