"""examples/python/vllm_serve.py: the OpenAI server answers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from limits import HANG

EXAMPLE = Path(__file__).parents[2] / "examples/python/vllm_serve.py"


def test_the_server_answers(environment: dict[str, str]) -> None:
    server = {k: v for k, v in environment.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], env=server, capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer = re.search(r"^answer:((?:\s+\d+)+)$", done.stdout, re.MULTILINE)
    assert answer is not None, done.stdout[-4000:]
    assert "quantization=nf4" in done.stdout + done.stderr
