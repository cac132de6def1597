"""Finding the library, and what is said where it is not there or of another version."""

import ctypes
import subprocess
import sys
from pathlib import Path

import nf4
import pytest
from conftest import compile_c
from nf4 import _abi, _load


def test_the_path_of_the_environment_is_used(fake, fake_library_path):
    assert nf4.library_path() == str(fake_library_path)
    assert nf4.cpu_variant() == "fake"


def test_a_missing_library_is_named(use_library, tmp_path):
    use_library(tmp_path / "libnf4.so")
    with pytest.raises(nf4.LibraryNotFound, match="cannot load .*libnf4.so: .*set NF4_LIBRARY"):
        nf4.version()


def test_a_file_that_is_no_library(use_library, tmp_path):
    path = tmp_path / "libnf4.so"
    path.write_bytes(b"not an ELF file")
    use_library(path)
    with pytest.raises(nf4.LibraryNotFound, match=f"cannot load {path}"):
        nf4.version()


def test_a_library_without_our_functions(use_library, tmp_path):
    source = tmp_path / "other.c"
    source.write_text("int other(void) { return 1; }\n")
    path = compile_c(source, tmp_path / "libnf4.so", "-shared", "-fPIC")
    use_library(path)
    with pytest.raises(nf4.LibraryNotFound, match="is not the libnf4 of this package: .*nf4_"):
        nf4.version()


def versions():
    """Another major version, an earlier minor one, and a later one."""
    major, minor = _abi.VERSION_MAJOR, _abi.VERSION_MINOR
    return [((major + 1, minor), False), ((major, minor - 1), False), ((major, minor + 1), True)]


@pytest.mark.parametrize(("found", "served"), versions())
def test_another_version(found, served, fake, fake_library_path, use_library):
    major, minor = found
    ctypes.c_int32.in_dll(fake, "fake_version").value = major * 10000 + minor * 100
    use_library(fake_library_path)
    if served:
        nf4.version()
        return
    with pytest.raises(nf4.LibraryNotFound, match=r"needs 0\.1 or a later 0\.x"):
        nf4.version()


@pytest.mark.parametrize(
    ("detail", "renamed"),
    [
        ("in overlaps packed", "array overlaps packed"),
        ("workspace overlaps in", "workspace overlaps array"),
        ("in is host memory (0x10)", "array is host memory (0x10)"),
        ("y of product 1 overlaps y of product 0", "out of product 1 overlaps out of product 0"),
        ("product 0: y is NULL", "product 0: out is NULL"),
        ("packed is of device 1, but y is of 0", "packed is of device 1, but out is of 0"),
        ("absmax is in host memory", "absmax is in host memory"),
        ("nf4_y.in is 7; my is 5", "nf4_y.in is 7; my is 5"),
    ],
)
def test_arguments_go_by_the_callers_names(detail, renamed):
    names = {"in": "array", "y": "out"}
    assert _load._renamed(detail, names) == renamed


def test_a_failure_is_not_remembered(use_library, fake_library_path, tmp_path):
    use_library(tmp_path / "libnf4.so")
    with pytest.raises(nf4.LibraryNotFound):
        nf4.version()
    use_library(fake_library_path)
    assert nf4.cpu_variant() == "fake"


def test_the_package_imports_without_a_library_and_without_torch(tmp_path):
    """`nf4 doctor` says what is wrong, so the import may not fail."""
    package = str(Path(nf4.__file__).parents[1])
    code = "import sys, nf4; assert 'torch' not in sys.modules; print(nf4.__all__)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"NF4_LIBRARY": str(tmp_path / "none.so"), "PYTHONPATH": package},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "quantize" in result.stdout


def test_a_package_without_the_header_says_so(monkeypatch, tmp_path):
    assert Path(nf4.get_include(), "nf4", "nf4.h").is_file()
    package = tmp_path / "a" / "b" / "nf4"
    monkeypatch.setattr(_load, "_PACKAGE", package)
    with pytest.raises(FileNotFoundError, match=f"no nf4.h in {package}: install libnf4 again"):
        nf4.get_include()
