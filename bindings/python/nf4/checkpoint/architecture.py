"""Asks an installed transformers which weights of a checkpoint it loads in 4 bits.

meta_model.py builds the model in a process of its own, because config.json is not trusted: no
remote code or hub, no module of the working directory, and bounded time, memory and output. Where
that fails, rules.py decides by names.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from nf4._versions import OLDEST_TRANSFORMERS
from nf4.checkpoint.stacks import Stack, parameter_of

ANSWER_MARK = "nf4-model: "
# Seconds. The limit on CPU time ends a child that works, even if its parent was killed. The other
# ends a child that waits; a busy machine does not meet it.
_TIME_LIMIT, _CPU_LIMIT = 1200, 240
_MEMORY_LIMIT = 8 << 30
_OUTPUT_LIMIT = 256 << 20
_PROGRAM = os.path.join(os.path.dirname(__file__), "model_process.py")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


class UnknownModel(Exception):
    """No model could be built. The message says why."""


@dataclasses.dataclass(frozen=True)
class Model:
    """The way in which transformers handles the tensors of a checkpoint in bitsandbytes' layout.

    name              the class and the version of transformers
    reasons           tensor -> why it cannot be loaded as a 4-bit weight; None if it can
    modules           tensor -> the module of the model that it is loaded into
    linear            the modules that transformers replaces by 4-bit layers
    conv1d            the linear modules whose dense weight is stored as [in, out]
    dense_by_default  the linear modules that transformers leaves dense when it quantizes by itself
    read_by_owners    the linear modules whose weight is read by the code around them (owners.py)
    stacks            the parameters of experts, by the model's names
    stack_of          4-bit stack -> its parameter in `stacks`
    missing           the parameters that no tensor is loaded into; 4-bit stacks do not count as
                      tensors
    unexpected        the tensors that the model has no place for and does not ignore
    """

    name: str
    reasons: Mapping[str, str | None]
    modules: Mapping[str, str]
    linear: frozenset[str]
    conv1d: frozenset[str]
    dense_by_default: frozenset[str]
    read_by_owners: frozenset[str] = frozenset()
    stacks: Mapping[str, Stack] = dataclasses.field(default_factory=dict)
    stack_of: Mapping[str, str] = dataclasses.field(default_factory=dict)
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()

    @classmethod
    def from_answer(cls, name: str, answer: Mapping[str, Any]) -> Model:
        """Makes a Model from the result of meta_model.LoadPlan.answer."""
        sets = ("linear", "conv1d", "dense_by_default", "read_by_owners")
        modules = (frozenset(answer[key]) for key in sets)
        stacks = {full: Stack.from_answer(each) for full, each in answer["stacks"].items()}
        rest = stacks, answer["stack_of"], answer["missing"], answer["unexpected"]
        return cls(name, answer["reasons"], answer["modules"], *modules, *rest)

    def absent_experts(self) -> list[str]:
        """Says why stacks that are neither in 4 bits nor completely dense are not. If only one
        stack of a module is in 4 bits, stack_reason says so."""
        there = set(self.stack_of.values())
        modules = {each.module for name, each in self.stacks.items() if name in there}
        return [each.problem for each in self.stacks.values()
                if each.problem is not None and each.module not in modules]  # fmt: skip

    def stack_reason(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Says why a 4-bit stack is not one of the model's, or is not loaded; None if it is."""
        stack = self.stacks.get(self.stack_of.get(name, ""))
        if stack is None:
            return "no experts of the model"
        there = set(self.stack_of.values())
        for parameter, other in self.stacks.items():
            if other.module == stack.module and parameter not in there:
                return f"{parameter}, which is computed with it, is not in 4 bits"
        if name == parameter_of(name) and stack.transposed:
            return "its blocks are along the outputs, as the parameter is [experts, in, out]"
        return None if stack.shape == shape else "another shape in the model"


