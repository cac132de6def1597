"""nf4 verify: what it reports, faults and warnings."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoint_helpers as helpers
import numpy as np
from nf4.checkpoint import rules
from nf4.checkpoint.architecture import Model
from nf4.cli import main

NAMES = "tensor names: config.json does not name one architecture and its model_type"


def test_verify_counts_warnings_apart(quantized, capsys):
    _break_scales(quantized / "model.safetensors", helpers.QUANTIZED[0], 1e-40)
    assert main(["verify", str(quantized)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("warning: ") and "are subnormal" in lines[0]
    assert lines[-1].startswith(f"{quantized}: ok, ")


def test_json_has_no_nan(tmp_path, capsys):
    """A dense reference with NaN gives an error that is no number: null in JSON."""
    tensors = {"a.weight": helpers.random_weight((4, 16))}
    tensors["a.weight"][0, 0] = np.nan
    source = tmp_path / "in.safetensors"
    source.write_bytes(helpers.file_bytes(tensors))
    output = tmp_path / "q.safetensors"
    assert main(["quantize", str(source), str(output), "--allow-nonfinite", "--quiet"]) == 0
    capsys.readouterr()
    row = helpers.report(capsys, "inspect", output, "--dense", source)["tensors"][0]
    assert row["rms_relative_error"] is None and row["max_abs_error"] is None


def test_verify_accepts_what_is_sound(model, quantized, capsys):
    document = helpers.report(capsys, "verify", quantized)
    assert document == {
        "path": str(quantized),
        "ok": True,
        "weights": 2,
        "dense_tensors": 4,
        "fp8_weights": 0,
        "checked_by": NAMES,
        "findings": [],
    }
    dense = helpers.report(capsys, "verify", model)
    assert dense["ok"] and dense["checked_by"] == ""


def test_verify_says_what_decided_which_layers_transformers_loads(quantized, capsys, monkeypatch):
    assert main(["verify", str(quantized)]) == 0
    checked, verdict = capsys.readouterr().out.splitlines()
    assert checked == f"layers checked by {NAMES}"
    assert verdict.startswith(f"{quantized}: ok (")
    names = (*helpers.dense_tensors(), *helpers.QUANTIZED)
    model = Model(
        name="Toy (transformers 5)",
        reasons=dict.fromkeys(names),
        modules={name: name.removesuffix(".weight") for name in names},
        linear=frozenset(name.removesuffix(".weight") for name in helpers.QUANTIZED),
        conv1d=frozenset(),
        dense_by_default=frozenset(),
    )
    monkeypatch.setattr(rules, "ask", lambda *asked: model)
    assert (
        helpers.report(capsys, "verify", quantized)["checked_by"]
        == "the modules of Toy (transformers 5)"
    )


def _break_scales(path: Path, name: str, value: float) -> None:
    """Overwrite the first nested scale of a weight in a file."""
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    info = json.loads(content[8:start])[f"{name}.nested_absmax"]
    begin = start + info["data_offsets"][0]
    content[begin : begin + 4] = np.float32(value).tobytes()
    path.write_bytes(content)


def test_verify_lists_every_fault(quantized, capsys):
    for name, value in zip(helpers.QUANTIZED, (np.nan, -1.0), strict=True):
        _break_scales(quantized / "model.safetensors", name, value)
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["llm_int8_skip_modules"] += ["layers.1.proj"]
    (quantized / "config.json").write_text(json.dumps(config))
    document = helpers.report(capsys, "verify", quantized, code=1)
    reasons = [(finding["tensor"], finding["reason"]) for finding in document["findings"]]
    assert (helpers.QUANTIZED[0], "nested_absmax: 1 of 1 are NaN, first at 0") in reasons
    assert (helpers.QUANTIZED[1], "nested_absmax: 1 of 1 are negative, first at 0") in reasons
    skipped = "llm_int8_skip_modules has 'layers.1.proj', which skips the 4-bit model.layers.1.proj"
    assert (None, skipped) in reasons
    assert {finding["severity"] for finding in document["findings"]} == {"fault"}
    assert main(["verify", str(quantized)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(reasons) + 2 and lines[-2] == f"layers checked by {NAMES}"
    assert lines[-1] == f"{quantized}: 3 faults (2 4-bit weights, 4 dense tensors)"


def test_verify_lists_the_faults_of_several_shards(tmp_path, capsys):
    folder = helpers.write_shards(tmp_path / "model")
    shards = sorted(folder.glob("*.safetensors"))
    shards[0].write_bytes(b"short")
    shards[2].unlink()
    document = helpers.report(capsys, "verify", folder, code=1)
    assert [finding["reason"] for finding in document["findings"]] == [
        "too short for safetensors: 5 bytes, at least 8 needed",
        f"its shard {shards[2].name} is missing",
    ]


def test_verify_reads_the_configuration(quantized, capsys):
    config = json.loads((quantized / "config.json").read_text())
    settings = config.pop("quantization_config")
    (quantized / "config.json").write_text(json.dumps(config))
    document = helpers.report(capsys, "verify", quantized, code=1)
    assert document["findings"][0]["reason"] == "it has 4-bit weights, but no quantization_config"
    config["quantization_config"] = settings | {"quant_method": "gptq"}
    (quantized / "config.json").write_text(json.dumps(config))
    document = helpers.report(capsys, "verify", quantized, code=1)
    assert "quantized by 'gptq'" in document["findings"][0]["reason"]
    (quantized / "config.json").write_text("{")
    document = helpers.report(capsys, "verify", quantized, code=1)
    assert "not valid JSON" in document["findings"][0]["reason"]


def test_verify_finds_a_configuration_without_weights(model, capsys):
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (model / "config.json").write_text(json.dumps(config))
    document = helpers.report(capsys, "verify", model, code=1)
    assert document["findings"][0]["reason"].endswith("but no 4-bit weights")
