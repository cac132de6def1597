"""What the engines of these tests run in: this checkout's nf4, as if pip had installed it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


Engines = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def engines(environment: dict[str, str]) -> Engines:
    """Runs an engine for each dict of LLM's arguments; returns what engine.py prints."""
    return _runner(environment, "engine.py")


@pytest.fixture(scope="session")
def sglang_engines(environment: dict[str, str]) -> Engines:
    """Does the same for Engine's arguments and sglang_engine.py."""
    return _runner(environment, "sglang_engine.py")


def _runner(environment: dict[str, str], program: str) -> Engines:
    def run(*runs: dict[str, Any], **variables: str) -> list[dict[str, Any]]:
        command = [sys.executable, str(_HERE / program), *map(json.dumps, runs)]
        done = subprocess.run(
            command, env=environment | variables, capture_output=True, text=True, timeout=HANG
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert len(lines) == len(runs), done.stderr[-4000:]
        return lines

    return run
