"""Checkpoints of AutoRound: packings of GPTQ and AWQ are read, others are refused by name."""

from __future__ import annotations

from typing import Any

import checkpoint_helpers as helpers
import int4_checkpoints as models
import int4_oracle as oracle
import pytest
from int4_checkpoints import LAYER, Case
from nf4.cli import main

GPTQ, AWQ = Case("gptq", symmetric=False), Case("awq", symmetric=False)


def config(case: Case, **more: Any) -> dict[str, Any]:
    """Returns what AutoRound writes."""
    return {
        "autoround_version": "0.8.0",
        "bits": 4,
        "block_name_to_quantize": "model.layers",
        "data_type": "int",
        "group_size": case.group_size,
        "iters": 200,
        "packing_format": f"auto_round:auto_{case.layout}",
        "quant_method": "auto-round",
        "sym": case.symmetric,
        **more,
    }


# Case, what differs from its usual config; None: the key is absent.
READ: dict[str, tuple[Case, dict[str, Any]]] = {
    "gptq": (GPTQ, {}),
    "gptq, symmetric": (Case("gptq"), {}),
    "awq": (AWQ, {}),
    "awq, symmetric": (Case("awq"), {}),
    "gptq, by another name": (GPTQ, {"packing_format": "auto_round:gptq"}),
    "awq, by another name": (AWQ, {"packing_format": "auto_round:awq"}),
    "no packing": (GPTQ, {"packing_format": None, "backend": "auto"}),
    "an older backend": (GPTQ, {"packing_format": None, "backend": "auto_round:gptq:exllamav2"}),
    "an older method": (GPTQ, {"quant_method": "intel/auto-round"}),
    "blocks by a list": (GPTQ, {"block_name_to_quantize": ["model.layers", "visual.blocks"]}),
    "activations in 16 bits": (GPTQ, {"act_bits": 16, "act_data_type": "float"}),
    "layers left dense": (
        GPTQ, {"extra_config": {"lm_head": {"bits": 16}, ".*gate.*": {"bits": 16}}}
    ),
}  # fmt: skip


def said(case: Case, more: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config(case, **more).items() if value is not None}


@pytest.mark.parametrize("name", READ)
def test_packings_of_gptq_and_awq_are_read(name, tmp_path, capsys):
    case, more = READ[name]
    source = models.write(tmp_path / "q", tensors(case), said(case, more))
    assert main(["verify", str(source)]) == 0
    assert main(["dequantize", str(source), str(tmp_path / "dense")]) == 0
    found = helpers.load_all(tmp_path / "dense")
    for module, weight in case.weights().items():
        expected = oracle.dequantize(weight, case.scale_dtype)
        assert found[f"{module}.weight"][2] == expected.tobytes()


def tensors(case: Case):
    return {
        name: array
        for module, weight in case.weights().items()
        for name, array in models.tensors(weight, module).items()
    }


@pytest.mark.parametrize("case", [GPTQ, AWQ], ids=str)
def test_convert_writes_the_config_of_the_layout(case, tmp_path):
    source = models.write(tmp_path / "q", tensors(case), config(case))
    for to in ("gptq", "awq", "compressed-tensors"):
        assert main(["convert", str(source), str(tmp_path / to), "--to", to]) == 0
        written = helpers.stored_config(tmp_path / to)
        assert written["quant_method"] == to and "packing_format" not in written
        assert main(["verify", str(tmp_path / to)]) == 0
        assert main(["dequantize", str(tmp_path / to), str(tmp_path / f"{to}-dense")]) == 0
        found = helpers.load_all(tmp_path / f"{to}-dense")
        weight = case.weights()[LAYER]
        assert found[f"{LAYER}.weight"][2] == oracle.dequantize(weight, "fp16").tobytes()


def test_other_group_sizes_of_layers(tmp_path):
    case = Case("gptq", 64, symmetric=False)
    other = "model.layers.7.mlp.up_proj"
    stored = models.tensors(GPTQ.weights()[LAYER]) | models.tensors(case.weights()[LAYER], other)
    without = models.write(tmp_path / "without", stored, config(GPTQ))
    assert any("the group size 32 of config.json" in f for f in models.findings("fault", without))
    extra = {"extra_config": {other: {"group_size": 64}}}
    source = models.write(tmp_path / "q", stored, config(GPTQ) | extra)
    assert models.findings("fault", source) == []
    assert main(["dequantize", str(source), str(tmp_path / "dense")]) == 0
    found = helpers.load_all(tmp_path / "dense")
    assert found[f"{other}.weight"][2] == oracle.dequantize(case.weights()[LAYER], "fp16").tobytes()


def test_a_layer_that_is_said_to_be_dense(tmp_path):
    extra = {"extra_config": {LAYER: {"bits": 16}}}
    source = models.write(tmp_path / "q", tensors(GPTQ), config(GPTQ) | extra)
    assert models.findings("fault", source) == [
        f"extra_config has '{LAYER}', which leaves the 4-bit {LAYER} dense"
    ]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "packing of others": (
        {"packing_format": "auto_round:llm_compressor"},
        "packing_format 'auto_round:llm_compressor' is not read; auto_round:gptq, ",
    ),
    "packing with other zero points": (
        {"packing_format": "auto_round:gptqmodel"}, "packing_format 'auto_round:gptqmodel' is not"
    ),
    "an older packing of its own": (
        {"packing_format": None, "backend": "auto_round:exllamav2"},
        "backend 'auto_round:exllamav2' is not read",
    ),
    "other bits": ({"bits": 2}, "bits is 2; weights of 4 bits are read"),
    "other bits of a layer": (
        {"extra_config": {"a": {"bits": 8}}}, "extra_config 'a': bits is 8; weights of 4 bits"
    ),
    "floats": ({"data_type": "mx_fp"}, "data_type 'mx_fp' is not read; int is"),
    "floats of a layer": (
        {"extra_config": {"a": {"data_type": "nv_fp"}}}, "extra_config 'a': data_type 'nv_fp'"
    ),
    "activations": ({"act_bits": 8}, "act_bits is 8; quantized activations are not read"),
    "no object": ({"extra_config": ["a"]}, "extra_config is not an object"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_named(name, tmp_path, capsys):
    more, sentence = REFUSED[name]
    source = models.write(tmp_path / "q", tensors(GPTQ), said(GPTQ, more))
    assert any(sentence in fault for fault in models.findings("fault", source))
    for command in (["dequantize"], ["quantize"], ["convert", "--to", "awq"]):
        assert main([command[0], str(source), str(tmp_path / "out"), *command[1:]]) == 3
        stderr = capsys.readouterr().err
        assert f"by 'auto-round': {sentence}" in stderr and stderr.count("\n") == 1
    assert helpers.listing(tmp_path) == ["q"]
