"""Asks an installed transformers which weights of a checkpoint it loads in 4 bits.

meta_model.py builds the model in a process of its own, because config.json is not trusted: no
remote code or hub, bounded time and memory. Where that fails, rules.py decides by names.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

ANSWER_MARK = "nf4-model: "
_TIME_LIMIT = 120
_MEMORY_LIMIT = 8 << 30
# Isolated (-I), so that no module of the working directory is imported.
_PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, ({memory},) * 2)
sys.path[:] = sys.argv[1:]
from nf4.checkpoint.meta_model import main
main()
"""
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


class UnknownModel(Exception):
    """No model could be asked, and why."""


@dataclasses.dataclass(frozen=True)
class Model:
    """What transformers does with the tensors of a checkpoint in bitsandbytes' layout.

    name              the class and the version of transformers
    reasons           tensor -> why it cannot be loaded as a 4-bit weight; None if it can
    modules           tensor -> the module of the model that it is loaded into
    linear            the modules that transformers replaces by 4-bit layers
    conv1d            those of them whose dense weight is stored as [in, out]
    dense_by_default  those that it leaves dense when it quantizes by itself
    """

    name: str
    reasons: Mapping[str, str | None]
    modules: Mapping[str, str]
    linear: frozenset[str]
    conv1d: frozenset[str]
    dense_by_default: frozenset[str]

    @classmethod
    def from_answer(cls, name: str, answer: Mapping[str, Any]) -> Model:
        """The model from what meta_model.LoadPlan.answer gave."""
        modules = (frozenset(answer[key]) for key in ("linear", "conv1d", "dense_by_default"))
        return cls(name, answer["reasons"], answer["modules"], *modules)


def ask(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Model:
    """The model of config.json, asked about matrices: tensor name -> shape as stored.

    UnknownModel if config.json does not name one, if torch or transformers is not installed, if
    the model needs remote code, cannot be built, or has none of these tensors.
    """
    name = _model_name(config)
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise UnknownModel(f"{package} is not installed")
    answer = _run(json.dumps({"config": config, "shapes": shapes}), name)
    if not answer["fits"]:
        raise UnknownModel(f"the tensors are not those of config.json's {name}")
    return Model.from_answer(f"{name} (transformers {answer['transformers']})", answer)


def _model_name(config: Mapping[str, Any]) -> str:
    names, model_type = config.get("architectures"), config.get("model_type")
    one = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    if not one or not isinstance(model_type, str):
        raise UnknownModel("config.json does not name one architecture and its model_type")
    if "auto_map" in config:
        raise UnknownModel("config.json's auto_map names remote code, which is never run")
    return names[0]


def _run(request: str, name: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _PROGRAM.format(memory=_MEMORY_LIMIT), *sys.path],
            input=request,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIME_LIMIT,
            env={**os.environ, **_OFFLINE},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnknownModel(f"building {name} took longer than {_TIME_LIMIT} s") from None
    except OSError as error:
        raise UnknownModel(f"building {name}: {error}") from None
    for line in done.stdout.splitlines():
        if line.startswith(ANSWER_MARK):
            return json.loads(line.removeprefix(ANSWER_MARK))
    reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    raise UnknownModel(f"transformers cannot build {name}: {reason[:200]}")
