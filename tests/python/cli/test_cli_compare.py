"""nf4 compare, the weights. pytorch/test_compare.py has the logits."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoint_helpers as helpers
import int4_checkpoints
import numpy as np
import pytest
from nf4.checkpoint import convert_checkpoint, dequantize_checkpoint
from nf4.cli import main

SECOND = "model.layers.1.proj.weight"


def compare(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert main(["compare", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 3) -> str:
    assert main(["compare", *map(str, arguments)]) == code
    output = capsys.readouterr()
    assert not output.out
    return output.err


def changed(folder: Path, name: str, array: np.ndarray, **config: str) -> Path:
    return helpers.write_model(folder, {**helpers.dense_tensors(), name: array}, **config)


def test_identical_checkpoints_have_no_error(model, quantized, capsys):
    dense = compare(capsys, model, model)
    assert dense["tensors"] == [] and dense["worst_layer"] is None
    assert dense["relative_square_error"] == 0 and dense["equal_dense_tensors"] == 6
    same = compare(capsys, quantized, quantized)
    assert [each["relative_square_error"] for each in same["tensors"]] == [0, 0]
    assert same["equal_dense_tensors"] == 4 and same["logits"] is None


def test_error_is_the_one_of_inspect(model, quantized, capsys):
    document = compare(capsys, model, quantized)
    assert main(["inspect", str(quantized), "--dense", str(model), "--json"]) == 0
    inspected = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in inspected["tensors"]}
    assert {each["name"] for each in document["tensors"]} == set(helpers.QUANTIZED)
    for each in document["tensors"]:
        rms = rows[each["name"]]["rms_relative_error"]
        assert each["relative_square_error"] == pytest.approx(rms * rms, rel=1e-12)
        assert each["max_abs_error"] == rows[each["name"]]["max_abs_error"]
        assert each["formats"] == ["dense", "nf4"]
    total = inspected["totals"]["rms_relative_error"]
    assert document["relative_square_error"] == pytest.approx(total * total, rel=1e-12)


def test_planted_error_is_the_worst(model, quantized, tmp_path, capsys):
    weight = helpers.dense_tensors()[SECOND]
    planted = changed(tmp_path / "planted", SECOND, weight * np.float32(1.5))
    document = compare(capsys, planted, quantized)
    assert document["worst_layer"] == "model.layers.1"
    assert document["layers"][1]["worst_tensor"] == SECOND
    assert document["layers"][1]["relative_square_error"] == pytest.approx(1 / 9, rel=0.1)
    # A dense tensor that changed is shown too.
    norm = helpers.dense_tensors()["model.norm.weight"] + np.float32(1)
    document = compare(capsys, model, changed(tmp_path / "norm", "model.norm.weight", norm))
    assert [each["name"] for each in document["tensors"]] == ["model.norm.weight"]
    assert document["tensors"][0]["max_abs_error"] == pytest.approx(1, rel=1e-6)


def test_nan_is_the_worst(model, tmp_path, capsys):
    weight = helpers.dense_tensors()[SECOND]
    weight[0, 0] = np.nan
    document = compare(capsys, model, changed(tmp_path / "nan", SECOND, weight))
    assert document["worst_layer"] == "model.layers.1"
    assert document["relative_square_error"] is None


def test_reference_may_be_quantized(model, quantized, tmp_path, capsys):
    document = compare(capsys, quantized, model)
    assert [each["formats"] for each in document["tensors"]] == [["nf4", "dense"]] * 2
    dense = tmp_path / "dense"
    dequantize_checkpoint(str(quantized), str(dense))
    assert compare(capsys, quantized, dense)["relative_square_error"] == 0
    assert compare(capsys, dense, quantized)["relative_square_error"] == 0


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
def test_every_layout_of_integers(layout, tmp_path, capsys):
    case = int4_checkpoints.CASES[0]
    source, other = case.folder(tmp_path / "source"), tmp_path / "other"
    if layout == case.layout:
        other = source
    else:
        convert_checkpoint(str(source), str(other), layout)
    dense = tmp_path / "dense"
    dequantize_checkpoint(str(source), str(dense), dtype="fp32")
    for first, second in ((source, other), (dense, other), (other, dense)):
        document = compare(capsys, first, second)
        assert document["tensors"] and document["relative_square_error"] == 0
        assert document["only_in_reference"] == document["only_in_other"] == []


def test_report_and_plot(model, quantized, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.png"
    assert main(["compare", str(model), str(quantized), "--plot", str(plot)]) == 0
    output = capsys.readouterr().out
    assert "worst layer model.layers" in output and "equal    4 dense tensors" in output
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(["compare", str(model), str(model)]) == 0
    assert capsys.readouterr().out == "equal    6 dense tensors\n"


def test_tensor_of_one_checkpoint_is_named(model, tmp_path, capsys):
    tensors = helpers.dense_tensors()
    del tensors["lm_head.weight"]
    other = helpers.write_model(tmp_path / "tied", tensors)
    assert main(["compare", str(model), str(other)]) == 0
    output = capsys.readouterr()
    assert f"not compared, only in {model}: lm_head.weight" in output.err
    assert compare(capsys, other, model)["only_in_other"] == ["lm_head.weight"]


def test_checkpoints_of_two_models_are_refused(model, tmp_path, capsys):
    other = helpers.write_model(tmp_path / "other", model_type="mistral")
    assert "its model_type is 'mistral', and that of" in refused(capsys, model, other)
    narrow = changed(tmp_path / "narrow", SECOND, np.zeros((7, 10), np.float32))
    error = refused(capsys, model, narrow)
    assert SECOND in error and "its shape is [7, 10], but [7, 11] in" in error
    strange = helpers.write_model(tmp_path / "strange", {"a": np.zeros(3, np.float32)})
    assert "it has no tensor that" in refused(capsys, model, strange)
    refused(capsys, model, tmp_path / "missing", code=4)


def test_bad_files_are_named_first(model, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_bytes(b"caf\xe9 au lait")
    error = refused(capsys, model, model, "--text", text)
    assert "it is not UTF-8 text, from byte 3 on" in error
    refused(capsys, model, model, "--text", tmp_path / "missing", code=4)
    error = refused(capsys, model, model, "--plot", tmp_path / "plot.safetensors", code=2)
    assert "expected a name that ends with .png" in error
    pytest.importorskip("matplotlib")
    error = refused(capsys, model, model, "--plot", tmp_path / "no" / "plot.png", code=2)
    assert "is not a directory" in error
