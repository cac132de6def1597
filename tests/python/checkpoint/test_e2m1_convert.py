"""nf4 convert of MXFP4 and NVFP4: between layouts without loss, to NF4 with a loss that is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import checkpoint_helpers as helpers
import e2m1_checkpoints as models
import int4_checkpoints
import ml_dtypes
import numpy as np
import pytest
from e2m1_checkpoints import CASES, LAYER, Arrays, Case
from nf4.checkpoint import FormatError, OptionError, convert_checkpoint, dequantize_checkpoint
from nf4.cli import main

pytestmark = pytest.mark.usefixtures("in_process")
BY_NAME = {str(case): case for case in CASES}
CT_MXFP4, CT_NVFP4, NVFP4, DEEPSEEK, MODELOPT_MXFP4, GPT_OSS = (
    BY_NAME[name]
    for name in (
        "compressed-tensors-mxfp4-32", "compressed-tensors-nvfp4-16", "modelopt-nvfp4-16",
        "deepseek-mxfp4-32", "modelopt-mxfp4-32", "gpt-oss-mxfp4-32",
    )
)  # fmt: skip


def _values(path: Path) -> bytes:
    made = path.with_name(f"{path.name}-dense")
    dequantize_checkpoint(str(path), str(made))
    return helpers.load_all(made)[f"{LAYER}.weight"][2]


def _exact(case: Case) -> Arrays:
    """A weight whose global scale is a power of two, so that its inverse is exact."""
    return dataclasses.replace(case.arrays(), of_all=np.float32(2.0**-9))


@pytest.mark.parametrize(
    ("case", "to"),
    [
        (NVFP4, "compressed-tensors"),
        (CT_NVFP4, "modelopt"),
        (MODELOPT_MXFP4, "compressed-tensors"),
        (DEEPSEEK, "compressed-tensors"),
    ],
    ids=str,
)
def test_another_layout_has_the_same_values(case, to, tmp_path):
    arrays = _exact(case) if case.format == "nvfp4" else case.arrays()
    source, made = case.folder(tmp_path / "q", arrays), tmp_path / "made"
    assert main(["convert", str(source), str(made), "--to", to]) == 0
    assert main(["verify", str(made)]) == 0
    assert _values(made) == _values(source)
    kind = next(each for each in CASES if (each.name, each.format) == (to, case.format))
    stored, expected = helpers.load_all(made), kind.tensors(arrays)
    assert {n: each[:2] for n, each in stored.items() if LAYER in n} == {
        name: (helpers.NUMPY_NAMES[each.dtype.name], each.shape) for name, each in expected.items()
    }
    config = helpers.stored_config(made)
    assert config["quant_method"] == to and config["ignore"] == ["lm_head"]


def test_an_inverse_that_is_not_exact_is_refused_or_changes_nothing(tmp_path):
    """Of random global scales, those that pass have the same weights in bf16."""
    passed = 0
    for seed in range(12):
        of_all = np.float32(np.random.default_rng(seed).uniform(1e-4, 1e-3))
        arrays = dataclasses.replace(NVFP4.arrays(), of_all=of_all)
        source, made = NVFP4.folder(tmp_path / f"{seed}", arrays), tmp_path / f"{seed}-made"
        try:
            convert_checkpoint(str(source), str(made), "compressed-tensors")
        except FormatError as error:
            assert "without loss" in str(error) and not made.exists()
            continue
        passed += 1
        assert _values(made) == _values(source)
    assert passed > 6


@pytest.mark.parametrize("of_all", [0, -0.7, np.inf, np.nan])
@pytest.mark.parametrize(
    ("case", "to"), [(NVFP4, "compressed-tensors"), (CT_NVFP4, "modelopt")], ids=str
)
def test_a_global_scale_that_is_not_positive_is_not_written(case, to, of_all, tmp_path):
    arrays = dataclasses.replace(case.arrays(), of_all=np.float32(of_all))
    source, made = case.folder(tmp_path / "q", arrays), tmp_path / "made"
    with pytest.raises(FormatError, match=f"cannot become {to}: its global scale is"):
        convert_checkpoint(str(source), str(made), to)
    assert not made.exists()


def test_an_infinite_inverse_is_not_written(tmp_path):
    """The weights are zeros in fp16, which an infinite divisor gives too."""
    arrays = dataclasses.replace(NVFP4.arrays(), of_all=np.float32(1e-39))
    source, made = NVFP4.folder(tmp_path / "q", arrays), tmp_path / "made"
    document = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**document, "dtype": "float16"}))
    convert_checkpoint(str(source), str(made), "compressed-tensors")
    assert main(["verify", str(made)]) == 0
    assert _values(made) == _values(source)


def test_to_nf4_with_the_loss_that_inspect_finds(tmp_path, capsys):
    for case in (CT_MXFP4, NVFP4, CT_NVFP4, DEEPSEEK):
        folder = tmp_path / str(case)
        source = case.folder(folder / "q")
        made, dense = folder / "nf4", folder / "dense"
        assert main(["convert", str(source), str(made), "--to", "nf4"]) == 0
        report = capsys.readouterr().out
        assert main(["convert", str(source), str(made), "--to", "nf4", "--json", "--force"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert main(["dequantize", str(source), str(dense), "--dtype", "fp32"]) == 0
        capsys.readouterr()
        assert main(["inspect", str(made), "--dense", str(dense), "--json"]) == 0
        totals = json.loads(capsys.readouterr().out)["totals"]
        assert document["rms_relative_error"] == totals["rms_relative_error"]
        assert document["max_abs_error"] == totals["max_abs_error"]
        assert f"error  rms {100 * totals['rms_relative_error']:.2f} %" in report
        assert 0.01 < totals["rms_relative_error"] < 0.2
        assert helpers.stored_config(made)["bnb_4bit_quant_type"] == "nf4"


@pytest.mark.parametrize(
    ("case", "to", "said"),
    [
        (CT_MXFP4, "modelopt", "no mxfp4 is written there"),
        (BY_NAME["modelopt-nvfp4-32"], "compressed-tensors", "its blocks have 32 columns"),
        (GPT_OSS, "compressed-tensors", "its experts are one stack"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(case, to, said, tmp_path):
    source = case.folder(tmp_path / "q")
    with pytest.raises(FormatError, match=said):
        convert_checkpoint(str(source), str(tmp_path / "made"), to)
    assert not (tmp_path / "made").exists()


def test_nan_is_not_quantized_to_nf4(tmp_path):
    arrays = CT_MXFP4.arrays()
    arrays.scales[0, 0] = 255
    with pytest.raises(FormatError, match="NaN or Inf, which NF4 cannot hold"):
        convert_checkpoint(
            str(CT_MXFP4.folder(tmp_path / "q", arrays)), str(tmp_path / "made"), "nf4"
        )


def test_targets_are_those_of_the_kind_of_weights(tmp_path):
    floats = CT_NVFP4.folder(tmp_path / "floats")
    integers = int4_checkpoints.CASES[0].folder(tmp_path / "integers")
    for source, to in ((floats, "awq"), (integers, "nf4"), (integers, "modelopt")):
        with pytest.raises(OptionError, match="for its weights"):
            convert_checkpoint(str(source), str(tmp_path / "made"), to)
    with pytest.raises(OptionError, match="already"):
        convert_checkpoint(str(floats), str(tmp_path / "made"), "compressed-tensors")


def test_scales_of_a_cache_are_not_dropped(tmp_path):
    scheme = {"num_bits": 8, "type": "float"}
    source = CT_NVFP4.folder(tmp_path / "q", kv_cache_scheme=scheme)
    with pytest.raises(FormatError, match="cache of keys"):
        convert_checkpoint(str(source), str(tmp_path / "made"), "modelopt")


def test_modelopts_file_does_not_stay_beside_another_layout(tmp_path):
    source = NVFP4.folder(tmp_path / "q", _exact(NVFP4))
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (source / "hf_quant_config.json").write_text(json.dumps(said))
    for command in (["dequantize"], ["convert", "--to", "compressed-tensors"]):
        made = tmp_path / command[0]
        assert main([command[0], str(source), str(made), *command[1:]]) == 0
        assert not (made / "hf_quant_config.json").exists()


def test_values_of_every_scale_byte(tmp_path):
    """A weight with all scale bytes of NVFP4 in fp32, of which an inverse is seldom exact."""
    scales = np.arange(256, dtype=np.uint8)[(np.arange(256) & 0x7F) != 0x7F].reshape(2, 127)
    packed = np.random.default_rng(0).integers(0, 256, (2, 127 * 8), np.uint8)
    arrays = Arrays(packed, scales, np.float32(0.0003))
    source = CT_NVFP4.folder(tmp_path / "q", arrays)
    assert models.e4m3(0x7E) == 448
    dequantize_checkpoint(str(source), str(tmp_path / "d"), dtype="bf16")
    data = helpers.load_all(tmp_path / "d")[f"{LAYER}.weight"][2]
    assert data == arrays.dense("bf16", divides=True).tobytes()
    assert np.frombuffer(data, ml_dtypes.bfloat16).size == 2 * 127 * 16
