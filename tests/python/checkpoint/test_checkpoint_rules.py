"""Which weights become 4-bit, and the skip list that transformers reads."""

from __future__ import annotations

import json
import re

import checkpoint_helpers as helpers
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.rules import Rules, matches
from nf4.checkpoint.skips import SkipMatcher, is_simple, skip_entries


def _info(name: str, shape: tuple[int, ...] = (8, 8), dtype: str = "F32") -> TensorInfo:
    return TensorInfo(name, dtype, shape, 0, 0)


QUANTIZED = [
    "encoder.layer.0.attention.self.query.weight",
    "encoder.layer.11.intermediate.dense.weight",
    "pooler.dense.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "transformer.h.0.attn.c_attn.weight",
    "model.decoder.layers.3.fc1.weight",
    "encoder.block.0.layer.1.DenseReluDense.wi_0.weight",
    "gpt_neox.layers.0.attention.query_key_value.weight",
]
DENSE = {
    "embeddings.word_embeddings.weight": "embedding",
    "embeddings.token_type_embeddings.weight": "embedding",
    "model.embed_tokens.weight": "embedding",
    "transformer.wte.weight": "embedding",
    "shared.weight": "embedding",
    "model.layers.0.q_norm.weight": "norm",
    "lm_head.weight": "output head",
    "cls.predictions.decoder.weight": "output head",
    "classifier.weight": "output head",
    "score.weight": "output head",
    "embed_out.weight": "embedding",
    "proj_out.weight": "output head",
    "model.layers.0.mlp.gate.weight": "router",
    "model.layers.0.block_sparse_moe.experts.0.w1.weight": "expert",
    "position_ids": "not a weight",
    "model.layers.0.self_attn.rotary_emb.inv_freq": "not a weight",
    "base.lora_A.weight": "LoRA",
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_linear_layers_become_4_bit(name):
    assert Rules().dense_reason(_info(name)) is None


@pytest.mark.parametrize("name", DENSE)
def test_other_matrices_stay_dense(name):
    assert DENSE[name] in Rules().dense_reason(_info(name))


@pytest.mark.parametrize("shape", [(8,), (8, 8, 8), (), (1, 2, 3, 4)])
def test_only_matrices_become_4_bit(shape):
    assert Rules().dense_reason(_info("layer.proj.weight", shape)) == f"{len(shape)}-D"


def test_dtype_and_size_matter():
    assert Rules().dense_reason(_info("layer.proj.weight", dtype="F64")) == "dtype F64"
    assert Rules().dense_reason(_info("layer.proj.weight", (0, 8))) == "empty"


def test_modules_that_transformers_keeps_in_float32():
    name = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    assert Rules(frozenset({"t5"})).dense_reason(_info(name)) == "kept in float32 by transformers"
    assert Rules(frozenset({"llama"})).dense_reason(_info(name)) is None


def test_skip_adds_and_only_replaces():
    rules = Rules(skip=("layers.1",), only=("mlp", "embed_tokens"))
    assert rules.dense_reason(_info("model.layers.1.mlp.up.weight")) == "--skip"
    assert rules.dense_reason(_info("model.layers.11.mlp.up.weight")) is None
    assert rules.dense_reason(_info("model.embed_tokens.weight")) is None
    assert rules.dense_reason(_info("model.layers.0.attn.q.weight")) == "not in --only"
    assert rules.unmatched(["model.layers.1.mlp.up"]) == ["embed_tokens"]


def test_patterns():
    assert matches("layers.1", "model.layers.1.mlp")
    assert not matches("layers.1", "model.layers.11.mlp")
    assert matches("*.mlp.*_proj", "model.layers.0.mlp.up_proj")
    assert not matches("mlp*", "model.layers.0.mlp.up_proj")


def _skipped(entry: str, modules: list[str]) -> list[str]:
    return sorted(set(SkipMatcher(modules).skipped(entry)))


def test_skip_entries_mean_what_transformers_means():
    """Its own three rules: a prefix up to a dot, a regular expression, a suffix."""
    modules = ["layer.1.attn", "layer.11.attn", "mlp.gate", "mlp.gate_proj", "decoder.fc1"]
    assert _skipped("layer.1", modules) == ["layer.1.attn"]
    assert _skipped("layer.*", modules) == ["layer.1.attn", "layer.11.attn"]
    assert _skipped("mlp.gate", modules) == ["mlp.gate"]
    assert _skipped("fc1", modules) == ["decoder.fc1"]
    assert _skipped("a(", modules) == []


def _skipped_one_by_one(entry: str, modules: list[str]) -> list[str]:
    """As should_convert_module of transformers does it."""
    pattern = re.compile(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))") if is_simple(entry) else None
    found = {m for m in modules if m.endswith(entry) or (pattern and pattern.match(m))}
    return sorted(found)


