"""Every command reads all places where a checkpoint says how it is quantized, refuses two that
disagree, and leaves none behind in what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint_helpers as helpers
import int4_checkpoints as models
import int4_oracle as oracle
import nf4
import numpy as np
import pytest
from int4_checkpoints import LAYER, Case
from nf4.checkpoint import Checkpoint, FormatError, survey
from nf4.checkpoint.quantization import quantization
from nf4.cli import main

V2 = Case("gptq_v2", symmetric=False)
NAMED = V2.config
UNNAMED = {key: value for key, value in NAMED.items() if key != "quant_method"}
BESIDE = (
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
    "hf_quant_config.json",
)


def folder(
    path: Path, case: Case, config: dict[str, Any], beside: dict[str, Any] | None = None
) -> Path:
    """The weights of a case under a config.json with these keys, and files beside it."""
    case.folder(path)
    (path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **config})
    )
    for name, content in (beside or {}).items():
        (path / name).write_text(json.dumps(content))
    return path


def require_oracle(path: Path, case: Case) -> None:
    """That a folder has the dense weights of a case."""
    found = helpers.load_all(path)
    for module, weight in case.weights().items():
        expected = oracle.dequantize(weight, case.scale_dtype)
        assert found[f"{module}.weight"][2] == expected.tobytes()


def require_nothing_stale(path: Path) -> None:
    """That nothing but the top of config.json tells of a quantization."""
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config", None)
    text = json.dumps(config)
    assert not any(word in text for word in ("quantization", "compression", "bits", "group_size"))
    assert not any((path / name).exists() for name in BESIDE)


# How it is said -> config.json, files beside it.
PLACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text_config": ({"text_config": {"hidden_size": 64, "quantization_config": NAMED}}, {}),
    "a config in a config": (
        {"thinker_config": {"text_config": {"quantization_config": NAMED}, "n": 1}}, {}
    ),
    "compression_config": ({"compression_config": NAMED}, {}),
    "as an older key of a part": ({"llm_config": {"compression_config": NAMED}}, {}),
    "quantize_config.json": ({}, {"quantize_config.json": UNNAMED}),
    "quantize_config.json with its method": ({}, {"quantize_config.json": NAMED}),
    "quant_config.json": ({}, {"quant_config.json": UNNAMED}),
    "quantization_config.json": ({}, {"quantization_config.json": NAMED}),
    "a null and an empty one": (
        {"quantization_config": None, "text_config": {"quantization_config": {}}},
        {"quantize_config.json": UNNAMED, "quant_config.json": {}},
    ),
    "its version in a file alone": (
        {"quantization_config": {k: v for k, v in NAMED.items() if k != "checkpoint_format"}},
        {"quantize_config.json": UNNAMED},
    ),
    "its version under another key": (
        {"quantization_config": {k: v for k, v in NAMED.items() if k != "checkpoint_format"}
         | {"format": "gptq_v2"}},
        {},
    ),
    "twice": ({"quantization_config": NAMED, "text_config": {"quantization_config": NAMED}}, {}),
    "older names": (
        {},
        {"quantize_config.json": {"w_bit": 4, "q_group_size": 32, "sym": False,
                                  "checkpoint_format": "GPTQ_V2"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_version_of_gptq_is_read_wherever_it_is_said(place, tmp_path, capsys):
    source = folder(tmp_path / "q", V2, *PLACES[place])
    assert main(["verify", str(source)]) == 0
    assert main(["inspect", "--json", str(source)]) == 0
    rows = json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))["tensors"]
    assert {row["layout"] for row in rows if row["format"] == "int4"} == {"gptq_v2"}
    assert main(["dequantize", str(source), str(tmp_path / "dense")]) == 0
    require_oracle(tmp_path / "dense", V2)
    assert "quantization_config" not in (tmp_path / "dense" / "config.json").read_text()
    require_nothing_stale(tmp_path / "dense")


@pytest.mark.parametrize("place", PLACES)
def test_what_is_converted_says_it_once(place, tmp_path):
    source = folder(tmp_path / "q", V2, *PLACES[place])
    for to in ("gptq", "awq", "compressed-tensors"):
        out = tmp_path / to
        assert main(["convert", str(source), str(out), "--to", to]) == 0
        require_nothing_stale(out)
        with Checkpoint(out) as checkpoint:
            assert {w.state.layout.name for w in survey(checkpoint).weights.values()} == {to}
        assert main(["dequantize", str(out), str(tmp_path / f"{to}-dense")]) == 0
        require_oracle(tmp_path / f"{to}-dense", V2)
    assert main(["convert", str(source), str(tmp_path / "again"), "--to", "gptq_v2"]) == 2


AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4,
              "group_size": 32, "sym": True}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "said", "beside"),
    [
        (Case("gptq"), AUTO_ROUND, {"bits": 4, "sym": True}),
        (Case("gptq"), Case("gptq").config, {"sym": True, "version": 1}),
        (V2, NAMED, {"w_bit": 4, "zero_point": True}),
        (Case("compressed-tensors"), Case("compressed-tensors").config, {"bits": 4}),
    ],
    ids=["auto-round", "gptq", "gptq_v2", "compressed-tensors"],
)
def test_a_method_is_guessed_where_none_is_named(case, said, beside, tmp_path):
    """No key of another method, and no file's name, says more than the name of the method."""
    for name in BESIDE[:2]:
        source = folder(tmp_path / name, case, {"quantization_config": said}, {name: beside})
        assert models.findings("fault", source) == []
        with Checkpoint(source) as checkpoint:
            found = quantization(checkpoint)
        assert found is not None and found.method == said["quant_method"]
        assert main(["dequantize", str(source), str(tmp_path / f"{name}-dense")]) == 0
        require_oracle(tmp_path / f"{name}-dense", case)


