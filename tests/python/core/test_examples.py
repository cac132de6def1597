"""The Python examples run; 77 is their exit code for what this machine lacks."""

import importlib.util
import os
from pathlib import Path

import nf4
import pytest
import warm
from conftest import ROOT

EXAMPLES = sorted((ROOT / "examples" / "python").glob("*.py"))


# An example starts its ranks by torchrun. Here they are forks, as importing torch takes seconds.
TORCHRUN = """
import os, runpy, sys
from torch.distributed import run
start = run.elastic_launch

def main():
    runpy.run_path(sys.argv[0], run_name="__main__")

def launch(config, entrypoint):
    config.start_method = "fork"
    return lambda *arguments: start(config, main)()

def execv(program, command):
    assert program == command[0] == sys.executable
    assert command[1:3] == ["-m", "torch.distributed.run"] and command[-1:] == sys.argv
    run.main(command[3:])
    sys.exit()

run.elastic_launch, os.execv = launch, execv
sys.argv[:] = sys.argv[1:]
main()
"""


def test_there_are_examples():
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example(example):
    # Their models are small: one thread is as fast, and does not wait for a busy machine's others.
    package = str(Path(nf4.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": package, "OMP_NUM_THREADS": "1"}
    if "torchrun" in example.read_text() and importlib.util.find_spec("torch"):
        result = warm.run(TORCHRUN, str(example), env=environment)
    else:
        result = warm.run(example, env=environment)
    if result.returncode == 77:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout
