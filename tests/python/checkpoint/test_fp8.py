"""Layers in FP8 of mixed checkpoints: read to the bit, named by inspect and verify, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import nf4
import numpy as np
import pytest
from e2m1_checkpoints import CASES, LAYER, modelopt_config
from fp8_cases import FORMS, Fp8
from int4_checkpoints import write
from nf4.checkpoint import (
    Checkpoint,
    FormatError,
    convert_checkpoint,
    dequantize_checkpoint,
    survey,
)
from nf4.checkpoint.difference import Unmatched, differences
from nf4.cli import main

NVFP4 = next(case for case in CASES if case.name == "modelopt" and case.blocksize == 16)
OTHER = "model.layers.1.self_attn.q_proj"
SHAPE = (200, 160)
MIXED = {
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        LAYER: {"quant_algo": "NVFP4", "group_size": 16}, OTHER: {"quant_algo": "FP8"}
    },
}  # fmt: skip


def _folder(path: Path, more: dict[str, np.ndarray], **config: Any) -> Path:
    tensors = {**NVFP4.tensors(NVFP4.arrays()), **more}
    return write(path, tensors, modelopt_config("NVFP4") | MIXED | config)


def _problem(path: Path) -> str:
    with Checkpoint(path) as checkpoint:
        found = survey(checkpoint)
        (fault,) = found.faults
        assert OTHER not in found.dense
    return str(fault)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_values_are_rounded_products(form: Fp8, dtype, tmp_path):
    tensors = form.tensors(OTHER, SHAPE)
    source = _folder(tmp_path / "q", tensors)
    dequantize_checkpoint(str(source), str(tmp_path / "d"), dtype=dtype)
    made = nf4.load(tmp_path / "d")
    kinds = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
    expected = form.dense(tensors, OTHER).astype(kinds[dtype])
    assert made[f"{OTHER}.weight"].dtype == expected.dtype
    assert made[f"{OTHER}.weight"].tobytes() == expected.tobytes()
    assert made.keys() == {f"{OTHER}.weight", f"{LAYER}.weight"}
    assert "quantization_config" not in json.loads((tmp_path / "d/config.json").read_text())
    read = nf4.load(source)[f"{OTHER}.weight"]
    own = form.dense(tensors, OTHER).astype(read.dtype)
    assert read.tobytes() == own.tobytes()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_inspect_and_verify_name_them(form: Fp8, tmp_path, capsys):
    tensors = form.tensors(OTHER, SHAPE)
    beside = {f"{OTHER}.input_scale": np.ones((), np.float32)}
    source = _folder(tmp_path / "q", {**tensors, **beside})
    assert main(["verify", str(source)]) == 0
    assert "1 weights in FP8" in capsys.readouterr().out
    assert main(["inspect", str(source), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = (each for each in document["tensors"] if each["format"] == "fp8")
    assert (row["name"], row["shape"]) == (f"{OTHER}.weight", list(SHAPE))
    assert row["bytes"] == sum(each.nbytes for each in tensors.values())
    totals = document["totals"]
    parts = totals["weight_bytes"] + totals["dense_bytes"] + totals["fp8_bytes"]
    assert parts == totals["bytes"] and totals["fp8_weights"] == 1
    assert main(["inspect", str(source)]) == 0
    assert "FP8    1 weights, 32,000 elements" in capsys.readouterr().out
    assert main(["dequantize", str(source), str(tmp_path / "d")]) == 0
    assert "dequantized 1 weights in FP8" in capsys.readouterr().out


def test_values_that_are_no_numbers_are_named(tmp_path, capsys):
    tensors = FORMS[0].tensors(OTHER, SHAPE)
    tensors[f"{OTHER}.weight"].view(np.uint8)[3, 4] = 0xFF
    source = _folder(tmp_path / "q", tensors)
    assert main(["verify", str(source)]) == 0
    assert "weight: 1 of 32000 are NaN, first at 484" in capsys.readouterr().out
    tensors[f"{OTHER}.weight_scale"] = np.array(np.nan, np.float32)
    assert main(["verify", str(_folder(tmp_path / "n", tensors))]) == 1
    assert "weight_scale: 1 of 1 are NaN" in capsys.readouterr().out
    assert np.isnan(nf4.load(tmp_path / "n")[f"{OTHER}.weight"]).all()


def _without(tensors: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: each for key, each in tensors.items() if not key.endswith(name)}


def _plain() -> dict[str, np.ndarray]:
    return FORMS[0].tensors(OTHER, SHAPE)


def _scales(array: np.ndarray) -> dict[str, np.ndarray]:
    return {**_plain(), f"{OTHER}.weight_scale": array}


REFUSED = {
    "in FP8 beside no scales": lambda: _without(_plain(), "_scale"),
    "beside .*weight_scale and .*scale; expected one": lambda: {
        **_plain(), f"{OTHER}.scale": np.ones((), np.float32)
    },
    r"weight_scale is of shape \[4, 3\]; expected": lambda: _scales(np.ones((4, 3), np.float32)),
    r"weight_scale is of shape \[200, 5\]; expected": lambda: _scales(
        np.ones((200, 5), np.float32)
    ),
    "weight_scale is F8_E4M3; expected": lambda: _scales(np.ones((), ml_dtypes.float8_e4m3fn)),
    r"FP8 of shape \[2, 8, 64\]": lambda: FORMS[0].tensors(OTHER, SHAPE) | {
        f"{OTHER}.weight": np.ones((2, 8, 64), ml_dtypes.float8_e4m3fn)
    },
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_not_understood_is_refused_by_name(said, tmp_path):
    source = _folder(tmp_path / "q", REFUSED[said]())
    with pytest.raises(FormatError, match=f"{OTHER}.weight': .*{said}"):
        dequantize_checkpoint(str(source), str(tmp_path / "d"))
    assert f"{OTHER}.weight" in _problem(source)
    assert main(["verify", str(source)]) == 1


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.mlp.experts.gate_up_proj", (2, 8, 64)),
        (f"{OTHER}.bias", (160,)),
        (f"{LAYER}.bias", (64,)),
    ],
)
def test_floats_of_8_bits_elsewhere_are_refused(name, shape, tmp_path):
    more = {name: np.ones(shape, ml_dtypes.float8_e4m3fn)}
    problem = _problem(_folder(tmp_path / "q", more))
    assert name in problem and "it is F8_E4M3, which no dense weight is" in problem


def test_pre_quant_scales_are_refused(tmp_path):
    more = {**_plain(), f"{OTHER}.pre_quant_scale": np.ones(160, np.float32)}
    assert "pre_quant_scale" in _problem(_folder(tmp_path / "q", more))


def test_convert_refuses_them_by_name(tmp_path):
    source = _folder(tmp_path / "q", _plain())
    for to in ("compressed-tensors", "nf4"):
        with pytest.raises(FormatError, match=f"{OTHER}.weight': it is in FP8"):
            convert_checkpoint(str(source), str(tmp_path / "c"), to)


def test_without_the_setting_they_are_faults(tmp_path):
    source = _folder(tmp_path / "q", _plain(), quant_algo="NVFP4", quantized_layers=None)
    assert main(["verify", str(source)]) == 1


@pytest.mark.parametrize("form", [FORMS[0], FORMS[-1]], ids=str)
def test_compare_reads_them(form: Fp8, tmp_path, capsys):
    tensors = form.tensors(OTHER, SHAPE)
    mixed = _folder(tmp_path / "q", tensors)
    dequantize_checkpoint(str(mixed), str(tmp_path / "d"), dtype="fp32")
    with Checkpoint(tmp_path / "d") as dense, Checkpoint(mixed) as other:
        for pair in ((dense, other), (other, dense), (other, other)):
            found, unmatched = differences(*pair)
            formats = {each.name: each.formats for each in found}
            assert all(each.error.squared_error == 0 for each in found)
            names = tuple("fp8" if each is other else "dense" for each in pair)
            assert formats[f"{OTHER}.weight"] == names and unmatched == Unmatched([], [])
    assert main(["compare", str(tmp_path / "d"), str(mixed), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert "fp8" in json.dumps(rows)
