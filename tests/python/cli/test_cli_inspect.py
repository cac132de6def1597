"""nf4 inspect: what it reports, and the errors that it measures."""

from __future__ import annotations

import checkpoint_helpers as helpers
import nf4
import numpy as np
import pytest
from nf4.checkpoint.difference import relative
from nf4.cli import console, main


def test_inspect_describes_every_tensor(quantized, capsys):
    document = helpers.report(capsys, "inspect", quantized)
    rows = {row["name"]: row for row in document["tensors"]}
    assert rows.keys() == helpers.dense_tensors().keys()
    assert rows["model.layers.0.proj.weight"] == {
        "name": "model.layers.0.proj.weight",
        "format": "nf4",
        "shape": [24, 32],
        "dtype": "fp32",
        "blocksize": 64,
        "nested_blocksize": 256,
        "quant_storage": "uint8",
        "bytes": rows["model.layers.0.proj.weight"]["bytes"],
        "bits_per_weight": rows["model.layers.0.proj.weight"]["bytes"] * 8 / (24 * 32),
    }
    assert rows["model.norm.weight"] == {
        "name": "model.norm.weight",
        "format": "dense",
        "shape": [32],
        "dtype": "F32",
        "bytes": 128,
        "bits_per_weight": 32.0,
    }
    totals = document["totals"]
    assert totals["weights"] == 2 and totals["dense_tensors"] == 4
    assert totals["bytes"] == sum(row["bytes"] for row in rows.values())
    stored = helpers.load_all(quantized)
    assert totals["bytes"] == sum(len(data) for _, _, data in stored.values())


def test_inspect_measures_the_error(model, quantized, capsys):
    document = helpers.report(capsys, "inspect", quantized, "--dense", model)
    rows = {row["name"]: row for row in document["tensors"]}
    tensors = helpers.dense_tensors()
    for name in helpers.QUANTIZED:
        exact = tensors[name].astype(np.float64)
        difference = nf4.dequantize(nf4.quantize(tensors[name])).astype(np.float64) - exact
        expected = np.sqrt((difference**2).sum() / (exact**2).sum())
        assert rows[name]["rms_relative_error"] == pytest.approx(expected, rel=1e-12)
        assert rows[name]["max_abs_error"] == np.abs(difference).max()
    assert "rms_relative_error" not in rows["model.norm.weight"]
    totals = document["totals"]
    assert totals["max_abs_error"] == max(rows[n]["max_abs_error"] for n in helpers.QUANTIZED)
    errors = [rows[name]["rms_relative_error"] for name in helpers.QUANTIZED]
    assert min(errors) <= totals["rms_relative_error"] <= max(errors)


def test_inspect_in_words(model, quantized, capsys):
    assert main(["inspect", str(quantized), "--dense", str(model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == "tensor shape format block scales size bits rms max".split()
    row = next(line for line in lines if line.startswith("model.layers.0.proj.weight"))
    assert row.split()[1:6] == ["24x32", "nf4", "(fp32)", "64", "8-bit"]
    assert "%" in row
    assert any(line.startswith("error  rms ") for line in lines)


def test_inspect_reads_dense_files_too(model, capsys):
    document = helpers.report(capsys, "inspect", model)
    assert document["totals"]["weights"] == 0
    assert document["totals"]["bits_per_weight"] == 32


def test_inspect_with_a_dense_file_that_does_not_fit(quantized, tmp_path, capsys):
    tensors = helpers.dense_tensors()
    del tensors["model.layers.0.proj.weight"]
    other = helpers.write_model(tmp_path / "other", tensors)
    assert main(["inspect", str(quantized), "--dense", str(other)]) == 3
    stderr = capsys.readouterr().err
    assert "tensor 'model.layers.0.proj.weight': not there to compare with" in stderr
    tensors["model.layers.0.proj.weight"] = helpers.random_weight((32, 24))
    other = helpers.write_model(tmp_path / "third", tensors)
    assert main(["inspect", str(quantized), "--dense", str(other)]) == 3
    assert "its shape [32, 24] is not [24, 32]" in capsys.readouterr().err


def test_inspect_names_checkpoints_that_are_swapped(model, quantized, capsys):
    assert main(["inspect", str(model), "--dense", str(quantized)]) == 3
    stderr = capsys.readouterr().err
    assert "no 4-bit weight to compare; --dense is for the dense checkpoint" in stderr


def test_inspect_compares_with_floats_alone(quantized, tmp_path, capsys):
    tensors = helpers.dense_tensors()
    tensors["model.layers.0.proj.weight"] = np.ones((24, 32), np.float64)
    other = helpers.write_model(tmp_path / "other", tensors)
    assert main(["inspect", str(quantized), "--dense", str(other)]) == 3
    assert "cannot compare with F64" in capsys.readouterr().err


def test_error_of_extremes():
    assert relative(0, 0) == 0
    assert relative(4, 0) == np.inf
    assert relative(4, 16) == 0.5


def test_numbers_in_words():
    assert console.size_text(0) == "0 B"
    assert console.size_text(999) == "999 B"
    assert console.size_text(43_057_152) == "43.1 MB"
    assert console.size_text(1.5e13) == "15.00 TB"
    assert console.rate_text(3e9, 2) == "1.50 GB/s"
    assert console.rate_text(3e9, 0) == "-"
    names = ["layers.10.a", "layers.2.b", "layers.2.a", "embed"]
    assert sorted(names, key=console.natural_key) == [
        "embed",
        "layers.2.a",
        "layers.2.b",
        "layers.10.a",
    ]
