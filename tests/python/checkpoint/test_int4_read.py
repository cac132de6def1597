"""Checkpoints of GPTQ, AWQ and compressed-tensors: inspect and dequantize."""

from __future__ import annotations

import json

import checkpoint_helpers as helpers
import int4_checkpoints as models
import int4_oracle as oracle
import ml_dtypes
import numpy as np
import pytest
from int4_checkpoints import CASES, LAYER, Case
from nf4.checkpoint import Checkpoint, dequantize_checkpoint, survey
from nf4.cli import main


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
    assert models.findings("fault", source) == []
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
        assert any("gptq is assumed" in warning for warning in models.findings("warning", path))


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
    assert models.findings("fault", source) == []
    with Checkpoint(source) as checkpoint:
        sizes = [w.describe()["group_size"] for w in survey(checkpoint).weights.values()]
    assert sizes == [32, 64]
    refused = models.write(tmp_path / "r", stored, config)
    assert any(
        "but the group size 32 of config.json gives 2" in f
        for f in models.findings("fault", refused)
    )


def test_a_dense_tensor_named_scales_stays_dense(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(helpers.file_bytes({"a.scales": helpers.random_weight((4,), "float16")}))
    with Checkpoint(path) as checkpoint:
        found = survey(checkpoint)
    assert list(found.dense) == ["a.scales"] and not found.faults
