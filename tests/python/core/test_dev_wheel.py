"""./dev wheel: what it sets for the build backend, with stand-ins for all that it calls."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from conftest import ROOT

STAND_INS = """
set -euo pipefail
source tools/wheel.sh
say() { :; }
die() { echo "$*"; exit 1; }
for name in arm_problem count_proofs virtual_environment install_lists install; do
  eval "$name() { :; }"
done
for name in python tar env bash; do eval "$name() { :; }"; done
stat() { echo 1; }
arm_cuda_runtime() { export NF4_CUDA_RUNTIME=/arm; }
cuda_compiler() {
  HAVE_CUDA=yes
  echo "for $NF4_CUDA_DRIVER by ${PATH%%:*}, runtime ${NF4_CUDA_RUNTIME:-of wheels}"
  export PATH=/toolkit$NF4_CUDA_RUNTIME:$PATH
}
"""


def _run(script: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess:
    variables = {"ROOT": str(tmp_path), "CACHE": str(tmp_path / "cache"), "PACKAGE": "package"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NF4_CUDA")}
    return subprocess.run(
        ["bash", "-c", STAND_INS + script],
        cwd=ROOT,
        env=kept | variables | environment,
        capture_output=True,
        text=True,
    )


def test_the_wheel_after_that_for_arm_has_its_own_runtime(tmp_path: Path) -> None:
    """As in ./dev release, which makes both."""
    done = _run('wheel --arm; wheel; echo "${NF4_CUDA_RUNTIME-none}"', tmp_path)
    first, second, after = done.stdout.splitlines()
    path = os.environ["PATH"].split(os.pathsep)[0]
    assert first == f"for 12 by {path}, runtime /arm"
    assert second == f"for 12 by {path}, runtime of wheels"
    assert after == "none" and done.returncode == 0, done.stderr


def test_drivers_of_another_cuda(tmp_path: Path) -> None:
    of_13 = _run("wheel; wheel --arm", tmp_path, NF4_CUDA_DRIVER="13")
    assert of_13.stdout.startswith("for 13 by") and len(of_13.stdout.splitlines()) == 1
    wrong = _run("wheel --arm", tmp_path, NF4_CUDA_DRIVER="11")
    assert wrong.stdout == "NF4_CUDA_DRIVER is 11, which is neither 12 nor 13\n"
    assert wrong.returncode == 1
