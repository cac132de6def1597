"""The build backend: which compiler it takes, and what it asks for."""

import importlib.util
import os
import subprocess
import sys

import pytest
from conftest import ROOT

SOURCE = ROOT / "bindings" / "python" / "build_backend" / "nf4_build.py"


@pytest.fixture
def backend(monkeypatch):
    """The backend where there is no nvcc and no CUDA variable."""
    spec = importlib.util.spec_from_file_location("nf4_build", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("CUDACXX", "NF4_CUDA", "NVCC_APPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(module, "wheel_root", lambda: None)
    return module


def make_executable(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_compiler_of_the_path_comes_first(backend, monkeypatch, tmp_path):
    nvcc = make_executable(tmp_path / "toolkit" / "nvcc")
    monkeypatch.setenv("PATH", str(nvcc.parent))
    monkeypatch.setattr(backend, "wheel_root", lambda: tmp_path)
    assert backend.cuda_environment() == {"PATH": f"{nvcc.parent}:{nvcc.parent}"}


def test_cudacxx_goes_in_front_of_the_path(backend, monkeypatch, tmp_path):
    """Meson looks for nvcc on PATH only."""
    monkeypatch.setenv("CUDACXX", str(tmp_path / "own" / "nvcc"))
    assert backend.cuda_environment() == {"PATH": f"{tmp_path / 'own'}:/nowhere"}


def test_the_wheels_come_last(backend, monkeypatch, tmp_path):
    monkeypatch.setattr(backend, "wheel_root", lambda: tmp_path)
    assert backend.cuda_environment() == {
        "PATH": f"{tmp_path / 'bin'}:/nowhere",
        "NVCC_APPEND_FLAGS": f"-L{tmp_path / 'lib'}",
    }
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--threads 2")
    flags = backend.cuda_environment()["NVCC_APPEND_FLAGS"]
    assert flags == f"--threads 2 -L{tmp_path / 'lib'}"


def test_the_cuda_option(backend, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert backend._prepared(None) == {"setup-args": ["-Dcuda=auto"]}
    monkeypatch.setattr(backend, "wheel_root", lambda: tmp_path)
    given = {"setup-args": "-Dgpu_archs=90"}
    assert backend._prepared(given) == {"setup-args": ["-Dcuda=enabled", "-Dgpu_archs=90"]}
    assert os.environ["PATH"].startswith(str(tmp_path))
    assert given == {"setup-args": "-Dgpu_archs=90"}
    monkeypatch.setenv("NF4_CUDA", "0")
    assert backend._prepared({"setup-args": ["-Da"]}) == {"setup-args": ["-Dcuda=disabled", "-Da"]}


def test_requirements(backend, monkeypatch, tmp_path):
    pytest.importorskip("mesonpy")
    monkeypatch.setattr(backend.platform, "system", lambda: "Linux")
    monkeypatch.setattr(backend.platform, "machine", lambda: "x86_64")
    wheels = backend.CUDA_WHEELS
    assert backend.get_requires_for_build_wheel()[-len(wheels) :] == wheels
    monkeypatch.setenv("NF4_CUDA", "0")
    assert not set(wheels) & set(backend.get_requires_for_build_wheel())
    monkeypatch.delenv("NF4_CUDA")
    monkeypatch.setenv("CUDACXX", str(make_executable(tmp_path / "nvcc")))
    assert not set(wheels) & set(backend.get_requires_for_build_wheel())
    monkeypatch.delenv("CUDACXX")
    monkeypatch.setattr(backend.platform, "machine", lambda: "riscv64")
    assert not set(wheels) & set(backend.get_requires_for_build_wheel())


def test_the_environment_as_shell_lines(tmp_path):
    nvcc = make_executable(tmp_path / "with space" / "nvcc")
    script = f'eval "$({sys.executable} {SOURCE})" && command -v nvcc'
    environment = {"PATH": os.environ["PATH"], "CUDACXX": str(nvcc)}
    result = subprocess.run(
        ["sh", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == str(nvcc)


def test_the_requirements_as_lines(backend):
    result = subprocess.run(
        [sys.executable, str(SOURCE), "requirements"], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == backend.CUDA_WHEELS
