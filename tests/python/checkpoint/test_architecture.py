"""Asking transformers which weights it loads in 4 bits, and rules by name where it cannot be."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import checkpoint_helpers as helpers
import nf4
import pytest
from nf4.checkpoint import (
    FormatError,
    QuantizeOptions,
    architecture,
    audit,
    quantize_checkpoint,
    rules,
)
from nf4.checkpoint.architecture import Model, UnknownModel, ask
from nf4.checkpoint.bnb import Survey
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.known_models import KNOWN, Known
from nf4.checkpoint.rules import Rules, model_types, replaced_dense
from nf4.checkpoint.skips import is_simple

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def _info(name: str, shape: tuple[int, ...] = (8, 8)) -> TensorInfo:
    return TensorInfo(name, "F32", shape, 0, 0)


def _model(**reasons: str | None) -> Model:
    """Modules a, b, ... of which those without a reason are loadable; `tied` is not stored."""
    return Model(
        name="Toy",
        reasons={f"{name}.weight": reason for name, reason in reasons.items()},
        modules={f"{name}.weight": f"model.{name}" for name in reasons},
        linear=frozenset({f"model.{name}" for name, r in reasons.items() if not r} | {"tied"}),
        conv1d=frozenset(),
        dense_by_default=frozenset({"model.out"}),
    )


CONFIGS = [
    ({}, "config.json is missing or empty; a single file has none"),
    ({"model_type": "a"}, "does not name one architecture"),
    ({"architectures": ["A", "B"], "model_type": "a"}, "does not name one architecture"),
    ({"architectures": "A", "model_type": "a"}, "does not name one architecture"),
    ({"architectures": ["A"], "model_type": 3}, "does not name one architecture"),
    (LLAMA | {"auto_map": {"AutoModel": "x.Y"}}, "remote code, which is never run"),
]


@pytest.mark.parametrize(("config", "reason"), CONFIGS)
def test_configurations_that_name_no_model(config, reason, monkeypatch):
    monkeypatch.setattr(architecture.subprocess, "run", None)
    with pytest.raises(UnknownModel, match=reason):
        ask(config, {})


def test_without_transformers_names_decide_and_the_result_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(architecture.importlib.util, "find_spec", lambda package: None)
    source = helpers.write_model(tmp_path / "in", **LLAMA)
    result = quantize_checkpoint(str(source), str(tmp_path / "q"), QuantizeOptions())
    assert result.chosen_by == "tensor names: torch is not installed"
    assert result.left_dense == {"embedding": 1, "output head": 1} and result.weights == 2
    assert audit(str(tmp_path / "q"))[1] == []


@pytest.mark.parametrize("version", ["4.57.1", "5.0.0rc1"])
def test_an_old_transformers_is_named(version, monkeypatch):
    monkeypatch.setattr(architecture.importlib.util, "find_spec", lambda package: True)
    monkeypatch.setattr(architecture.importlib.metadata, "version", lambda package: version)
    monkeypatch.setattr(architecture, "_run", lambda request, name: {"fits": False})
    old = f"transformers {version} is installed; 5.0 or later decides by the modules of the model"
    reason = old if version.startswith("4") else "the tensors are not those of "
    with pytest.raises(UnknownModel, match=reason):
        ask(LLAMA, {})


MARKED = f"print({architecture.ANSWER_MARK!r} + {{!r}})\n"
DAMAGED = "the answer of the process that built LlamaForCausalLM is damaged"
CHILDREN = {
    "nothing": ("", DAMAGED),
    "truncated": (MARKED.format('{"fits": tr'), DAMAGED),
    "no keys": (MARKED.format("{}"), DAMAGED),
    "half of the keys": (MARKED.format('{"fits": true, "transformers": "5"}'), DAMAGED),
    "no object": (MARKED.format("5"), DAMAGED),
    "failure after an answer": (
        MARKED.format('{"fits": false}') + "raise ValueError('late')",
        "cannot build LlamaForCausalLM: ValueError: late",
    ),
    "killed": (
        MARKED.format('{"fits": false}') + "import os\nos.kill(os.getpid(), 9)",
        r"its process was ended by signal 9 \(Killed\)",
    ),
}


@pytest.mark.parametrize("child", CHILDREN)
def test_what_a_child_that_fails_answers_is_not_used(child, tmp_path, monkeypatch):
    program, reason = CHILDREN[child]
    (tmp_path / "child.py").write_text(program)
    monkeypatch.setattr(architecture, "_PROGRAM", str(tmp_path / "child.py"))
    monkeypatch.setattr(architecture, "_require_packages", lambda: None)
    with pytest.raises(UnknownModel, match=reason):
        ask(LLAMA, {"model.norm.weight": (3, 3)})


LIMITED = """
import importlib.util, json, os, resource
def main():
    kinds = (resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE)
    found = {"limits": [resource.getrlimit(kind) for kind in kinds]}
    for name in ("timm", "detectron2", "kernels"):
        try:
            __import__(name)
        except ImportError:
            found[name] = importlib.util.find_spec(name)
    try:
        bytearray(1 << 31)
    except MemoryError:
        found["memory"] = "refused"
    print(json.dumps(found), flush=True)
    os.write(1, bytes(1 << 20))
    os.write(1, b"more")
