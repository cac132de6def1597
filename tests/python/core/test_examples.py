"""The Python examples run; 77 is their exit code for what this machine lacks."""

import os
from pathlib import Path

import nf4
import pytest
import warm
from conftest import ROOT

EXAMPLES = sorted((ROOT / "examples" / "python").glob("*.py"))


def test_there_are_examples():
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example(example):
    # Their models are small: one thread is as fast, and does not wait for a busy machine's others.
    package = str(Path(nf4.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": package, "OMP_NUM_THREADS": "1"}
    result = warm.run(example, env=environment)
    if result.returncode == 77:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout
