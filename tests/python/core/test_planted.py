"""A file in the current folder with the name of the library, or of the driver, is not loaded."""

import os
import subprocess
import sys
from pathlib import Path

import nf4
import pytest
from conftest import compile_c
from nf4 import _load

PACKAGE = Path(nf4.__file__).parents[1]
# Leaves a file where it is loaded.
PLANTED = """
#include <fcntl.h>
__attribute__((constructor)) static void loaded(void) { creat("loaded", 0600); }
int nf4_version(void) { return 100; }
"""
NAMES = ("libnf4.so", "libnf4.so.0", "libcuda.so.1", "libcudart.so.13", "libstdc++.so.6")
CLI = "from nf4.cli.main import main; raise SystemExit(main([{!r}]))"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of such files."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted.c").write_text(PLANTED)
    made = compile_c(folder / "planted.c", folder / NAMES[0], "-shared", "-fPIC")
    for name in NAMES[1:]:
        os.link(made, folder / name)
    return folder


def run(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python, in that folder, which finds nf4 and what it needs and no library but that of
    NF4_LIBRARY."""
    clean = {k: v for k, v in os.environ.items() if k not in ("LD_LIBRARY_PATH", "NF4_LIBRARY")}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=clean | {"PYTHONPATH": str(PACKAGE), "NF4_BITSANDBYTES": "0"} | environment,
        capture_output=True,
        text=True,
    )


CODES = ("import nf4; nf4.version()", CLI.format("doctor"), CLI.format("--version"))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("named", [None, "libnf4.so", "libnf4.so.0"])
def test_the_current_folder_is_not_searched(code: str, named: str | None, planted: Path) -> None:
    """Nor for a NF4_LIBRARY without a folder, which is a name for the loader to search for."""
    done = run(code, planted, **({"NF4_LIBRARY": named} if named else {}))
    assert not (planted / "loaded").exists(), done.stderr


def test_the_library_loads_nothing_from_the_current_folder(planted: Path) -> None:
    """Not even where it looks for a driver."""
    library = os.path.abspath(_load.library()._name)
    done = run("import nf4; print(nf4.device_info(0))", planted, NF4_LIBRARY=library)
    assert done.returncode == 0, done.stderr
    assert not (planted / "loaded").exists()


@pytest.mark.parametrize("code", CODES)
def test_a_planted_library_is_loaded_by_its_path(code: str, planted: Path) -> None:
    """That the tests above could find one."""
    try:
        run(code, planted, NF4_LIBRARY=f"{planted}/libnf4.so")
        assert (planted / "loaded").exists()
    finally:
        (planted / "loaded").unlink(missing_ok=True)


@pytest.mark.parametrize("named", [None, "libnf4.so", "libnf4.so.0"])
def test_get_library_does_not_name_it(
    named: str | None, planted: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(planted)
    monkeypatch.setattr(_load, "_INSTALLED", tmp_path / "none")
    if named is None:
        monkeypatch.delenv("NF4_LIBRARY", raising=False)
    else:
        monkeypatch.setenv("NF4_LIBRARY", named)
    with pytest.raises(nf4.LibraryNotFound, match="there is no file"):
        nf4.get_library()
