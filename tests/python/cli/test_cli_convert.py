"""nf4 quantize and nf4 dequantize: what a run leaves behind, and what it reports."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoint_helpers as helpers
import pytest
from nf4.cli import main

REPORT = {
    "command": str,
    "source": str,
    "destination": str,
    "weights": int,
    "dense_tensors": int,
    "fp8_weights": int,
    "already_4bit": int,
    "elements": int,
    "bytes_in": int,
    "bytes_out": int,
    "weight_bytes_in": int,
    "weight_bytes_out": int,
    "kernel_bytes": int,
    "kernel_seconds": float,
    "seconds": float,
    "not_copied": list,
    "warnings": list,
    "chosen_by": str,
    "left_dense": dict,
    "calibrated": int,
}


def test_reports_have_one_shape(tmp_path, capsys):
    model = helpers.write_model(tmp_path / "model")
    report = helpers.report(capsys, "quantize", model, tmp_path / "q", "--blocksize", 128, "--flat")
    settings = {"format": str, "blocksize": int, "double_quantization": bool, "quant_storage": str}
    settings["experts"] = bool
    assert {key: type(value) for key, value in report.items()} == REPORT | settings
    assert (report["weights"], report["dense_tensors"]) == (2, 4)
    assert (report["blocksize"], report["double_quantization"]) == (128, False)
    assert report["bytes_in"] == (model / "model.safetensors").stat().st_size
    assert report["bytes_out"] == (tmp_path / "q" / "model.safetensors").stat().st_size
    report = helpers.report(capsys, "dequantize", tmp_path / "q", tmp_path / "back")
    assert {key: type(value) for key, value in report.items()} == REPORT | {"dtype": str}
    assert report["weight_bytes_out"] == 4 * (24 * 32 + 7 * 11)


def test_report_in_words(tmp_path, capsys):
    model = helpers.write_model(tmp_path / "model")
    assert main(["quantize", str(model), str(tmp_path / "q")]) == 0
    stdout, stderr = capsys.readouterr()
    assert stderr == ""
    assert stdout.startswith("quantized 2 weights")
    assert "\ncopied 4 dense tensors\nleft dense: " in stdout
    assert "\nlayers chosen by tensor names: config.json does not name one" in stdout
    assert stdout.endswith(f"wrote {tmp_path}/q/\n")
    assert main(["quantize", str(tmp_path / "q"), str(tmp_path / "again")]) == 0
    assert "\ncopied 2 weights that are 4-bit already\n" in capsys.readouterr().out


def test_configuration_and_side_files(tmp_path, capsys, in_process):
    model = helpers.write_model(
        tmp_path / "model",
        torch_dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
        custom={"kept": [1, 2.5, None, "é"]},
    )
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text("{}")
    (model / "2_Dense").mkdir()
    (model / "2_Dense" / "model.safetensors").write_bytes(b"a layer of its own")
    (model / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "2_Dense"}]))
    (model / "onnx").mkdir()
    (model / "onnx" / "model.onnx").write_bytes(b"large")
    (model / "pytorch_model.bin").write_bytes(b"large")
    (model / ".git").mkdir()
    (model / ".git" / "config").write_text("secret")
    (model / "1_Pooling" / "blob").write_text("real file behind a link")
    (model / "vocab.txt").symlink_to("1_Pooling/blob")
    assert main(["quantize", str(model), str(tmp_path / "q")]) == 0
    assert "not copied: pytorch_model.bin, onnx/model.onnx" in capsys.readouterr().err
    found = helpers.tree(tmp_path / "q")
    assert sorted(found) == [
        "1_Pooling/blob",
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "config.json",
        "model.safetensors",
        "modules.json",
        "tokenizer.json",
        "vocab.txt",
    ]
    assert not (tmp_path / "q" / "vocab.txt").is_symlink()
    assert found["vocab.txt"] == b"real file behind a link"
    assert found["tokenizer.json"] == (model / "tokenizer.json").read_bytes()
    config = json.loads(found["config.json"])
    assert config["custom"] == {"kept": [1, 2.5, None, "é"]}
    assert config["quantization_config"] == {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": ["lm_head", "model.embed_tokens"],
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }
    assert main(["dequantize", str(tmp_path / "q"), str(tmp_path / "back")]) == 0
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert back == json.loads((model / "config.json").read_text())


def test_options_reach_the_configuration(tmp_path):
    model = helpers.write_model(tmp_path / "model")
    options = ["--format", "fp4", "--flat", "--compute-dtype", "float16", "--skip", "layers.1"]
    assert main(["quantize", str(model), str(tmp_path / "q"), *options]) == 0
    config = helpers.stored_config(tmp_path / "q")
    assert config["bnb_4bit_quant_type"] == "fp4"
    assert config["bnb_4bit_use_double_quant"] is False
    assert config["bnb_4bit_compute_dtype"] == "float16"
    assert "model.layers.1.proj" in config["llm_int8_skip_modules"]
    assert helpers.load_all(tmp_path / "q")["model.layers.1.proj.weight"][0] == "F32"


def test_compute_dtype_without_a_config_is_that_of_the_weights(tmp_path):
    model = helpers.write_model(tmp_path / "model", helpers.dense_tensors("float16"))
    assert main(["quantize", str(model), str(tmp_path / "q")]) == 0
    config = helpers.stored_config(tmp_path / "q")
    assert config["bnb_4bit_compute_dtype"] == "float16"


@pytest.mark.parametrize("by", ["directory", "index"])
def test_shards_stay_shards(by, tmp_path):
    model = helpers.write_shards(tmp_path / "model")
    source = model / "model.safetensors.index.json" if by == "index" else model
    assert main(["quantize", str(source), str(tmp_path / "q")]) == 0
    names = sorted(path.name for path in model.glob("*.safetensors"))
    assert sorted(path.name for path in (tmp_path / "q").glob("*.safetensors")) == names
    index = json.loads((tmp_path / "q" / "model.safetensors.index.json").read_text())
    tensors = helpers.load_all(tmp_path / "q")
    assert index["weight_map"].keys() == tensors.keys()
    for name, shard in index["weight_map"].items():
        assert name in helpers.load_all(tmp_path / "q" / shard)
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors.values())
    assert main(["verify", str(tmp_path / "q")]) == 0
    assert main(["dequantize", str(tmp_path / "q"), str(tmp_path / "back")]) == 0
    back, before = helpers.load_all(tmp_path / "back"), helpers.load_all(model)
    assert {name: value[:2] for name, value in back.items()} == {
        name: value[:2] for name, value in before.items()
    }


def test_parts_of_a_weight_in_different_shards(tmp_path):
    """transformers splits shards anywhere, between a weight and its scales too."""
    model = helpers.write_model(tmp_path / "model")
    assert main(["quantize", str(model), str(tmp_path / "q")]) == 0
    assert main(["dequantize", str(tmp_path / "q"), str(tmp_path / "expected")]) == 0
    tensors = helpers.load_all(tmp_path / "q")
    folder = tmp_path / "scattered"
    folder.mkdir()
    weight_map = {}
    for number, (name, (dtype, shape, data)) in enumerate(tensors.items()):
        shard = f"part-{number}.safetensors"
        header = {name: helpers.entry(dtype, list(shape), 0, len(data))}
        (folder / shard).write_bytes(helpers.raw_file(header, data))
        weight_map[name] = shard
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["dequantize", str(folder), str(tmp_path / "back")]) == 0
    assert helpers.load_all(tmp_path / "back") == helpers.load_all(tmp_path / "expected")
    assert main(["verify", str(tmp_path / "back")]) == 0


NOT_DENSE = {
    "gptq": {"quant_method": "gptq", "bits": 4},
    "fp8": {"quant_method": "fp8"},
    "8 bits": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "nonsense": [1, 2],
}


@pytest.mark.parametrize("case", NOT_DENSE)
def test_models_quantized_otherwise_are_refused(case, tmp_path, capsys):
    model = helpers.write_model(tmp_path / "model", quantization_config=NOT_DENSE[case])
    assert main(["quantize", str(model), str(tmp_path / "q")]) == 3
    assert f"{model}/config.json: " in capsys.readouterr().err
    assert helpers.listing(tmp_path) == ["model"]


def test_nothing_to_do_is_said(tmp_path, capsys):
    source = tmp_path / "in.safetensors"
    source.write_bytes(helpers.file_bytes({"norm.weight": helpers.random_weight((8,))}))
    for command in ("quantize", "dequantize"):
        assert main([command, str(source), str(tmp_path / "out")]) == 3
        assert f"nothing to {command}" in capsys.readouterr().err
    assert helpers.listing(tmp_path) == ["in.safetensors"]


def test_quantizing_twice_copies(tmp_path):
    model = helpers.write_model(tmp_path / "model")
    for source, destination in (("model", "q"), ("q", "again")):
        assert main(["quantize", str(tmp_path / source), str(tmp_path / destination)]) == 0
    assert helpers.tree(tmp_path / "again") == helpers.tree(tmp_path / "q")
    assert model.is_dir()


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_the_bytes(threads, tmp_path):
    model = helpers.write_model(tmp_path / "model")
    for name, option in (("all", []), ("some", ["--threads", str(threads)])):
        assert main(["quantize", str(model), str(tmp_path / name), *option]) == 0
        assert (
            main(["dequantize", str(tmp_path / name), str(tmp_path / f"{name}-back"), *option]) == 0
        )
    assert helpers.tree(tmp_path / "all") == helpers.tree(tmp_path / "some")
    assert helpers.tree(tmp_path / "all-back") == helpers.tree(tmp_path / "some-back")


def test_output_is_valid_and_aligned(tmp_path):
    """Every tensor starts at a multiple of its element size, so that others can map it."""
    source = tmp_path / "in.safetensors"
    source.write_bytes(helpers.file_bytes(helpers.dense_tensors("float16")))
    assert main(["quantize", str(source), str(tmp_path / "q")]) == 0
    content = Path(tmp_path / "q").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    assert start % 8 == 0
    sizes = {"U8": 1, "F16": 2, "F32": 4}
    header = json.loads(content[8:start])
    assert header.pop("__metadata__") == {"format": "pt"}
    for info in header.values():
        assert (start + info["data_offsets"][0]) % sizes[info["dtype"]] == 0
