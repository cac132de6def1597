"""The process that warm.py starts. It imports what takes seconds. Then it forks for each line that
it reads, and the fork runs the program that the line names."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import sys
from typing import Any

# Neither nf4 nor bitsandbytes and PEFT, whose import nf4 watches.
MODULES = (
    "torch",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "accelerate",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
)


def _paths(environment: dict[str, str]) -> list[str]:
    return [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]


def _become(request: dict[str, Any]) -> None:
    """As an interpreter with this environment and these arguments, whose output goes to files."""
    os.chdir(request["cwd"])
    for descriptor, path in enumerate([os.devnull, *request["outputs"]]):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = open(0)
    before = _paths(dict(os.environ))
    own = [path for path in sys.path[1:] if path not in before]
    first = "" if request["code"] is not None else os.path.dirname(request["argv"][0])
    sys.path[:] = [first, *_paths(request["env"]), *own]
    sys.argv[:] = request["argv"]
    os.environ.clear()
    os.environ.update(request["env"])


def _next() -> dict[str, Any]:
    """Returns in a child alone, with what that is to run."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return json.loads(line)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()


if __name__ == "__main__":
    gc.disable()
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # leaves what is shared with forks as it is
    gc.enable()
    program = _next()
    _become(program)
    # An exception ends this process as it ends one that starts with the program.
    if program["code"] is not None:
        exec(compile(program["code"], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(program["argv"][0], run_name="__main__")