PIECES = ["a", "b", "ab", "1", "11", ".", "..", "_", ".*", "\\.", "$", "a.", "\\-", "-", "("]


@given(
    st.lists(st.text("ab1._-", max_size=8), max_size=8),
    st.lists(st.sampled_from(PIECES), max_size=5).map("".join),
)
def test_skip_matcher_is_the_naive_way(modules, entry):
    assert _skipped(entry, modules) == _skipped_one_by_one(entry, modules)


def _layers(count: int, parts: str) -> list[str]:
    return [f"model.layers.{i}.{part}_proj" for i in range(count) for part in parts.split()]


def test_skip_lists_take_near_linear_work():
    """Bisections for each entry do not grow with the number of modules."""
    per_entry = []
    for count in (30, 3000):
        quantized = _layers(count, "attn.q attn.k attn.v attn.o")
        entries = skip_entries(_layers(count, "mlp.gate mlp.up mlp.down mlp.x"), quantized)
        assert len(entries) == 4 * count
        matcher = SkipMatcher(quantized)
        assert not any(map(matcher.first, entries))
        per_entry.append(matcher.steps / len(entries))
    assert per_entry[1] < 2 * per_entry[0] and per_entry[1] < 20


@pytest.mark.parametrize("entry", ["." * 60 + "x", "model.*x"])
def test_hostile_skip_entries_take_bounded_work(entry):
    """An exhausted matcher judges entries as suffixes only."""
    matcher = SkipMatcher(_layers(1000, "q k"), max_steps=5000)
    for number in range(100):
        assert matcher.first(f"{entry}{number}") is None
    assert matcher.exhausted and matcher.steps < 6000
    assert matcher.first("layers.7.q_proj") == "model.layers.7.q_proj"
    assert matcher.first("model.layers.7") is None


def test_skip_list_names_what_is_dense_and_nothing_that_is_not():
    dense = [_info("model.embed_tokens.weight"), _info("norm.weight", (8,)), _info("head.weight")]
    dense += [_info(f"layers.0.experts.{n}.w1.weight") for n in range(3)]
    quantized = ["layers.0.q", "big_head"]
    weights = [f"{module}.weight" for module in quantized]
    entries = Rules().skip_modules(dense, weights, ["LlamaForCausalLM"])
    assert entries == ["head$", "layers.0.experts", "lm_head", "model.embed_tokens"]
    assert not any(_skipped(entry, quantized) for entry in entries)
    assert _skipped("head$", ["head"]) == ["head"]


def test_skip_list_leaves_a_stored_head_alone():
    entries = Rules().skip_modules([_info("lm_head.weight")], ["q.weight"], ["LlamaForCausalLM"])
    assert entries == ["lm_head"]
    assert Rules().skip_modules([], ["lm_head.weight"], ["LlamaForCausalLM"]) == []


def test_a_module_whose_name_is_no_pattern_gets_an_escaped_entry():
    assert skip_entries(["a(b"], ["c"]) == ["a\\(b$"]


def test_gpt2_layers_are_turned_round(tmp_path):
    """Conv1D holds [in, out]; the 4-bit layer is [out, in], and dequantize turns it back."""
    from nf4.checkpoint import QuantizeOptions, dequantize_checkpoint, quantize_checkpoint

    weight = helpers.random_weight((16, 48))
    tensors = {"h.0.attn.c_attn.weight": weight, "wte.weight": helpers.random_weight((5, 16))}
    source = helpers.write_model(tmp_path / "in", tensors, model_type="gpt2")
    quantize_checkpoint(str(source), str(tmp_path / "q"), QuantizeOptions())
    state = next(
        data
        for name, (_, _, data) in helpers.load_all(tmp_path / "q").items()
        if "quant_state" in name
    )
    assert json.loads(state)["shape"] == [48, 16]
    dequantize_checkpoint(str(tmp_path / "q"), str(tmp_path / "back"))
    dtype, shape, data = helpers.load_all(tmp_path / "back")["h.0.attn.c_attn.weight"]
    assert shape == (16, 48)
    back = np.frombuffer(data, np.float32).reshape(shape)
    assert np.abs(back - weight).max() < 0.5
