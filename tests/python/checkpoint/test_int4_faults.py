"""Faults of integer checkpoints: refused or named by every command, without output."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import checkpoint_helpers as helpers
import int4_checkpoints as models
import numpy as np
import pytest
from int4_checkpoints import LAYER, Case
from nf4.checkpoint import Checkpoint, FormatError, survey
from nf4.cli import main

Tensors = dict[str, np.ndarray]


def _without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


def _group(config: dict[str, Any], **weights: Any) -> dict[str, Any]:
    group = config["config_groups"]["group_0"]
    changed = {**group, "weights": group["weights"] | weights}
    return {**config, "config_groups": {"group_0": changed}}


# Layout, what config.json has instead, what is said of it.
REFUSED: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "gptq: 8 bits": ("gptq", lambda c: c | {"bits": 8}, "bits is 8; weights of 4 bits are read"),
    "gptq: bits as text": ("gptq", lambda c: c | {"bits": "4"}, "bits is '4'"),
    "gptq: no bits": ("gptq", lambda c: _without(c, "bits"), "bits is None"),
    "gptq: marlin": (
        "gptq",
        lambda c: c | {"checkpoint_format": "marlin"},
        "checkpoint_format 'marlin' is not read; gptq and gptq_v2 are",
    ),
    "gptq: is_marlin_format": ("gptq", lambda c: c | {"is_marlin_format": True}, "'marlin'"),
    "gptq: group size 0": ("gptq", lambda c: c | {"group_size": 0}, "group_size is 0"),
    "gptq: group size true": ("gptq", lambda c: c | {"group_size": True}, "group_size is True"),
    "gptq: sym as text": ("gptq", lambda c: c | {"sym": "yes"}, "sym is 'yes'"),
    "gptq: pack_dtype": ("gptq", lambda c: c | {"pack_dtype": "int64"}, "pack_dtype 'int64'"),
    "gptq: dynamic bits": (
        "gptq",
        lambda c: c | {"dynamic": {"+:.*down.*": {"bits": 8}}},
        "dynamic '+:.*down.*': bits is 8",
    ),
    "gptq: dynamic no object": ("gptq", lambda c: c | {"dynamic": []}, "dynamic is not an object"),
    "awq: gemv": ("awq", lambda c: c | {"version": "gemv"}, "version 'gemv' of AWQ is not read"),
    "awq: marlin": ("awq", lambda c: c | {"version": "marlin"}, "version 'marlin'"),
    "awq: 3 bits": ("awq", lambda c: c | {"bits": 3}, "bits is 3"),
    "awq: modules": (
        "awq",
        lambda c: c | {"modules_to_not_convert": "lm_head"},
        "modules_to_not_convert is not a list",
    ),
    "compressed-tensors: format": (
        "compressed-tensors",
        lambda c: c | {"format": "marlin-24"},
        "format 'marlin-24' is not read; pack-quantized is",
    ),
    "compressed-tensors: 8 bits": (
        "compressed-tensors",
        lambda c: _group(c, num_bits=8),
        "config_groups 'group_0': num_bits is 8",
    ),
    "compressed-tensors: float": (
        "compressed-tensors",
        lambda c: _group(c, type="float"),
        "type 'float'",
    ),
    "compressed-tensors: tensor": (
        "compressed-tensors",
        lambda c: _group(c, strategy="tensor"),
        "strategy 'tensor' is not read; group and channel are",
    ),
    "compressed-tensors: activations": (
        "compressed-tensors",
        lambda c: (
            c
            | {
                "config_groups": {
                    "a": c["config_groups"]["group_0"] | {"input_activations": {"x": 1}}
                }
            }
        ),
        "config_groups 'a': quantized activations are not read",
    ),
    "compressed-tensors: no groups": (
        "compressed-tensors",
        lambda c: c | {"config_groups": {}},
        "config_groups is empty",
    ),
    "compressed-tensors: preset": (
        "compressed-tensors",
        lambda c: c | {"config_groups": {"W4A16": ["Linear"]}},
        "config_groups 'W4A16' is not an object",
    ),
    "compressed-tensors: transform": (
        "compressed-tensors",
        lambda c: c | {"transform_config": {"config_groups": {}}},
        "transform_config, which is not read",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(name, tmp_path, capsys):
    layout, change, phrase = REFUSED[name]
    case = Case(layout)
    source = case.folder(tmp_path / "q")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = change(config["quantization_config"])
    (source / "config.json").write_text(json.dumps(config))
    assert any(phrase in reason for reason in models.findings("fault", source))
    for command in (["inspect"], ["dequantize", str(tmp_path / "out")]):
        assert main([command[0], str(source), *command[1:]]) == 3
        stderr = capsys.readouterr().err
        assert stderr.startswith(f"nf4: {source}/config.json: ") and phrase in stderr
    assert helpers.listing(tmp_path) == ["q"]


def _set(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{LAYER}.{name}"] = make(tensors[f"{LAYER}.{name}"])

    return change


def _drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(f"{LAYER}.{name}")


def _at(index: int, value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[index] = value
        return array

    return change


def _add(name: str, array: np.ndarray) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{LAYER}.{name}": array})


GPTQ, GPTQ_ACT, AWQ = Case("gptq"), Case("gptq", act_order=True), Case("awq", symmetric=False)
COMPRESSED, ASYMMETRIC = Case("compressed-tensors"), Case("compressed-tensors", symmetric=False)
_INT32 = np.zeros((2, 2), np.int32)
# Case, what is done to the tensors of a weight, what is said of it.
BROKEN: dict[str, tuple[Case, Callable[[Tensors], None], str]] = {
    "no scales": (GPTQ, _drop("scales"), "its scales is missing"),
    "no qzeros": (GPTQ, _drop("qzeros"), "its qzeros is missing"),
    "no qweight": (GPTQ, _drop("qweight"), "it has qzeros, but no qweight"),
    "scales of float32": (
        GPTQ,
        _set("scales", lambda a: a.astype(np.float32)),
        "its scales is F32; expected F16 or BF16",
    ),
    "qweight of int64": (
        GPTQ,
        _set("qweight", lambda a: a.astype(np.int64)),
        "its qweight is I64; expected I32",
    ),
    "g_idx of int64": (GPTQ, _set("g_idx", lambda a: a.astype(np.int64)), "its g_idx is I64"),
    "flat qweight": (GPTQ, _set("qweight", np.ravel), "its qweight has 1 dimensions, not 2"),
    "scales transposed": (GPTQ, _set("scales", np.transpose), "its scales have 16 groups"),
    "a row of scales": (GPTQ, _set("scales", lambda a: a[:1]), "its scales have 1 groups, but"),
    "a column of scales": (GPTQ, _set("scales", lambda a: a[:, :8]), "its scales has shape [2, 8]"),
    "a column of qzeros": (GPTQ, _set("qzeros", lambda a: a[:, :1]), "its qzeros has shape [2, 1]"),
    "columns not of whole groups": (
        GPTQ,
        _set("qweight", lambda a: a[:7]),
        "the group size 32 of config.json does not divide its 56 columns",
    ),
    "empty": (GPTQ, _set("qweight", lambda a: a[:0]), "its shape [16, 0] is empty"),
    "g_idx too short": (GPTQ, _set("g_idx", lambda a: a[:60]), "its g_idx has shape [60]"),
    "g_idx too large": (
        GPTQ_ACT,
        _set("g_idx", _at(3, 2)),
        "g_idx[3] is 2, but its groups are 0 to 1",
    ),
    "g_idx negative": (GPTQ_ACT, _set("g_idx", _at(5, -1)), "g_idx[5] is -1"),
    "g_idx not of whole groups": (
        GPTQ,
        _set("g_idx", _at(0, 1)),
        "g_idx: group 0 has 31 columns, not 32",
    ),
    "a zero point that is not 8": (
        GPTQ,
        _set("qzeros", lambda a: a ^ 1),
        "config.json says symmetric, but 4 of 32 zero points are not 8",
    ),
    "zeros of gptq_v2": (
        GPTQ,
        _set("qzeros", lambda a: a + 0x11111111),
        "its zero points are those of gptq_v2: checkpoint_format should be gptq_v2",
    ),
    "zeros of gptq": (
        Case("gptq_v2"),
        _set("qzeros", lambda a: (a.view(np.uint32) - 0x11111111).view(np.int32)),
        "its zero points are those of gptq: checkpoint_format should be gptq",
    ),
    "dense too": (
        GPTQ,
        _add("weight", helpers.random_weight((16, 64), "float16")),
        "it is there as a dense weight too",
    ),
    "another layout": (
        GPTQ,
        _add("weight_packed", _INT32),
        "it has weight_packed, but config.json says gptq",
    ),
    "awq: g_idx": (
        AWQ,
        _add("g_idx", np.zeros(64, np.int32)),
        "it has g_idx, which awq does not support",
    ),
    "awq: no qzeros": (AWQ, _drop("qzeros"), "its qzeros is missing"),
    "awq: qweight of gptq": (AWQ, _set("qweight", lambda a: a.reshape(8, 16)), "the group size 32"),
    "no weight_shape": (COMPRESSED, _drop("weight_shape"), "its weight_shape is missing"),
    "no weight_scale": (COMPRESSED, _drop("weight_scale"), "its weight_scale is missing"),
    "no weight_packed": (COMPRESSED, _drop("weight_packed"), "but no weight_packed"),
    "weight_shape of 3": (
        COMPRESSED,
        _set("weight_shape", lambda a: np.append(a, 1)),
        "its weight_shape is I64 of shape [3]",
    ),
    "weight_shape of floats": (
        COMPRESSED,
        _set("weight_shape", lambda a: a.astype(np.float32)),
        "its weight_shape is F32",
    ),
    "weight_shape negative": (COMPRESSED, _set("weight_shape", np.negative), "[-16, -64]"),
    "weight_shape that overflows": (
        COMPRESSED,
        _set("weight_shape", lambda a: a * 2**31),
        "its weight_shape is [",
    ),
    "weight_shape of other columns": (
        COMPRESSED,
        _set("weight_shape", lambda a: a + [0, 32]),
        "its scales have 2 groups, but the group size 32 of config.json gives 3",
    ),
    "weight_shape of other rows": (
        COMPRESSED,
        _set("weight_shape", lambda a: a + [1, 0]),
        "its weight_packed has shape [16, 8]",
    ),
    "a zero point of a symmetric weight": (
        COMPRESSED,
        _add("weight_zero_point", np.zeros((2, 2), np.int32)),
        "it has a weight_zero_point, but config.json says symmetric",
    ),
    "no zero point of an asymmetric weight": (
        ASYMMETRIC,
        _drop("weight_zero_point"),
        "its weight_zero_point is missing, and config.json says asymmetric",
    ),
    "an unpacked zero point": (
        ASYMMETRIC,
        _add("weight_zero_point", np.zeros((16, 2), np.uint8)),
        "its weight_zero_point is U8; expected I32",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_weights_are_named_and_leave_no_output(name, tmp_path, capsys):
    case, change, phrase = BROKEN[name]
    stored = models.tensors(case.weights()[LAYER])
    change(stored)
    source = models.write(tmp_path / "q", stored, case.config)
    assert any(phrase in reason for reason in models.findings("fault", source))
    assert main(["verify", str(source)]) == 1
    capsys.readouterr()
    assert main(["dequantize", str(source), str(tmp_path / "out")]) == 3
    stderr = capsys.readouterr().err
    assert phrase in stderr and f"{LAYER}.weight" in stderr and stderr.count("\n") == 1
    assert helpers.listing(tmp_path) == ["q"]


def test_weights_of_bitsandbytes_beside_integers_are_a_fault(tmp_path):
    assert main(["quantize", str(helpers.write_model(tmp_path / "m")), str(tmp_path / "q")]) == 0
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"] = Case("gptq").config
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    assert "the model is quantized by 'gptq', but 2 weights are not" in models.findings(
        "fault", tmp_path / "q"
    )


def test_load_refuses_what_verify_calls_a_fault(tmp_path):
    stored = models.tensors(GPTQ.weights()[LAYER])
    stored[f"{LAYER}.g_idx"] = np.full(64, 7, np.int32)
    source = models.write(tmp_path / "q", stored, GPTQ.config)
    with Checkpoint(source) as checkpoint:
        (weight,) = survey(checkpoint).weights.values()
        with pytest.raises(FormatError, match=re.escape("g_idx[0] is 7")):
            weight.load(checkpoint)
