"""What the engines of these tests run in: this checkout's nf4, as if pip had installed it. Their
processes and models are those of the whole session."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import tomllib

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
sys.path.append(str(_ROOT / "tests" / "python"))

from limits import HANG  # noqa: E402

_METADATA = "Metadata-Version: 2.1\nName: libnf4\nVersion: 0\n"


def _entry_points() -> str:
    """The entry points of pyproject.toml that engines read, as an installation has them."""
    groups = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    names = ("vllm.general_plugins", "sglang.srt.plugins")
    return "".join(f"[{name}]\nnf4 = {groups[name]['nf4']}\n" for name in names)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("installed")
    installed = folder / "libnf4-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(_METADATA)
    (installed / "entry_points.txt").write_text(_entry_points())
    paths = [str(folder), str(_HERE), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # the models are small
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two ranks on any number of cores
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


class Engines:
    """Runs engines one after another in a process of its own, which imports an engine's packages
    once. program: engine.py or sglang_engine.py."""

    def __init__(self, program: str, environment: dict[str, str]):
        self._command = [sys.executable, str(_HERE / program)]
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, *runs: dict[str, Any]) -> list[dict[str, Any]]:
        """Runs an engine for each dict of arguments; returns what the program prints."""
        return [self._run(arguments) for arguments in runs]

    def alone(self, *runs: dict[str, Any], **variables: str) -> list[dict[str, Any]]:
        """Does the same in another process, with more variables of the environment."""
        other = Engines(self._command[-1], self._environment | variables)
        with contextlib.closing(other):
            return other(*runs)

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=HANG)

    def _run(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        limit = threading.Timer(HANG, self._process.kill)
        limit.start()
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                limit.cancel()
                return json.loads(line)
            print(line, end="")  # pytest shows it if the test fails
        limit.cancel()
        raise AssertionError(f"the engine's process ended with status {self._process.wait()}")


@pytest.fixture(scope="session")
def engines(environment: dict[str, str]) -> Iterator[Engines]:
    """Engines of vLLM; their arguments are those of engine.py."""
    with contextlib.closing(Engines("engine.py", environment)) as made:
        yield made


@pytest.fixture(scope="session")
def sglang_engines(environment: dict[str, str]) -> Iterator[Engines]:
    """Engines of SGLang; their arguments are those of sglang_engine.py."""
    with contextlib.closing(Engines("sglang_engine.py", environment)) as made:
        yield made


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> models.Made:
    return models.Made(tmp_path_factory.mktemp("models"))
