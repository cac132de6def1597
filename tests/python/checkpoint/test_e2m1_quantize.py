"""nf4 quantize --format mxfp4 and nvfp4: layers, settings, shared scales, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint_helpers as helpers
import numpy as np
import pytest
from int4_checkpoints import findings
from nf4.checkpoint import (
    Checkpoint,
    OptionError,
    QuantizeOptions,
    quantize_checkpoint,
    survey,
)
from nf4.cli import main

pytestmark = pytest.mark.usefixtures("in_process")
_ATTENTION = "model.layers.0.self_attn"
_SHAPES = {
    f"{_ATTENTION}.q_proj": (64, 64),
    f"{_ATTENTION}.k_proj": (32, 64),
    f"{_ATTENTION}.v_proj": (32, 64),
    f"{_ATTENTION}.o_proj": (64, 64),
    "model.layers.0.mlp.gate_proj": (96, 64),
    "model.layers.0.mlp.up_proj": (96, 64),
    "model.layers.0.mlp.down_proj": (64, 96),
    "model.layers.0.mlp.odd_proj": (64, 40),
}


def _dense(path: Path) -> Path:
    tensors = {
        f"{module}.weight": helpers.random_weight(shape, "bfloat16", number)
        for number, (module, shape) in enumerate(_SHAPES.items())
    }
    tensors["lm_head.weight"] = helpers.random_weight((10, 64), "bfloat16", 20)
    return helpers.write_model(path, tensors, architectures=["LlamaForCausalLM"])


def _weights(path: Path) -> dict[str, Any]:
    with Checkpoint(path) as checkpoint:
        found = survey(checkpoint)
        assert not found.faults
        return {name: each.load(checkpoint) for name, each in found.weights.items()}


@pytest.mark.parametrize(
    ("format", "layout"),
    [("mxfp4", "compressed-tensors"), ("nvfp4", "compressed-tensors"), ("nvfp4", "modelopt")],
)
def test_a_model(format, layout, tmp_path, capsys):
    source, made = _dense(tmp_path / "dense"), tmp_path / "q"
    options = ["--format", format, "--layout", layout]
    assert main(["quantize", str(source), str(made), *options]) == 0
    assert "columns not a multiple of" in capsys.readouterr().out
    assert main(["verify", str(made)]) == 0
    weights = _weights(made)
    assert weights.keys() == {f"{name}.weight" for name in _SHAPES if "odd" not in name}
    config = helpers.stored_config(made)
    assert config["quant_method"] == layout
    assert config["ignore"] == ["lm_head", "model.layers.0.mlp.odd_proj"]
    capsys.readouterr()
    assert main(["inspect", str(made), "--dense", str(source), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["warnings"] == []
    assert 0.08 < document["totals"]["rms_relative_error"] < 0.14


def test_fused_layers_share_a_global_scale(tmp_path):
    """q, k and v, gate and up: of the largest magnitude of all of them, whatever their shards."""
    dense = {
        f"{module}.weight": helpers.random_weight(shape, "float32", number)
        for number, (module, shape) in enumerate(_SHAPES.items())
    }
    source = helpers.write_shards(tmp_path / "dense", dense)
    quantize_checkpoint(str(source), str(tmp_path / "q"), QuantizeOptions(format="nvfp4"))
    weights = _weights(tmp_path / "q")
    scales = {
        name.removesuffix(".weight").rpartition(".")[2]: float(each.nested_absmax[0])
        for name, each in weights.items()
    }
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",)):
        of_group = [array for name, array in dense.items() if name.split(".")[-2] in group]
        largest = max(float(np.abs(array).max()) for array in of_group)
        expected = np.float32(1) / np.float32(largest) * np.float32(2688)
        assert {scales[name] for name in group} == {float(expected)}


def test_verify_warns_of_fused_layers_with_several_global_scales(tmp_path):
    names = [f"{_ATTENTION}.{name}_proj" for name in "qkvo"]
    dense = {f"{name}.weight": helpers.random_weight((32, 64), "float32", 1) for name in names}
    source = helpers.write_model(tmp_path / "dense", dense)
    quantize_checkpoint(str(source), str(tmp_path / "q"), QuantizeOptions(format="nvfp4"))
    assert findings("warning", tmp_path / "q") == []
    file = tmp_path / "q" / "model.safetensors"
    data = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    for name in (names[1], names[3]):  # o_proj is fused with no other
        info = json.loads(data[8:header])[f"{name}.weight_global_scale"]
        scale = np.frombuffer(data, np.float32, 1, header + info["data_offsets"][0])
        scale *= 2
    file.write_bytes(data)
    (warning,) = findings("warning", tmp_path / "q")
    first = ", ".join(f"{name}.weight" for name in names[:3])
    assert warning.startswith("3 weights do not have the global scale of those that engines fuse")
    assert f"such as {first};" in warning
    assert main(["verify", str(tmp_path / "q")]) == 0


@pytest.mark.parametrize(
    "group",
    [
        ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    ],
)
def test_pairs_that_vllm_fuses_share_a_global_scale(group, tmp_path):
    first, second = (f"model.layers.0.{name}.weight" for name in group)
    dense = {
        first: helpers.random_weight((32, 64), "float32", 1),
        second: 3 * helpers.random_weight((16, 64), "float32", 2),
        first.replace("layers.0", "layers.1"): helpers.random_weight((32, 64), "float32", 3),
    }
    source = helpers.write_model(tmp_path / "dense", dense)
    quantize_checkpoint(str(source), str(tmp_path / "q"), QuantizeOptions(format="nvfp4"))
    scales = {name: float(each.nested_absmax[0]) for name, each in _weights(tmp_path / "q").items()}
    expected = np.float32(1) / np.float32(np.abs(dense[second]).max()) * np.float32(2688)
    assert [scales.pop(first), scales.pop(second)] == [float(expected)] * 2
    assert float(expected) not in scales.values() and len(scales) == 1


def test_weights_of_zeros(tmp_path):
    tensors = {f"{_ATTENTION}.o_proj.weight": np.zeros((8, 64), np.float32)}
    source = helpers.write_model(tmp_path / "dense", tensors)
    for format in ("mxfp4", "nvfp4"):
        made = tmp_path / format
        quantize_checkpoint(str(source), str(made), QuantizeOptions(format=format))
        assert not any("NaN" in each or "infinite" in each for each in findings("fault", made))
        assert main(["dequantize", str(made), str(tmp_path / f"{format}-d")]) == 0
        ((_, _, data),) = helpers.load_all(tmp_path / f"{format}-d").values()
        assert not np.frombuffer(data, np.uint16).any()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "mxfp4", "layout": "modelopt"}, "expected compressed-tensors or gpt-oss with"),
        ({"format": "nvfp4", "layout": "gptq"}, "expected compressed-tensors or modelopt with"),
        ({"format": "nvfp4", "experts": True}, "experts is True"),
        ({"format": "mxfp4", "blocksize": 128}, 'expected format "nf4" or "fp4"'),
        ({"format": "mxfp4", "blocksize": 64}, 'expected format "nf4" or "fp4"'),
        ({"format": "nvfp4", "group_size": 32}, 'expected format "int4"'),
    ],
)
def test_options_that_do_not_fit(options, said):
    with pytest.raises(OptionError, match=said):
        QuantizeOptions(**options)


def test_options_of_the_command(tmp_path, capsys):
    source = _dense(tmp_path / "dense")
    command = ["quantize", str(source), str(tmp_path / "q"), "--format", "nvfp4"]
    for more, said in (
        (["--blocksize", "64"], "one of nf4 and fp4"),
        (["--group-size", "32"], "one of int4"),
        (["--flat"], "one of nf4 and fp4"),
    ):
        assert main([*command, *more]) == 2
        assert said in capsys.readouterr().err
    assert main([*command[:3], "--format", "nf4", "--layout", "awq"]) == 2
    assert "one of int4, mxfp4 and nvfp4" in capsys.readouterr().err


def test_a_source_in_4_bits_is_refused(tmp_path, capsys):
    source = _dense(tmp_path / "dense")
    assert main(["quantize", str(source), str(tmp_path / "q"), "--format", "mxfp4"]) == 0
    for format in ("nf4", "nvfp4"):
        again = str(tmp_path / "again")
        assert main(["quantize", str(tmp_path / "q"), again, "--format", format]) == 3
        assert "quantized by 'compressed-tensors'" in capsys.readouterr().err
