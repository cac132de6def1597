"""The entry point that bitsandbytes loads, and what nf4 doctor says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nf4
import pytest
import torch_cases
import warm

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "bitsandbytes")

import nf4.torch  # noqa: E402
from bitsandbytes_cases import FUNCTIONS, OPERATORS  # noqa: E402
from nf4.cli import doctor_bitsandbytes, main  # noqa: E402


@pytest.fixture
def installed(tmp_path):
    """The environment of a process that finds nf4 as if pip had installed it."""
    notes = tmp_path / "libnf4-0.1.0.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text("Metadata-Version: 2.1\nName: libnf4\nVersion: 0.1.0\n")
    entry_points = (
        "[bitsandbytes.backends]\nnf4 = nf4._bitsandbytes:activate\n"
        "[torch.backends]\nnf4 = _nf4_quiet:hold_back\n"
    )
    (notes / "entry_points.txt").write_text(entry_points)
    path = [str(Path(nf4.__file__).parents[1]), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "NF4_BITSANDBYTES": "1"}


@pytest.fixture
def doctor(installed, tmp_path, monkeypatch, capsys):
    """Returns what nf4 doctor says of bitsandbytes in that environment. The process that it asks is
    a fork of one that has imported torch."""

    def run(command, **options):
        assert command[:2] == [sys.executable, "-c"] and options["capture_output"]
        assert options["timeout"] > 0
        return warm.run(command[-1], env=installed)

    def report():
        assert main(["doctor", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["bitsandbytes"]

    subprocesses = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(doctor_bitsandbytes, "subprocess", subprocesses)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv("NF4_BITSANDBYTES", "1")
    return report


REGISTERED_FIRST = """
from nf4.torch import bitsandbytes as backend
backend.register()
import bitsandbytes
def package():
    return bitsandbytes.functional.dequantize_4bit.__globals__["__name__"].split(".")[0]