"""


@pytest.mark.parametrize("lower", [None, 1 << 29])
def test_limits_of_the_child(lower, tmp_path):
    """Each is the lower one of its own and of the hard limit that there is already."""
    folder = tmp_path / "nf4" / "checkpoint"
    folder.mkdir(parents=True)
    (folder / "meta_model.py").write_text(LIMITED)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    for name in ("timm", "detectron2", "kernels"):
        (tmp_path / f"{name}.py").write_text("")

    def before() -> None:
        if lower is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (lower, lower))

    limits = [1 << 30, 60, 1 << 20]
    with open(tmp_path / "stdout", "w+") as stdout:
        done = subprocess.run(
            [sys.executable, "-I", architecture._PROGRAM, *map(str, limits), tmp_path, *sys.path],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            preexec_fn=before,
        )
    assert done.returncode == 1 and "File too large" in done.stderr
    with open(tmp_path / "stdout") as stdout:
        found = json.loads(stdout.readline())
    limits[0] = lower or limits[0]
    assert found == {
        "limits": [[limit, limit] for limit in limits],
        "timm": None,
        "detectron2": None,
        "kernels": None,
        "memory": "refused",
    }


def test_the_child_imports_nothing_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("", ".", str(tmp_path), str(tmp_path / "link")):
        monkeypatch.syspath_prepend(name)
    paths = architecture._import_paths()
    assert paths and all(os.path.realpath(path) != str(tmp_path) for path in paths)
    package = str(Path(nf4.__file__).parents[1])
    monkeypatch.chdir(package)
    assert architecture._import_paths() == sys.path
    monkeypatch.chdir(tmp_path / "link")
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert architecture._import_paths() == sys.path


def test_modules_decide_before_names():
    model = _model(embed_proj=None, linear="FalconLinear, not nn.Linear", out=None, lm_head=None)
    chosen = Rules(model=model)
    assert chosen.dense_reason(_info("embed_proj.weight")) is None
    assert chosen.dense_reason(_info("linear.weight")) == "FalconLinear, not nn.Linear"
    assert chosen.dense_reason(_info("out.weight")) == "dense by transformers' default"
    assert chosen.dense_reason(_info("lm_head.weight")) == "output head"
    only = Rules(model=model, only=("linear", "out"))
    assert only.dense_reason(_info("linear.weight")) == "FalconLinear, not nn.Linear"
    assert only.dense_reason(_info("out.weight")) is None


def test_the_skip_list_names_modules_of_the_model_and_what_no_file_holds():
    chosen = Rules(model=_model(a=None, b=None, embedding="Embedding, not nn.Linear"))
    dense = [_info("b.weight"), _info("embedding.weight")]
    entries = chosen.skip_modules(dense, ["a.weight"], ["ToyForCausalLM"])
    assert entries == ["model.b", "model.embedding", "tied"]


def test_dense_weights_that_transformers_would_take_for_4_bit():
    found = Survey(dense={name: _info(name) for name in ("a.weight", "b.weight", "out.weight")})
    model = _model(a=None, b=None, out=None)
    assert replaced_dense(model, found, None) == ["model.a", "model.b"]
    assert replaced_dense(model, found, ["model.a"]) == ["model.b", "model.out"]
    assert replaced_dense(model, found, ["model.a", "("]) == []
    assert replaced_dense(model, found, 3) == []


def test_tensors_beside_a_weight_show_that_it_is_no_linear_layer():
    shapes = {"head.attention.in_proj_weight": (24, 8), "t.bias": (4,), "u.bias": (8,)}
    chosen = Rules(shapes=shapes)
    reason = chosen.dense_reason(_info("head.attention.out_proj.weight"))
    assert reason == "nn.MultiheadAttention"
    assert chosen.dense_reason(_info("self.out_proj.weight")) is None
    assert "bias" in chosen.dense_reason(_info("t.weight"))
    assert chosen.dense_reason(_info("u.weight")) is None


@pytest.mark.parametrize("model_type", ["falcon", "ibert"])
def test_subclasses_of_linear_are_left_dense_by_model_type(model_type, tmp_path):
    source = helpers.write_model(tmp_path / "in", model_type=model_type)
    with pytest.raises(FormatError, match="nothing to quantize: .*tensor names"):
        quantize_checkpoint(str(source), str(tmp_path / "q"), QuantizeOptions())


def test_known_models_apply_to_their_parts(monkeypatch):
    monkeypatch.setitem(KNOWN, "part", Known(dense=("w*",), skip=("twin", "q")))
    types = model_types({"model_type": "whole", "list": [{"text": {"model_type": "part"}}]})
    assert types == {"whole", "part"}
    chosen = Rules(types)
    assert chosen.dense_reason(_info("w1.weight")) == "no layer that transformers replaces"
    assert chosen.skip_modules([_info("w1.weight")], ["q.weight"], []) == ["twin", "w1"]


def test_known_skip_entries_are_simple():
    assert all(is_simple(entry) for known in KNOWN.values() for entry in known.skip)


def test_a_deep_configuration_is_searched_without_recursion():
    config: dict = {"model_type": "inner"}
    for _ in range(100_000):
        config = {"part": [config]}
    assert model_types(config) == {"inner"}


def test_conv1d_that_the_rules_do_not_know_stays_dense():
    """dequantize could not tell that its weight is stored transposed."""
    model = Model("Toy", {"a.weight": None}, {"a.weight": "a"}, *map(frozenset, ["a", "a", ""]))
    assert Rules(model=model).dense_reason(_info("a.weight")) == "Conv1D of an unknown model"
    assert rules.is_transposed("h.0.c_attn.weight", {"vision-encoder-decoder", "gpt2"})
    assert rules.is_transposed("decoder.layers.0.mlp.c_fc.weight", {"clvp", "clvp_decoder"})
    assert not rules.is_transposed(
        "decoder.layers.0.attn.out_proj.weight", {"clvp", "clvp_decoder"}
    )
