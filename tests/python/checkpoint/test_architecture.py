"""Asking transformers which weights it loads in 4 bits, and rules by name where it cannot be."""

from __future__ import annotations

import checkpoint_helpers as helpers
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
    ({}, "does not name one architecture"),
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


def test_modules_decide_before_names():
    model = _model(embed_proj=None, linear="FalconLinear, not replaced", out=None, lm_head=None)
    chosen = Rules(model=model)
    assert chosen.dense_reason(_info("embed_proj.weight")) is None
    assert chosen.dense_reason(_info("linear.weight")) == "FalconLinear, not replaced"
    assert chosen.dense_reason(_info("out.weight")) == "dense by transformers' default"
    assert chosen.dense_reason(_info("lm_head.weight")) == "output head"
    only = Rules(model=model, only=("linear", "out"))
    assert only.dense_reason(_info("linear.weight")) == "FalconLinear, not replaced"
    assert only.dense_reason(_info("out.weight")) is None


def test_the_skip_list_names_modules_of_the_model_and_what_no_file_holds():
    chosen = Rules(model=_model(a=None, b=None, embedding="Embedding, not replaced"))
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
