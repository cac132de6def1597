"""Ctrl-C while the command starts and ends: exit code 130, one line, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import checkpoint_helpers as helpers
import pytest

# Python runs this before anything else: SIGINT arrives when a module is looked for.
SITE = """
import os, signal, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == os.environ.get("INTERRUPT_AT"):
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
if os.environ.get("INTERRUPT_AT") == "at exit":
    import atexit
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
"""
# The script that installers write for an entry of [project.scripts].
SCRIPT = """
import sys
from nf4.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""
MODULES = ("nf4._load", "numpy", "nf4._matmul", "nf4.cli.main", "safetensors", "tqdm")


@pytest.fixture(params=["module", "script"])
def start(request: pytest.FixtureRequest, tmp_path: Path):
    """A function that runs `python -m nf4` or the script `nf4`, with SIGINT at a module."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    (tmp_path / "nf4").write_text(SCRIPT)
    program = ["-m", "nf4"] if request.param == "module" else [str(tmp_path / "nf4")]
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])

    def run(module: str, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *program, *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": path, "INTERRUPT_AT": module},
            capture_output=True,
            text=True,
            check=False,
            **options,
        )

    return run


@pytest.mark.parametrize("module", MODULES)
def test_interrupt_in_an_import(start, module):
    result = start(module, "doctor")
    assert (result.returncode, result.stderr) == (130, "nf4: interrupted\n")
    assert result.stdout == ""


def test_interrupt_before_the_module_is_run(start):
    result = start("nf4.__main__", "--version")
    assert result.returncode in (0, 130) and "Traceback" not in result.stderr


def test_interrupt_at_exit(start):
    """The command is done by then."""
    result = start("at exit", "--version")
    assert (result.returncode, result.stderr) == (130, "nf4: interrupted\n")
    assert result.stdout.startswith("nf4 ")


def test_both_ways_to_start_are_the_same(start, model, tmp_path):
    result = start("never", "quantize", model, tmp_path / "q")
    assert result.returncode == 0 and result.stderr == ""
    wrong = start("never", "frobnicate")
    assert wrong.returncode == 2 and wrong.stderr.startswith("usage: nf4 [-h]")
    assert start("never", "--help").stdout == helpers.run_cli("--help").stdout


def test_ignored_interrupts_stay_ignored(start):
    """As nohup and background jobs of a shell start their programs."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = start("numpy", "--version")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.returncode, result.stderr) == (0, "")


PROGRAMS = [["-m", "other", "nf4"], ["-m", "other.nf4"], ["other/nf4.py"], ["other/nf4"], ["nf4"]]


@pytest.mark.parametrize("program", PROGRAMS)
def test_other_programs_keep_their_handler(program, tmp_path):
    (tmp_path / "other").mkdir()
    for name in ("other/__init__.py", "other/__main__.py", "other/nf4.py", "other/nf4", "nf4"):
        (tmp_path / name).write_text(
            "import signal, sys\n"
            "sys.path = [path for path in sys.path if not path.endswith('other')]\n"
            "import nf4.cli\n"
            "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        )
    subprocess.run([sys.executable, *program], cwd=tmp_path, check=True)
