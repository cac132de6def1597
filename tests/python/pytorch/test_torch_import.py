"""What is imported with what: the core without torch, nf4.torch only with one that will do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nf4
import pytest
import warm

PACKAGE = Path(nf4.__file__).parents[1]


def run(code: str, stub: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Python with nf4, and with `stub` before everything else that can be imported."""
    path = [str(each) for each in (stub, PACKAGE) if each is not None]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


def stub_of_torch(folder: Path, text: str) -> Path:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(text)
    return folder


ABSENT = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
NEEDS_MORE = "raise ModuleNotFoundError(\"No module named 'sympy'\", name='sympy')"


def test_the_core_imports_no_torch(tmp_path):
    stub = stub_of_torch(tmp_path, "raise SystemExit('torch was imported')")
    code = "import nf4, nf4.checkpoint, nf4.cli, nf4._bitsandbytes"
    result = run(code + "; print(nf4.sizes((4, 64)).blocks)", stub)
    assert (result.stdout, result.returncode) == ("4\n", 0), result.stderr


@pytest.mark.interop
def test_nf4_torch_imports_nothing_that_takes_seconds():
    pytest.importorskip("torch")
    code = """if True:
        import sys, torch
        before = {*sys.modules}
        import nf4.torch
        slow = {"transformers", "peft", "torch.distributed.tensor", "torch._dynamo"}
        print(slow & ({*sys.modules} - before))
    """
    result = run(code)
    assert (result.stdout, result.returncode) == ("set()\n", 0), result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            ABSENT,
            "ImportError: nf4.torch needs PyTorch, which is not installed; pip install "
            "'.[torch]' in a clone of libnf4 gets one",
        ),
        ("__version__ = '2.5.1+cu121'", "ImportError: nf4.torch needs torch 2.10 or later, and "),
        (NEEDS_MORE, "ModuleNotFoundError: No module named 'sympy'"),
    ],
)
def test_what_is_missing_is_named(text, said, tmp_path):
    result = run("import nf4.torch", stub_of_torch(tmp_path, text))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(said)


@pytest.mark.parametrize("text", [ABSENT, "__version__ = '2.5.1'"])
def test_bitsandbytes_is_left_alone_with_a_warning(text, tmp_path, monkeypatch):
    monkeypatch.setenv("NF4_BITSANDBYTES", "1")
    code = "from nf4._bitsandbytes import activate; activate()"
    result = run(code, stub_of_torch(tmp_path, text))
    assert result.returncode == 0
    assert "libnf4 does not serve bitsandbytes, which runs on its own kernels" in result.stderr
    assert "NF4_BITSANDBYTES=0" in result.stderr


def test_a_library_that_is_missing_is_a_warning(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("NF4_BITSANDBYTES", "1")
    monkeypatch.setenv("NF4_LIBRARY", str(tmp_path / "libnf4.so"))
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE))
    result = warm.run("from nf4._bitsandbytes import activate; activate()")
    assert result.returncode == 0 and "cannot load" in result.stderr


@pytest.mark.parametrize("value", ["0", "false", "OFF", "no"])
def test_switched_off_nothing_is_imported(value, tmp_path, monkeypatch):
    monkeypatch.setenv("NF4_BITSANDBYTES", value)
    stub = stub_of_torch(tmp_path, "raise SystemExit('torch was imported')")
    result = run("from nf4._bitsandbytes import activate; activate()", stub)
    assert (result.returncode, result.stderr) == (0, "")