def test_places_of_one_tool_name_its_method(tmp_path):
    for name, config, beside in (
        ("mlx", {"quantization": {"bits": 4, "group_size": 32}}, {}),
        ("modelopt", {}, {"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}}),
    ):
        source = folder(tmp_path / name, V2, {"quantization_config": NAMED, **config}, beside)
        (fault,) = models.findings("fault", source)
        assert f"says quant_method '{name}', but" in fault or f"says '{name}'" in fault


def test_awq_of_the_file_that_autoawq_writes(tmp_path):
    case = Case("awq", symmetric=False)
    beside = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    for number, name in enumerate(BESIDE[:2]):
        source = folder(tmp_path / f"{number}", case, {}, {name: beside})
        assert main(["verify", str(source)]) == 0
        assert main(["dequantize", str(source), str(tmp_path / f"{number}-dense")]) == 0
        require_oracle(tmp_path / f"{number}-dense", case)


def test_compressed_tensors_of_older_configs(tmp_path):
    case = Case("compressed-tensors", symmetric=False)
    unnamed = {key: value for key, value in case.config.items() if key != "quant_method"}
    within = {"quantization_config": case.config, "sparsity_config": {"format": "dense"}}
    for number, config in enumerate(
        (
            {"compression_config": unnamed},
            {"compression_config": within},
            {"quantization_config": case.config | {"quant_method": "compressed_tensors"}},
            {"quantization_config": case.config | {"sparsity_config": {"format": "dense"}}},
        )
    ):
        source = folder(tmp_path / f"{number}", case, config)
        assert main(["verify", str(source)]) == 0
        assert main(["dequantize", str(source), str(tmp_path / f"{number}-dense")]) == 0
        require_oracle(tmp_path / f"{number}-dense", case)


DISAGREEMENTS: dict[str, Any] = {
    "checkpoint_format": "gptq",
    "bits": 8,
    "group_size": 64,
    "sym": True,
    "desc_act": True,
    "quant_method": "awq",
}


@pytest.mark.parametrize("key", DISAGREEMENTS)
@pytest.mark.parametrize("place", ["text_config.quantization_config", "quantize_config.json"])
def test_two_that_disagree_are_refused(key, place, tmp_path, capsys):
    other = NAMED | {key: DISAGREEMENTS[key]}
    nested = place.startswith("text")
    source = folder(
        tmp_path / "q",
        V2,
        {"quantization_config": NAMED}
        | ({"text_config": {"quantization_config": other}} if nested else {}),
        {} if nested else {place: other},
    )
    first = f"config.json: quantization_config says {NAMED[key]!r}"
    said = f"says {key} {DISAGREEMENTS[key]!r}, but {first}"
    (fault,) = models.findings("fault", source)
    assert said in fault and place in fault
    for command in (["inspect"], ["dequantize"], ["quantize"], ["convert", "--to", "awq"]):
        out = [] if command == ["inspect"] else [str(tmp_path / "out")]
        assert main([command[0], str(source), *out, *command[1:]]) == 3
        stderr = capsys.readouterr().err
        assert said in stderr and place in stderr and stderr.count("\n") == 1
    assert helpers.listing(tmp_path) == ["q"]


def test_two_keys_of_one_place_that_disagree_are_refused(tmp_path):
    config = {"quantization_config": NAMED | {"format": "gptq"}}
    source = folder(tmp_path / "q", V2, config)
    assert (
        "checkpoint_format is 'gptq_v2', but format is 'gptq'"
        in models.findings("fault", source)[0]
    )


# The config, and the sentence that refuses it.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown method": ({"quant_method": "quip"}, "is quantized by 'quip', which is not read"),
    "no method": ({"bits": 4, "group_size": 32}, "quantization_config has no quant_method"),
    "8 bits of bitsandbytes": ({"load_in_8bit": True}, "by bitsandbytes, but not in 4 bits"),
    "an unknown version of gptq": (
        NAMED | {"checkpoint_format": "gptq_v3"}, "'gptq_v3' is not read"
    ),
    "an unknown version of awq": (
        {"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "'gemv_fast' of AWQ is not read"
    ),
    "an unknown packing": (
        Case("compressed-tensors").config | {"format": "marlin-24"}, "'marlin-24' is not read"
    ),
    "a sparse format": (
        Case("compressed-tensors").config | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config: format 'sparse-24-bitmask' is not read; dense is",
    ),
    "a sparse format without its name": (
        Case("compressed-tensors").config | {"sparsity_config": {"targets": ["Linear"]}},
        "sparsity_config: format None is not read",
    ),
    "no object": ([4], "quantization_config is not an object"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("nested", [False, True])
def test_what_is_not_read_is_named_by_every_command(name, nested, tmp_path, capsys):
    said, sentence = REFUSED[name]
    config = {"quantization_config": said}
    source = folder(tmp_path / "q", V2, {"text_config": config} if nested else config)
    assert any(sentence in fault for fault in models.findings("fault", source))
    for command in (["dequantize"], ["quantize"], ["convert", "--to", "awq"]):
        assert main([command[0], str(source), str(tmp_path / "out"), *command[1:]]) == 3
        stderr = capsys.readouterr().err
        assert sentence in stderr and stderr.count("\n") == 1
    assert helpers.listing(tmp_path) == ["q"]


FP8 = {"quantization_config": {"quant_method": "fp8"}}


def test_weights_of_an_unknown_method_are_shown_and_not_read(tmp_path, capsys):
    dense = helpers.write_model(tmp_path / "dense")
    source = tmp_path / "q"
    assert main(["quantize", str(dense), str(source)]) == 0
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | FP8))
    sentence = "the model is quantized by 'fp8', which is not read"
    assert models.findings("fault", source) == [sentence]
    with pytest.raises(FormatError, match=sentence):
        nf4.load(source)
    capsys.readouterr()
    assert main(["inspect", str(source), "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["totals"]["weights"] == 2 and document["warnings"] == [sentence]
    assert err == f"nf4: warning: {sentence}\n"
    assert main(["inspect", str(dense), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["warnings"] == [] and err == ""


def test_what_another_file_alone_says_goes_into_the_copy(tmp_path):
    """All weights are in 4 bits already, and the file that says so is not copied."""
    dense, source, again = (tmp_path / name for name in ("dense", "q", "again"))
    helpers.write_model(dense)
    assert main(["quantize", str(dense), str(source)]) == 0
    expected = helpers.tree(source)
    config = json.loads((source / "config.json").read_text())
    said = config.pop("quantization_config")
    (source / "config.json").write_text(json.dumps(config))
    (source / "quantization_config.json").write_text(json.dumps(said))
    assert main(["quantize", str(source), str(again)]) == 0
    assert helpers.tree(again) == expected
    assert main(["verify", str(again)]) == 0


def test_a_folder_that_says_nothing_is_not_guessed(tmp_path, capsys):
    source = folder(tmp_path / "q", V2, {})
    assert main(["verify", str(source)]) == 1
    assert "it has 4-bit weights, but no quantization_config" in capsys.readouterr().out
    for command in (["dequantize"], ["quantize"], ["convert", "--to", "awq"]):
        assert main([command[0], str(source), str(tmp_path / "out"), *command[1:]]) == 3
        assert "tells whether it is in gptq or gptq_v2" in capsys.readouterr().err
    with pytest.raises(FormatError, match="tells whether it is in gptq or gptq_v2"):
        nf4.load(source)
    awq = folder(tmp_path / "awq", Case("awq", symmetric=False), {})
    assert main(["dequantize", str(awq), str(tmp_path / "dense")]) == 0
    require_oracle(tmp_path / "dense", Case("awq", symmetric=False))


def test_a_file_that_says_nothing_is_told(tmp_path, capsys):
    source = tmp_path / "a.safetensors"
    source.write_bytes(helpers.file_bytes(models.tensors(Case("gptq").weights()[LAYER])))
    for arguments in (["dequantize"], ["convert", "--to", "awq"]):
        out = str(tmp_path / arguments[0])
        assert main([arguments[0], str(source), out, *arguments[1:]]) == 0
        assert "gptq is assumed" in capsys.readouterr().err


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
@pytest.mark.parametrize("said", ["nothing", "in another place", "as bitsandbytes"])
def test_no_mixture_is_quantized(layout, said, tmp_path, capsys):
    """Whatever config.json says, the tensors show that the source is not dense."""
    case = Case(layout)
    config, beside = {
        "nothing": ({}, {}),
        "in another place": ({"text_config": {"quantization_config": case.config}}, {}),
        "as bitsandbytes": ({"quantization_config": BNB}, {}),
    }[said]
    source = folder(tmp_path / "q", case, config, beside)
    for format in ("nf4", "int4"):
        assert main(["quantize", str(source), str(tmp_path / "out"), "--format", format]) == 3
        assert str(source) in capsys.readouterr().err
    assert helpers.listing(tmp_path) == ["q"]
    if said == "as bitsandbytes":
        assert main(["verify", str(source)]) == 1


FOREIGN = {
    "8 bits of bitsandbytes": (
        {"a.weight": np.ones((64, 64), np.int8), "a.SCB": np.ones(64, np.float32)},
        "it is I8, which no dense weight is",
    ),
    "MLX": (
        {"a.weight": np.ones((64, 8), np.uint32), "a.scales": np.ones((64, 2), np.float16),
         "a.biases": np.ones((64, 2), np.float16)},
        "it is quantized by MLX (U32 beside scales), which is not read",
    ),
    "words of 32 bits": ({"a.weight": np.ones((64, 8), np.int32)}, "it is I32, which no dense"),
    "scales alone": ({"a.scales": np.ones(8, np.float32)}, "scales is a part of something"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_layouts_of_others_are_no_dense_source(name, tmp_path, capsys):
    tensors, sentence = FOREIGN[name]
    stored = tensors | {"b.weight": helpers.random_weight((64, 64))}
    source = tmp_path / "a.safetensors"
    source.write_bytes(helpers.file_bytes(stored))
    for command in (["dequantize"], ["quantize"], ["convert", "--to", "awq"]):
        assert main([command[0], str(source), str(tmp_path / "out"), *command[1:]]) == 3
        assert sentence in capsys.readouterr().err
    assert main(["verify", str(source)]) == 1
    assert sentence in capsys.readouterr().out


def test_mlx_is_named(tmp_path, capsys):
    said = {"group_size": 64, "bits": 4}
    for number, config in enumerate(
        ({"quantization": said}, {"quantization": said, "quantization_config": said})
    ):
        source = helpers.write_model(tmp_path / f"{number}", None, **config)
        for command in (["dequantize"], ["quantize"], ["convert", "--to", "awq"]):
            assert main([command[0], str(source), str(tmp_path / "out"), *command[1:]]) == 3
            assert "the model is quantized by 'mlx', which is not read" in capsys.readouterr().err


def test_a_dense_model_that_is_said_to_be_quantized_is_refused(tmp_path, capsys):
    source = helpers.write_model(tmp_path / "m")
    (source / "quantize_config.json").write_text(json.dumps(UNNAMED))
    assert main(["quantize", str(source), str(tmp_path / "out")]) == 3
    stderr = capsys.readouterr().err
    assert "by 'gptq', says quantize_config.json, but has no such weights" in stderr
    assert helpers.listing(tmp_path) == ["m"]