assert package() == "nf4"
backend.unregister()
assert package() == "bitsandbytes"
"""
FAILING = """
from nf4.torch import bitsandbytes as backend
backend.replacements.replace = lambda module, *_: module.no_such_name
import bitsandbytes
assert backend.served() is None
"""


def test_registered_before_bitsandbytes_is_imported(installed):
    """The entry point registers, too, in the middle of the import; once is enough."""
    result = warm.run(REGISTERED_FIRST, env=installed)
    assert result.returncode == 0, result.stderr


SAYS_SO_ITSELF = """
from importlib.util import find_spec
from bitsandbytes.functional import has_avx512bf16
print(bool(has_avx512bf16()) and find_spec("kernels") is None)
"""
# The import of torch does this by the entry point.
HOLD_BACK = "import _nf4_quiet; _nf4_quiet.hold_back()"
NO_KERNEL = """
import logging, torch
logging.getLogger("bitsandbytes.backends.cpu.ops").warning("before")
log = logging.getLogger("bitsandbytes.backends.cpu.ops")
log.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "none")
import bitsandbytes
log.warning("after")
log.warning("Failed to load CPU gemm_4bit_forward, for the second time")
"""


@pytest.mark.parametrize("switch, lines", [("1", 0), ("0", 1)])
def test_what_bitsandbytes_says_of_its_kernel_appears_where_it_means_something(
    switch, lines, installed
):
    environment = installed | {"NF4_BITSANDBYTES": switch}
    if switch == "1":  # that it is held back from the import of torch on is tested here alone
        command = [sys.executable, "-c", NO_KERNEL]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
    else:
        result = warm.run(HOLD_BACK + NO_KERNEL, env=environment)
    assert result.returncode == 0, result.stderr
    # bitsandbytes itself says so, too, on CPUs with AVX512-BF16, where libnf4 makes it answer no.
    asked = warm.run(SAYS_SO_ITSELF, env=installed | {"NF4_BITSANDBYTES": "0"})
    own = asked.stdout.split()[-1] == "True"
    found = result.stderr.count("Failed to load CPU gemm_4bit_forward from kernels-community")
    assert found == lines * (1 + own)
    assert "before\n" in result.stderr and "after\n" in result.stderr
    assert "for the second time" in result.stderr


def test_it_appears_where_nothing_is_served(installed):
    failing = FAILING.replace("import bitsandbytes\n", NO_KERNEL + "\n", 1)
    result = warm.run(HOLD_BACK + failing, env=installed)
    assert result.returncode == 0, result.stderr
    assert "gemm_4bit_forward from kernels-community: none" in result.stderr


def test_whatever_goes_wrong_bitsandbytes_is_imported(installed):
    result = warm.run(HOLD_BACK + FAILING, env=installed)
    assert result.returncode == 0, result.stderr
    assert "libnf4 does not serve bitsandbytes" in result.stderr
    assert "AttributeError" in result.stderr and "no_such_name" in result.stderr


def test_doctor_says_what_is_served(doctor, monkeypatch):
    report = doctor()
    assert report["active"] and report["reason"] is None
    assert list(report["operators"]) == OPERATORS and report["functions"] == FUNCTIONS
    peft = report["peft"]
    assert "peft.tuners.lora.bnb.Linear4bit.forward" in peft["functions"]
    assert peft["left_alone"] == []
    assert doctor_bitsandbytes.lines(report)[-1].startswith("PEFT: utils.integrations.dequantize")
    unknown = {"functions": [], "left_alone": ["peft.tuners.lora.layer.Linear.forward"]}
    last = doctor_bitsandbytes.lines(report | {"peft": unknown})[-1]
    assert last == "PEFT: tuners.lora.layer.Linear.forward left alone"
    monkeypatch.setenv("NF4_BITSANDBYTES", "0")
    assert doctor() == {"active": False, "reason": "NF4_BITSANDBYTES=0 is set"}


def test_a_peft_that_cannot_be_imported(doctor, tmp_path):
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "__init__.py").write_text("raise ImportError('too old a transformers')")
    found = doctor()
    assert found["active"] and found["peft"] is None
    assert found["reason"] == "PEFT cannot be imported: too old a transformers"


def test_doctor_says_why_nothing_is_served(monkeypatch):
    assert doctor_bitsandbytes.diagnose(None)["reason"] == "not installed"
    monkeypatch.setenv("NF4_BITSANDBYTES", "1")
    found = []
    monkeypatch.setattr(doctor_bitsandbytes.metadata, "entry_points", lambda group: found)
    assert "not installed by pip" in doctor_bitsandbytes.diagnose("0.50.2")["reason"]
    found.append(SimpleNamespace(name="nf4"))
    monkeypatch.setattr(doctor_bitsandbytes, "_PROBE", "raise ImportError('no such GPU')")
    report = doctor_bitsandbytes.diagnose("0.50.2")
    assert report["reason"] == "it cannot be imported: ImportError: no such GPU"
    monkeypatch.setattr(doctor_bitsandbytes, "_asked", lambda: (None, ""))
    old = doctor_bitsandbytes.diagnose("0.44.1")["reason"]
    assert old == "0.44.1 did not load libnf4; 0.50 and later do"
    (line,) = doctor_bitsandbytes.lines(report)
    assert line == f"bitsandbytes is not on libnf4's kernels: {report['reason']}"


def test_doctor_in_words():
    report = {
        "active": True,
        "reason": None,
        "operators": {"gemm_4bit": ["cpu", "cuda"], "dequantize_4bit": ["cpu"]},
        "left_alone": {"dequantize_4bit.out": "bitsandbytes 0.45 has none"},
        "functions": ["functional.dequantize_4bit"],
    }
    assert doctor_bitsandbytes.lines(report) == [
        "bitsandbytes on libnf4's kernels on cpu and cuda: gemm_4bit",
        "on cpu: dequantize_4bit",
        "functional.dequantize_4bit replaced",
        "dequantize_4bit.out left alone: bitsandbytes 0.45 has none",
    ]