def ask(
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    others: Mapping[str, tuple[int, ...]] | None = None,
    weights: Iterable[str] = (),
) -> Model:
    """Builds the model of config.json, and asks it about tensors. matrices: tensor name -> shape as
    stored. others: the same for the other dense tensors. weights: the names of 4-bit stacks.

    Raises UnknownModel if config.json does not name a model, if torch or transformers is not
    installed, or if the model needs remote code, cannot be built, or has none of these tensors.
    """
    name = _model_name(config)
    _require_packages()
    request = {
        "config": config,
        "shapes": shapes,
        "others": others or {},
        "weights": list(weights),
    }
    answer = _run(json.dumps(request), name)
    try:
        if not answer["fits"]:
            raise UnknownModel(f"the tensors are not those of config.json's {name}")
        return Model.from_answer(f"{name} (transformers {answer['transformers']})", answer)
    except (AttributeError, KeyError, TypeError):
        raise _damaged(name) from None


def _damaged(name: str) -> UnknownModel:
    return UnknownModel(f"the answer of the process that built {name} is damaged")


def _require_packages() -> None:
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise UnknownModel(f"{package} is not installed")
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise UnknownModel("transformers is not installed, though its folder is there") from None
    if int(version.partition(".")[0]) < OLDEST_TRANSFORMERS:
        raise UnknownModel(
            f"transformers {version} is installed; {OLDEST_TRANSFORMERS}.0 or later decides by "
            "the modules of the model"
        )


def _model_name(config: Mapping[str, Any]) -> str:
    if not config:
        raise UnknownModel("config.json is missing or empty; a single file has none")
    names, model_type = config.get("architectures"), config.get("model_type")
    one = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    if not one or not isinstance(model_type, str):
        raise UnknownModel("config.json does not name one architecture and its model_type")
    if "auto_map" in config:
        raise UnknownModel("config.json's auto_map names remote code, which is never run")
    return names[0]


def _import_paths() -> list[str]:
    """Returns sys.path for the child, without the working directory, which may be the model's
    folder and contain Python modules. The directory stays if nf4 itself is imported from it."""
    try:
        here = os.path.realpath(os.curdir)
    except FileNotFoundError:  # it was deleted
        return sys.path
    root = os.path.join(os.path.dirname(__file__), os.pardir, os.pardir)
    if os.path.realpath(root) == here:
        return sys.path
    return [path for path in sys.path if os.path.realpath(path) != here]


def _run(request: str, name: str) -> Any:
    """Returns the answer of meta_model.main to a request. Raises UnknownModel if there is none."""
    limits = map(str, (_MEMORY_LIMIT, _CPU_LIMIT, _OUTPUT_LIMIT))
    try:
        # The output goes to files and not pipes, because a file can have a size limit.
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            status = subprocess.run(
                [sys.executable, "-I", _PROGRAM, *limits, *_import_paths()],
                input=request.encode(),
                stdout=stdout,
                stderr=stderr,
                timeout=_TIME_LIMIT,
                env={**os.environ, **_OFFLINE},
                check=False,
            ).returncode
            if status:
                reason = _failure(status, stderr)
                raise UnknownModel(f"transformers cannot build {name}: {reason}")
            return _answer(stdout, name)
    except subprocess.TimeoutExpired:
        raise UnknownModel(f"building {name} took longer than {_TIME_LIMIT} s") from None
    except OSError as error:
        raise UnknownModel(f"building {name}: {error}") from None


def _failure(status: int, stderr: IO[bytes]) -> str:
    """Says why the child ended with a status other than 0."""
    if status < 0:
        return f"its process was ended by signal {-status} ({signal.strsignal(-status)})"
    stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - 10_000))
    lines = stderr.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else f"exit status {status}"


def _answer(stdout: IO[bytes], name: str) -> Any:
    stdout.seek(0)
    for line in stdout:
        if line.startswith(ANSWER_MARK.encode()):
            try:
                return json.loads(line[len(ANSWER_MARK) :])
            except ValueError:
                break
    raise _damaged(name)
