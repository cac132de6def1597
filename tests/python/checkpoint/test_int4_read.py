"""Checkpoints of GPTQ, AWQ and compressed-tensors: inspect, verify and dequantize."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_helpers as helpers
import int4_checkpoints as models
import int4_oracle as oracle
import ml_dtypes
import numpy as np
import pytest
from int4_checkpoints import CASES, LAYER, Case
from nf4.checkpoint import Checkpoint, FormatError, audit, dequantize_checkpoint, survey
from nf4.cli import main

Tensors = dict[str, np.ndarray]


def _faults(path: Path) -> list[str]:
    return [f.reason for f in audit(str(path))[1] if f.severity == "fault"]


def _warnings(path: Path) -> list[str]:
    return [f.reason for f in audit(str(path))[1] if f.severity == "warning"]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dequantize_gives_the_bits_of_the_oracle(case, shards, tmp_path):
    source = case.folder(tmp_path / "q", shards)
    assert main(["verify", str(source)]) == 0
    assert main(["dequantize", str(source), str(tmp_path / "dense")]) == 0
    found = helpers.load_all(tmp_path / "dense")
    for module, weight in case.weights().items():
        expected = oracle.dequantize(weight, case.scale_dtype)
        dtype = {"fp16": "F16", "bf16": "BF16"}[case.scale_dtype]
        assert found.pop(f"{module}.weight") == (dtype, expected.shape, expected.tobytes())
    before = helpers.load_all(source)
    assert found == {name: before[name] for name in ("lm_head.weight", "model.embed_tokens.weight")}
    assert "quantization_config" not in (tmp_path / "dense" / "config.json").read_text()


@pytest.mark.parametrize("name", oracle.golden())
def test_golden_tensors_are_read_with_the_bits_of_their_projects(name, tmp_path):
    golden = oracle.golden()[name]
    stored = {
        f"{LAYER}.{key}": array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array
        for key, array in golden.stored.items()
    }
    source = models.write(tmp_path / "q", stored, golden.quantization_config)
    assert _faults(source) == []
    with Checkpoint(source) as checkpoint:
        (weight,) = survey(checkpoint).weights.values()
        assert weight.shape == (golden.arrays.rows, golden.arrays.cols)
        assert weight.describe()["layout"] == golden.arrays.layout
        assert weight.dtype == golden.arrays.scale_dtype
    dequantize_checkpoint(str(source), str(tmp_path / "dense"))
    _, shape, data = helpers.load_all(tmp_path / "dense")[f"{LAYER}.weight"]
    assert shape == golden.expected.shape and data == golden.expected.tobytes()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_dequantize_to_a_dtype_and_by_that_of_the_model(dtype, tmp_path):
    case = Case("gptq_v2", symmetric=False)
    source = case.folder(tmp_path / "q")
    assert main(["dequantize", str(source), str(tmp_path / "d"), "--dtype", dtype]) == 0
    config = json.loads((source / "config.json").read_text())
    names = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    (source / "config.json").write_text(json.dumps({**config, "torch_dtype": names[dtype]}))
    assert main(["dequantize", str(source), str(tmp_path / "model")]) == 0
    weight = case.weights()[LAYER]
    for folder in ("d", "model"):
        data = helpers.load_all(tmp_path / folder)[f"{LAYER}.weight"][2]
        assert data == oracle.dequantize(weight, dtype).tobytes()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inspect_shows_the_settings(case, tmp_path, capsys):
    assert main(["inspect", "--json", str(case.folder(tmp_path / "q"))]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}
    row = rows[f"{LAYER}.weight"]
    assert row["format"] == "int4" and row["layout"] == case.layout
    assert row["group_size"] == case.group_size and row["shape"] == list(case.shapes[0])
    assert row["scales_dtype"] == case.scale_dtype
    assert row["bytes"] == sum(a.nbytes for a in models.tensors(case.weights()[LAYER]).values())
    assert rows["lm_head.weight"]["format"] == "dense"
    assert main(["inspect", str(tmp_path / "q")]) == 0
    assert f"{case.layout} ({case.scale_dtype})" in capsys.readouterr().out


def test_inspect_compares_with_the_dense_model(tmp_path, capsys):
    case = CASES[0]
    source = case.folder(tmp_path / "q")
    dequantize_checkpoint(str(source), str(tmp_path / "dense"), dtype="fp32")
    arguments = ["inspect", "--json", str(source), "--dense", str(tmp_path / "dense")]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["totals"]["max_abs_error"] == 0


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
    assert any(phrase in reason for reason in _faults(source))
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
        "g_idx[3] is 2, and its groups are 0 to 1",
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
    "awq: g_idx": (AWQ, _add("g_idx", np.zeros(64, np.int32)), "it has g_idx, which awq has not"),
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
    assert any(phrase in reason for reason in _faults(source))
    assert main(["verify", str(source)]) == 1
    capsys.readouterr()
    assert main(["dequantize", str(source), str(tmp_path / "out")]) == 3
    stderr = capsys.readouterr().err
    assert phrase in stderr and f"{LAYER}.weight" in stderr and stderr.count("\n") == 1
    assert helpers.listing(tmp_path) == ["q"]


def _with_scale(case: Case, value: float) -> Tensors:
    stored = models.tensors(case.weights()[LAYER])
    name = f"{LAYER}.{models.names(case.layout)['scales']}"
    scales = stored[name].copy()
    scales[1, 1] = value
    return stored | {name: scales}


@pytest.mark.parametrize(
    ("value", "severity", "phrase"),
    [
        (np.nan, "fault", "scales: 1 of 32 are NaN"),
        (np.inf, "fault", "scales: 1 of 32 are infinite"),
        (0.0, "warning", "scales: 1 of 32 are 0"),
        (-1.0, "warning", "scales: 1 of 32 are negative"),
    ],
)
@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_verify_judges_scales(layout, value, severity, phrase, tmp_path):
    source = models.write(tmp_path / "q", _with_scale(Case(layout), value), Case(layout).config)
    (finding,) = audit(str(source))[1]
    assert finding.severity == severity and finding.tensor == f"{LAYER}.weight"
    assert finding.reason.startswith(phrase)


def test_verify_warns_where_zero_points_cannot_tell_gptq_from_gptq_v2(tmp_path):
    for layout in ("gptq", "gptq_v2"):
        source = Case(layout, symmetric=False).folder(tmp_path / layout)
        assert _faults(source) == []
        warning = _warnings(source)[0]
        assert "cannot tell gptq from gptq_v2" in warning and layout in warning
    assert _warnings(Case("gptq").folder(tmp_path / "symmetric")) == []


def test_verify_suspects_the_other_version_where_config_does_not_say_symmetric(tmp_path):
    case = Case("gptq_v2")
    stored = models.tensors(case.weights()[LAYER])
    config = {**case.config, "checkpoint_format": "gptq", "sym": False}
    source = models.write(tmp_path / "q", stored, config)
    assert any("look like those of a symmetric weight in gptq_v2" in w for w in _warnings(source))


def test_verify_warns_of_zero_points_that_programs_read_differently(tmp_path):
    for layout, expected in (("gptq", True), ("gptq_v2", False)):
        source = Case(layout, symmetric=False).folder(tmp_path / layout)
        found = [w for w in _warnings(source) if "zero points are 0, which borrow" in w]
        assert bool(found) == expected


def test_verify_warns_of_a_g_idx_that_config_denies(tmp_path):
    source = GPTQ_ACT.folder(tmp_path / "q", desc_act=False)
    assert _faults(source) == []
    assert any("no act order" in warning for warning in _warnings(source))


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_verify_compares_the_configuration_with_the_weights(layout, tmp_path):
    case = Case(layout)
    stored = models.tensors(case.weights()[LAYER])
    missing = models.write(tmp_path / "missing", stored, None)
    assert "it has 4-bit weights, but no quantization_config" in _faults(missing)
    dense = models.write(tmp_path / "dense", helpers.dense_tensors("float16"), case.config)
    assert _faults(dense) == ["it has a quantization_config, but no 4-bit weights"]
    if layout in ("awq", "compressed-tensors"):
        key = "modules_to_not_convert" if layout == "awq" else "ignore"
        listed = models.write(tmp_path / "listed", stored, case.config | {key: [LAYER]})
        assert _faults(listed) == [f"{key} has '{LAYER}', which leaves the 4-bit {LAYER} dense"]


def test_verify_warns_of_dense_layers_that_compressed_tensors_would_compress(tmp_path):
    """Unless a pattern may name them, which is not run."""
    case = Case("compressed-tensors")
    stored = models.tensors(case.weights()[LAYER])
    stored["model.layers.0.gate.weight"] = helpers.random_weight((4, 64), "float16")
    lacking = ["ignore lacks lm_head, whose weight is dense"]
    lacking.append("ignore lacks model.layers.0.gate, whose weight is dense")
    for number, (ignore, warnings) in enumerate(
        [
            ([], lacking),
            (["lm_head"], lacking[1:]),
            (["lm_head", "model.layers.0.gate"], []),
            (["re:.*gate", "lm_head"], []),
        ]
    ):
        source = models.write(tmp_path / f"{number}", stored, case.config | {"ignore": ignore})
        assert _warnings(source) == warnings and _faults(source) == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_single_files_are_read_by_names_and_shapes(case, tmp_path):
    """No config.json: gptq is taken for gptq_v2, which the names do not tell."""
    stored = models.tensors(case.weights()[LAYER])
    path = tmp_path / "a.safetensors"
    path.write_bytes(helpers.file_bytes(stored))
    with Checkpoint(path) as checkpoint:
        (weight,) = survey(checkpoint).weights.values()
    assert weight.shape == case.shapes[0] and weight.name == f"{LAYER}.weight"
    expected = "gptq" if case.layout == "gptq_v2" else case.layout
    assert weight.describe()["layout"] == expected
    if expected == "gptq":
        assert any("gptq is assumed" in warning for warning in _warnings(path))


def test_weights_of_bitsandbytes_beside_integers_are_a_fault(tmp_path):
    assert main(["quantize", str(helpers.write_model(tmp_path / "m")), str(tmp_path / "q")]) == 0
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"] = Case("gptq").config
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    assert "the model is quantized by 'gptq', but 2 weights are not" in _faults(tmp_path / "q")


def test_gptq_exceptions_may_have_other_group_sizes(tmp_path):
    """GPTQModel's `dynamic`: the scales tell which of the group sizes a weight has."""
    weights = {
        f"model.layers.{n}.q_proj": Case("gptq", size).weights()[LAYER]
        for n, size in enumerate((32, 64))
    }
    stored = {n: a for module, w in weights.items() for n, a in models.tensors(w, module).items()}
    config = Case("gptq").config
    source = models.write(
        tmp_path / "q", stored, config | {"dynamic": {".*1.*": {"group_size": 64}, "-:x": {}}}
    )
    assert _faults(source) == []
    with Checkpoint(source) as checkpoint:
        sizes = [w.describe()["group_size"] for w in survey(checkpoint).weights.values()]
    assert sizes == [32, 64]
    refused = models.write(tmp_path / "r", stored, config)
    assert any("but the group size 32 of config.json gives 2" in f for f in _faults(refused))


def test_a_dense_tensor_named_scales_stays_dense(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(helpers.file_bytes({"a.scales": helpers.random_weight((4,), "float16")}))
    with Checkpoint(path) as checkpoint:
        found = survey(checkpoint)
    assert list(found.dense) == ["a.scales"] and not found.faults


def test_load_refuses_what_verify_calls_a_fault(tmp_path):
    stored = models.tensors(GPTQ.weights()[LAYER])
    stored[f"{LAYER}.g_idx"] = np.full(64, 7, np.int32)
    source = models.write(tmp_path / "q", stored, GPTQ.config)
    with Checkpoint(source) as checkpoint:
        (weight,) = survey(checkpoint).weights.values()
        with pytest.raises(FormatError, match=re.escape("g_idx[0] is 7")):
            weight.load(checkpoint)
