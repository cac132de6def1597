"""The composed toolkit, whose programs run with drivers of CUDA 12. Its parts here only copy."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "bindings" / "python" / "build_backend"))

import nf4_toolkit  # noqa: E402

# It writes the PTX of CUDA 13, as nvcc calls it.
CICC = """#!/bin/sh
for argument; do [ "$previous" != -o ] || output=$argument; previous=$argument; done
cat >"$output" <<'PTX'
PTX_OF_13PTX
"""
PTX = """// made
.version 9.0
.target sm_80
.version_of_mine
"""
# It says what it was called with.
FATBINARY = """#!/bin/sh
printf '%s\\n' "$@"
"""


def write(path, text="", mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


@pytest.fixture
def parts(tmp_path):
    """A toolkit of CUDA 13, and ptxas and a runtime of CUDA 12, in a folder with a space."""
    folder = tmp_path / "with space"
    for name in ("nvcc", "bin2c", "cudafe++", "nvlink", "crt/link.stub"):
        write(folder / "13" / "bin" / name, mode=0o755)
    write(folder / "13" / "bin" / "nvcc.profile", "TOP = $(_HERE_)/..\n")
    write(folder / "13" / "bin" / "fatbinary", FATBINARY, 0o755)
    write(folder / "13" / "nvvm" / "bin" / "cicc", CICC.replace("PTX_OF_13", PTX), 0o755)
    write(folder / "13" / "nvvm" / "libdevice" / "libdevice.10.bc")
    for name in ("crt/host_runtime.h", "cuda_runtime.h"):
        write(folder / "13" / "include" / name, "13")
    write(folder / "12" / "ptxas", "12", 0o755)
    write(folder / "12" / "include" / "cuda_runtime.h", "12")
    write(folder / "12" / "lib" / "libcudart_static.a", "12")
    return folder / "composed", folder / "13", folder / "12" / "ptxas", folder / "12"


def test_each_part_is_of_its_version(parts):
    toolkit = nf4_toolkit.compose(*parts)
    assert toolkit.parent == parts[0]
    assert not (toolkit / "bin" / "nvcc").is_symlink()  # it looks for its files where it lies
    assert (toolkit / "bin" / "ptxas").read_text() == "12"
    assert (toolkit / "include" / "cuda_runtime.h").read_text() == "13"
    assert (toolkit / "runtime" / "include" / "cuda_runtime.h").read_text() == "12"
    assert (toolkit / "lib64" / "libcudart_static.a").read_text() == "12"
    assert (toolkit / "nvvm" / "libdevice" / "libdevice.10.bc").exists()
    assert nf4_toolkit.compose(*parts) == toolkit
    assert os.listdir(parts[0]) == [toolkit.name]


def test_ptxas_gets_ptx_of_its_version(parts, tmp_path):
    cicc = nf4_toolkit.compose(*parts) / "nvvm" / "bin" / "cicc"
    ptx = tmp_path / "a kernel.ptx"
    subprocess.run([cicc, "-arch", "compute_90a", "-m64", "in.ii", "-o", ptx], check=True)
    assert ptx.read_text() == PTX.replace("9.0", "8.8")


def test_kept_ptx_gets_the_version_of_its_architecture(parts, tmp_path):
    """test_fatbin.py has what else the wrappers do."""
    fatbinary = nf4_toolkit.compose(*parts) / "bin" / "fatbinary"
    ptx = tmp_path / "a kernel.ptx"
    write(ptx, PTX)
    arguments = ["-64", f"--image3=kind=ptx,sm=80,file={ptx}"]
    said = subprocess.check_output([fatbinary, *arguments], text=True)
    assert said.splitlines() == ["--compress-mode=none", *arguments]
    assert ptx.read_text() == PTX.replace("9.0", "8.0")


def test_a_compiler_that_fails(parts):
    write(parts[1] / "nvvm" / "bin" / "cicc", "#!/bin/sh\nexit 3\n", 0o755)
    cicc = nf4_toolkit.compose(*parts) / "nvvm" / "bin" / "cicc"
    assert subprocess.run([cicc, "-o", "/nowhere/x.ptx"]).returncode == 3


@pytest.mark.parametrize("missing", ["13/bin/fatbinary", "13/nvvm/bin/cicc", "12/ptxas"])
def test_a_part_that_is_missing(parts, missing):
    part = parts[0].parent / missing
    part.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(str(part))):
        nf4_toolkit.compose(*parts)
    assert not parts[0].exists()


def test_another_process_may_be_first(parts, monkeypatch):
    """Nothing of the later one is left."""
    rename = os.rename

    def twice(source, target):
        rename(source, target)
        source.mkdir()
        (source / "file").touch()
        rename(source, target)

    monkeypatch.setattr(nf4_toolkit.os, "rename", twice)
    toolkit = nf4_toolkit.compose(*parts)
    assert os.listdir(parts[0]) == [toolkit.name]
    assert (toolkit / "bin" / "nvcc").exists()
