"""nf4 quantize --format int4."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoint_helpers as helpers
import int4_checkpoints as models
import int4_oracle as oracle
import nf4
import numpy as np
import pytest
from nf4.checkpoint import (
    Checkpoint,
    OptionError,
    QuantizeOptions,
    audit,
    quantize_checkpoint,
    survey,
)
from nf4.cli import main

NAMES = ("model.layers.0.q_proj.weight", "model.layers.1.q_proj.weight")


def _dense(dtype: str = "float16") -> dict[str, np.ndarray]:
    shapes = {
        "model.embed_tokens.weight": (10, 64),
        NAMES[0]: (16, 64),
        "model.layers.0.q_proj.bias": (16,),
        NAMES[1]: (24, 128),
        "model.norm.weight": (64,),
        "lm_head.weight": (10, 64),
    }
    return {name: helpers.random_weight(s, dtype, i) for i, (name, s) in enumerate(shapes.items())}


def _model(tmp_path: Path, dtype: str = "float16", **more: np.ndarray) -> Path:
    return helpers.write_model(tmp_path / "model", _dense(dtype) | more)


def _quantize(source: Path, destination: Path, *arguments: str) -> int:
    return main(["quantize", str(source), str(destination), "--format", "int4", *arguments])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_the_parts_are_those_of_quantize_int4(layout, symmetric, dtype, tmp_path):
    source, output = _model(tmp_path, dtype), tmp_path / "q"
    kind = "--symmetric" if symmetric else "--asymmetric"
    assert _quantize(source, output, "--layout", layout, "--group-size", "32", kind) == 0
    found = helpers.load_all(output)
    scales = "BF16" if dtype == "bfloat16" else "F16"
    for name in NAMES:
        weight = nf4.quantize_int4(
            _dense(dtype)[name], layout=layout, group_size=32, symmetric=symmetric
        )
        module = name.removesuffix(".weight")
        parts = {part: f"{module}.{n}" for part, n in models.names(layout).items()}
        assert found[parts["scales"]][0] == scales
        for part in ("packed", "scales", "zeros"):
            array = getattr(weight, part)
            assert (parts[part] in found) == (array is not None)
            assert array is None or found[parts[part]][2] == array.tobytes()
        assert name not in found
    before = helpers.load_all(source)
    for name in before.keys() - set(NAMES):
        assert found[name] == before[name]
    assert not any(finding.severity == "fault" for finding in audit(str(output))[1])
    config = helpers.stored_config(output)
    assert config["quant_method"] == {"gptq_v2": "gptq"}.get(layout, layout)
    if layout == "compressed-tensors":
        assert config["ignore"] == ["lm_head"]
        assert config["config_groups"]["group_0"]["weights"]["symmetric"] == symmetric


def test_the_defaults(tmp_path, capsys):
    source = _model(tmp_path)
    assert _quantize(source, tmp_path / "q", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    settings = {name: report[name] for name in ("format", "layout", "group_size", "symmetric")}
    assert settings == {
        "format": "int4",
        "layout": "compressed-tensors",
        "group_size": 128,
        "symmetric": True,
    }
    assert report["left_dense"]["columns not a multiple of the group size 128"] == 1
    assert report["warnings"] == [
        "the group size 128 leaves 1 of 2 matrices dense, as it does not divide their columns; a "
        "group size of 64 leaves none"
    ]
    with Checkpoint(tmp_path / "q") as checkpoint:
        assert list(survey(checkpoint).weights) == [NAMES[1]]
    assert helpers.stored_config(tmp_path / "q")["ignore"] == ["lm_head", "model.layers.0.q_proj"]


def test_dequantized_is_near_the_dense_model(tmp_path, capsys):
    source = _model(tmp_path)
    assert _quantize(source, tmp_path / "q", "--group-size", "-1", "--asymmetric") == 0
    capsys.readouterr()
    assert main(["inspect", "--json", str(tmp_path / "q"), "--dense", str(source)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 0.05 < report["totals"]["rms_relative_error"] < 0.15
    assert main(["dequantize", str(tmp_path / "q"), str(tmp_path / "d")]) == 0
    shapes = {name: info[:2] for name, info in helpers.load_all(source).items()}
    assert {name: info[:2] for name, info in helpers.load_all(tmp_path / "d").items()} == shapes


@pytest.mark.parametrize(
    ("layout", "shape", "reason"),
    [
        ("awq", (12, 64), "awq has words of 8 rows, and 12 rows are not a multiple"),
        ("gptq", (16, 13), "gptq has words of 8 columns, and 13 are not a multiple"),
    ],
)
def test_what_the_layout_cannot_hold_stays_dense(layout, shape, reason, tmp_path, capsys):
    odd = helpers.random_weight(shape, "float16")
    source = _model(tmp_path, **{"model.layers.2.q_proj.weight": odd})
    arguments = ["--layout", layout, "--group-size", "-1"]
    assert _quantize(source, tmp_path / "q", *arguments) == 0
    assert f"left dense: 1 matrix ({reason})" in capsys.readouterr().out
    before, after = helpers.load_all(source), helpers.load_all(tmp_path / "q")
    assert after["model.layers.2.q_proj.weight"] == before["model.layers.2.q_proj.weight"]


@pytest.mark.parametrize(
    ("layout", "rows", "cols", "size", "fit"),
    [
        ("compressed-tensors", 16, 128, 48, 32),
        ("compressed-tensors", 16, 72, 32, 8),
        ("compressed-tensors", 16, 60, 32, -1),
        ("gptq", 16, 96, 64, 32),
        ("gptq", 16, 60, 32, None),  # which the layout cannot hold
        ("awq", 12, 96, 64, None),
    ],
)
def test_a_group_size_that_leaves_nothing_dense_is_named(
    layout, rows, cols, size, fit, tmp_path, capsys
):
    odd = helpers.random_weight((rows, cols), "float16")
    source = _model(tmp_path, **{"model.layers.2.q_proj.weight": odd})
    only = ["--only", "layers.1", "--only", "layers.2", "--layout", layout, "--group-size"]
    assert _quantize(source, tmp_path / "q", *only, str(size)) in (0, 3)
    said = capsys.readouterr().err
    assert ("leaves none" in said) == (fit is not None)
    if fit is not None:
        assert f"; a group size of {fit} leaves none" in said
        assert _quantize(source, tmp_path / "fit", *only, str(fit)) == 0
        printed = capsys.readouterr()
        assert "leaves none" not in printed.err and "the group size" not in printed.out


def test_nothing_to_quantize_is_said(tmp_path, capsys):
    source = _model(tmp_path)
    assert _quantize(source, tmp_path / "q", "--group-size", "96") == 3
    problem = "nothing to quantize: the group size 96 leaves 2 of 2 matrices dense"
    assert problem in capsys.readouterr().err
    assert helpers.listing(tmp_path) == ["model"]


WRONG = {
    "group size 0": (["--group-size", "0"], "group_size is 0; expected a multiple of 8, or -1"),
    "group size 12": (["--group-size", "12"], "group_size is 12"),
    "blocksize": (
        ["--blocksize", "64"],
        "--blocksize is not an option of --format int4; it is one of nf4 and fp4",
    ),
    "flat": (["--flat"], "--flat is not an option of --format int4"),
    "storage": (["--quant-storage", "uint8"], "--quant-storage is not an option"),
    "compute": (["--compute-dtype", "float16"], "--compute-dtype is not an option"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_that_do_not_fit_are_wrong_usage(case, tmp_path, capsys):
    arguments, phrase = WRONG[case]
    assert _quantize(_model(tmp_path), tmp_path / "q", *arguments) == 2
    assert phrase in capsys.readouterr().err
    assert helpers.listing(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--layout", "awq"], "--layout"),
        (["--group-size", "32"], "--group-size"),
        (["--symmetric"], "--symmetric or --asymmetric"),
        (["--asymmetric"], "--symmetric or --asymmetric"),
    ],
)
@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_options_of_integers_are_of_int4_alone(format, arguments, option, model, tmp_path, capsys):
    command = ["quantize", str(model), str(tmp_path / "q"), "--format", format, *arguments]
    assert main(command) == 2
    others = "int4, mxfp4 and nvfp4" if option == "--layout" else "int4"
    expected = f"{option} is not an option of --format {format}; it is one of {others}\n"
    assert capsys.readouterr().err.endswith(expected)


def test_options_of_another_format_are_refused_in_python():
    with pytest.raises(OptionError, match='symmetric is False, but format "fp4" has none'):
        QuantizeOptions(format="fp4", symmetric=False)
    with pytest.raises(OptionError, match='nested is False, but format "int4" has none'):
        QuantizeOptions(format="int4", nested=False)


def test_the_layout_is_checked_in_python(tmp_path):
    with pytest.raises(OptionError, match="layout is 'marlin'; expected gptq"):
        QuantizeOptions(format="int4", layout="marlin")
    with pytest.raises(OptionError, match="group_size is -8"):
        QuantizeOptions(format="int4", group_size=-8)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite_weights_are_refused_unless_allowed(value, tmp_path, capsys):
    bad = _dense()[NAMES[1]]
    bad[3, 5] = value
    source = _model(tmp_path, **{NAMES[1]: bad})
    assert _quantize(source, tmp_path / "q") == 3
    assert "at element 389 (see --allow-nonfinite)" in capsys.readouterr().err
    assert helpers.listing(tmp_path) == ["model"]
    assert _quantize(source, tmp_path / "q", "--allow-nonfinite") == 0
    assert main(["verify", str(tmp_path / "q")]) == 0


def test_4_bit_models_are_refused(quantized, tmp_path, capsys):
    assert _quantize(quantized, tmp_path / "again") == 3
    assert "it is 4-bit already (nf4)" in capsys.readouterr().err
    source = models.Case("gptq").folder(tmp_path / "gptq")
    for format in ("int4", "nf4"):
        arguments = ["quantize", str(source), str(tmp_path / "again"), "--format", format]
        assert main(arguments) == 3
        assert "the model is quantized by 'gptq'" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_shards_and_single_files(tmp_path):
    source = helpers.write_shards(tmp_path / "shards", _dense())
    options = QuantizeOptions(format="int4", group_size=32, layout="gptq")
    quantize_checkpoint(str(source), str(tmp_path / "q"), options)
    quantize_checkpoint(str(_model(tmp_path)), str(tmp_path / "one"), options)
    assert helpers.load_all(tmp_path / "q") == helpers.load_all(tmp_path / "one")
    single = tmp_path / "one" / "model.safetensors"
    quantize_checkpoint(
        str(tmp_path / "model" / "model.safetensors"), str(tmp_path / "a.safetensors"), options
    )
    assert helpers.load_all(tmp_path / "a.safetensors") == helpers.load_all(single)


def test_conv1d_stays_dense(tmp_path):
    tensors = {
        "h.0.attn.c_attn.weight": helpers.random_weight((64, 192), "float16"),
        "h.0.proj.weight": helpers.random_weight((64, 128), "float16"),
    }
    source = helpers.write_model(tmp_path / "model", tensors)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    result = quantize_checkpoint(str(source), str(tmp_path / "q"), QuantizeOptions(format="int4"))
    assert result.left_dense == {"Conv1D": 1} and result.weights == 1
