"""Checkpoints of MXFP4 and NVFP4: found, inspected, verified, dequantized, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint_helpers as helpers
import e2m1_checkpoints as models
import int4_checkpoints
import ml_dtypes
import nf4
import numpy as np
import pytest
from e2m1_checkpoints import CASES, LAYER, STACK, Arrays, Case
from int4_checkpoints import findings
from nf4.checkpoint import Checkpoint, FormatError, dequantize_checkpoint, survey
from nf4.cli import main

pytestmark = pytest.mark.usefixtures("in_process")
BY_NAME = {str(case): case for case in CASES}
NVFP4 = BY_NAME["modelopt-nvfp4-16"]
GPT_OSS = BY_NAME["gpt-oss-mxfp4-32"]
CT_MXFP4 = BY_NAME["compressed-tensors-mxfp4-32"]
CT_NVFP4 = BY_NAME["compressed-tensors-nvfp4-16"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_weight_has_the_bytes_of_its_file(case, tmp_path):
    source, arrays = case.folder(tmp_path / "q"), case.arrays()
    with Checkpoint(source) as checkpoint:
        found = survey(checkpoint)
        assert not found.faults
        (weight,) = found.weights.values()
        assert weight.name == f"{case.module}.weight" and weight.shape == case.shape
        assert (weight.format, weight.dtype) == (case.format, "bf16")
        assert weight.describe()["layout"] == case.name
        q = weight.load(checkpoint)
    assert q.packed.tobytes() == arrays.packed.tobytes()
    assert q.absmax.tobytes() == arrays.scales.tobytes()
    assert (q.format, q.blocksize, q.shape) == (case.format, case.blocksize, case.shape)
    assert q.scale_rule == ("divisor" if case.divides else None)
    assert (q.nested_absmax is None) == (case.format == "mxfp4")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inspect_and_verify(case, tmp_path, capsys):
    source = case.folder(tmp_path / "q")
    assert main(["verify", str(source)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(source)]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if case.module in each]
    assert f"{case.format} (bf16)" in line and f" {case.blocksize} " in line
    assert ("e8m0" if case.format == "mxfp4" else "e4m3 + fp32") in line


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dequantize_gives_the_values_of_the_format(case, dtype, tmp_path):
    source = case.folder(tmp_path / "q")
    assert main(["dequantize", str(source), str(tmp_path / "d"), "--dtype", dtype]) == 0
    stored = helpers.load_all(tmp_path / "d")
    name = case.module if case.name == "gpt-oss" else f"{case.module}.weight"
    assert stored.keys() == {name, "lm_head.weight", "model.embed_tokens.weight"}
    expected = case.arrays().dense(dtype, case.divides)
    assert stored[name][1:] == (expected.shape, expected.tobytes())
    assert "quantization_config" not in (tmp_path / "d" / "config.json").read_text()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_single_file_is_read_by_its_names_and_dtypes(case, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(helpers.file_bytes(case.tensors(case.arrays())))
    dequantize_checkpoint(str(file), str(tmp_path / "dense.safetensors"), dtype="fp32")
    ((_, _, data),) = helpers.load_all(tmp_path / "dense.safetensors").values()
    assert data == case.arrays().dense("fp32", case.divides).tobytes()


# The golden bytes of compressed-tensors and ModelOpt for one weight of 2 x 32
# (tests/golden/make_golden_e2m1.py): codes, scales, global scale, and y in bf16, 4 of each row.
_GOLDEN = {
    "compressed-tensors-mxfp4-32": (
        "bfe5692ec7f45a0ed6724cafe6613dc7f5692ed7f45b8ee6724cafe6603dc7f5", "7e77", None,
        (0xC040, 0xBF40, 0x3FC0, 0xC000, 0x3C40, 0xBCC0, 0xBB00, 0x3C80),
    ),
    "compressed-tensors-nvfp4-16": (
        "bfe5692ec7f45a0ed6724cafe6613db7f5692ed7f45b8ee6724cafe5603dc7f5", "7e7e4546", 0x44570A3D,
        (0xC048, 0xBF48, 0x3FC8, 0xC005, 0x3C3A, 0xBCBA, 0xBAF8, 0x3C78),
    ),
    "modelopt-nvfp4-16": (
        "bfe5692ec7f45a0ed6724cafe6613db7f5692ed7f45b8ee6724cafe5603dc7f5", "7e7e4546", 0x3A986186,
        (0xC048, 0xBF48, 0x3FC8, 0xC005, 0x3C3A, 0xBCBA, 0xBAF8, 0x3C78),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _GOLDEN)
def test_golden_bytes_of_the_writers(name, tmp_path):
    packed, scales, of_all, expected = _GOLDEN[name]
    arrays = Arrays(
        np.frombuffer(bytes.fromhex(packed), np.uint8).reshape(2, 16),
        np.frombuffer(bytes.fromhex(scales), np.uint8).reshape(2, -1),
        None if of_all is None else np.uint32(of_all).view(np.float32),
    )
    source = BY_NAME[name].folder(tmp_path / "q", arrays)
    dequantize_checkpoint(str(source), str(tmp_path / "d"))
    _, shape, data = helpers.load_all(tmp_path / "d")[f"{LAYER}.weight"]
    assert shape == (2, 32)
    assert np.frombuffer(data, np.uint16).reshape(2, 32)[:, :4].ravel().tolist() == list(expected)


def _nan(case: Case, byte: int) -> Arrays:
    arrays = case.arrays()
    arrays.scales[..., 0, -1] = byte
    return arrays


@pytest.mark.parametrize(
    ("case", "byte"), [(GPT_OSS, 255), (CT_MXFP4, 255), (CT_NVFP4, 0x7F), (NVFP4, 0xFF)], ids=str
)
def test_nan_scale_bytes_are_named_and_give_nan(case, byte, tmp_path):
    arrays = _nan(case, byte)
    source = case.folder(tmp_path / "q", arrays)
    (fault,) = findings("fault", source)
    assert "are NaN, first at" in fault and "scale" in fault
    dequantize_checkpoint(str(source), str(tmp_path / "d"))
    stored = helpers.load_all(tmp_path / "d")
    name = case.module if case.name == "gpt-oss" else f"{case.module}.weight"
    dense = np.frombuffer(stored[name][2], ml_dtypes.bfloat16).reshape(case.shape)
    block = dense[..., 0, -case.blocksize :].astype(np.float32)
    assert np.isnan(block).all()
    assert np.isnan(dense.astype(np.float32)).sum() == block.size


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0])
def test_a_global_scale_is_positive(value, tmp_path):
    arrays = NVFP4.arrays()
    source = NVFP4.folder(tmp_path / "q", Arrays(arrays.packed, arrays.scales, np.float32(value)))
    (fault,) = findings("fault", source)
    assert "weight_scale_2" in fault and "expected a positive number" in fault


def _fault(source: Path) -> str:
    """The message by which dequantize refuses a checkpoint."""
    with pytest.raises(FormatError) as caught:
        dequantize_checkpoint(str(source), str(source.parent / "refused"))
    assert findings("fault", source)
    assert not (source.parent / "refused").exists()
    return str(caught.value)


def _write(path: Path, case: Case, tensors: dict[str, Any], **config: Any) -> Path:
    stored = {name: each for name, each in tensors.items() if each is not None}
    return int4_checkpoints.write(path, stored, {**case.config, **config})


@pytest.mark.parametrize(
    ("case", "name", "shape"),
    [
        (NVFP4, f"{LAYER}.pre_quant_scale", (64,)),
        (NVFP4, f"{LAYER}.svdquant_lora_a", (4, 64)),
        (NVFP4, f"{LAYER}.svdquant_lora_b", (24, 4)),
        (CT_MXFP4, f"{LAYER}.weight_zero_point", (24, 2)),
        (CT_NVFP4, f"{LAYER}.weight_g_idx", (64,)),
        (CT_NVFP4, f"{LAYER}.weight", (24, 64)),
    ],
    ids=str,
)
def test_tensors_that_change_a_weight_are_refused_by_name(case, name, shape, tmp_path):
    more = {name: helpers.random_weight(shape, "bfloat16")}
    source = _write(tmp_path / "q", case, {**case.tensors(case.arrays()), **more})
    message = _fault(source)
    assert name in message or "dense weight too" in message


def test_tensors_of_activations_and_caches_are_ignored(tmp_path):
    one = np.ones(1, np.float32)
    for case in (CT_NVFP4, NVFP4):
        more = {f"{LAYER}.{name}": one for name in ("input_scale", "input_global_scale", "k_scale")}
        source = _write(tmp_path / str(case), case, {**case.tensors(case.arrays()), **more})
        assert main(["verify", str(source)]) == 0
        dequantize_checkpoint(str(source), str(tmp_path / f"{case}-d"))
        assert helpers.load_all(tmp_path / f"{case}-d").keys() == {f"{LAYER}.weight"}


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        (NVFP4, {"weight_scale_2": None}, "its weight_scale_2 is missing"),
        (NVFP4, {"weight_scale": None}, "its weight_scale is missing"),
        (CT_NVFP4, {"weight_global_scale": np.ones(2, np.float32)}, "expected [1]"),
        (CT_NVFP4, {"weight_packed": None}, "weight_scale is a part of something quantized"),
        # Swizzled scales are padded to tiles of 128 x 4.
        (CT_MXFP4, {"weight_scale": np.ones((128, 4), np.uint8)}, "in the order of the columns"),
        (CT_MXFP4, {"weight_packed": np.ones((24, 20), np.uint8)}, "2 scales for 40 columns"),
        (NVFP4, {"weight_scale": np.ones((24, 8), ml_dtypes.float8_e4m3fn)}, "8 scales for 64"),
        (CT_MXFP4, {"weight_scale": np.ones((23, 2), np.uint8)}, "expected [24, 2]"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(case, change, said, tmp_path):
    changed = {f"{LAYER}.{name}": each for name, each in change.items()}
    source = _write(tmp_path / "q", case, {**case.tensors(case.arrays()), **changed})
    assert said in _fault(source)


def test_parts_of_gpt_oss(tmp_path):
    tensors = GPT_OSS.tensors(GPT_OSS.arrays())
    for number, (name, each, said) in enumerate((
        ("_blocks", None, "it has scales, but no blocks"),
        ("_scales", None, "its scales is missing"),
        ("_blocks", np.ones((3, 8, 4, 8), np.uint8), "scales for 64"),
        ("_blocks", np.ones((3, 8, 32), np.uint8), "expected 4 dimensions"),
    )):  # fmt: skip
        changed = {**tensors, STACK + name: each}
        message = _fault(_write(tmp_path / f"{number}", GPT_OSS, changed))
        assert said in message or "shape" in message, said


@pytest.mark.parametrize(
    ("case", "config", "said"),
    [
        (NVFP4, {"quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ' is not read"),
        (NVFP4, {"quant_algo": "NVFP4_SVD"}, "quant_algo 'NVFP4_SVD' is not read"),
        (NVFP4, {"quant_algo": "FP8"}, "quant_algo 'FP8' is not read"),
        (NVFP4, {"group_size": 64}, "group_size is 64; expected 16 or 32"),
        (NVFP4, {"group_size": 32}, "its blocks have 16 columns, but config.json says 32"),
        (NVFP4, {"quant_algo": "MXFP4"}, "it is nvfp4 of modelopt, but config.json says mxfp4"),
        (CT_NVFP4, {"transform_config": {"R1": {}}}, "transform_config"),
        (CT_NVFP4, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (NVFP4, {"quant_algo": "MIXED_PRECISION"}, "quantized_layers is not an object"),
        (
            NVFP4,
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "INT4"}}},
            "quant_algo 'INT4' is not read",
        ),
    ],
)
def test_settings_that_are_not_understood_are_refused_by_name(case, config, said, tmp_path):
    assert said in _fault(case.folder(tmp_path / "q", **config))


@pytest.mark.parametrize(
    ("case", "weights", "said"),
    [
        (CT_NVFP4, {"group_size": 64}, "group_size is 64"),
        (CT_NVFP4, {"num_bits": 8}, "num_bits is 8"),
        (CT_MXFP4, {"symmetric": False}, "zero points of floats are not read"),
        (CT_MXFP4, {"strategy": "channel"}, "strategy is 'channel'"),
        (CT_MXFP4, {"type": "int"}, "type is 'int'"),
    ],
)
def test_groups_of_compressed_tensors_that_are_refused(case, weights, said, tmp_path):
    (group,) = case.config["config_groups"].values()
    changed = {**group, "weights": {**group["weights"], **weights}}
    assert said in _fault(case.folder(tmp_path / "q", config_groups={"group_0": changed}))


def test_modelopts_own_file_says_the_same_as_config_json(tmp_path):
    beside = {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
    }
    tensors = NVFP4.tensors(NVFP4.arrays())
    for number, config in enumerate((None, NVFP4.config)):
        source = int4_checkpoints.write(tmp_path / f"{number}", tensors, config)
        (source / "hf_quant_config.json").write_text(json.dumps(beside))
        assert main(["verify", str(source)]) == 0
    beside["quantization"]["quant_algo"] = "FP8"
    (source / "hf_quant_config.json").write_text(json.dumps(beside))
    (fault,) = findings("fault", source)
    assert "says quant_algo 'FP8', but" in fault


def test_a_dense_list_that_names_a_4_bit_module_is_a_fault(tmp_path):
    (fault,) = findings("fault", CT_NVFP4.folder(tmp_path / "q", ignore=[LAYER]))
    assert fault == f"the settings leave {LAYER} dense, but it is in 4 bits"


def test_arrays_of_the_oracle_round_once():
    """The oracle's own rules: e4m3 as ml_dtypes has it, one rounding per step."""
    every = np.arange(256, dtype=np.uint8)
    theirs = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ours = np.array([models.e4m3(byte) for byte in range(256)], np.float32)
    np.testing.assert_array_equal(ours, theirs)


_ODD = (None, True, 4, -1, 1.5, "", "fp4", [], [1], {}, {"a": []}, [{"weights": 3}])


def _changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    """A copy of nested objects with one value replaced."""
    if not path:
        return to
    return {**value, path[0]: _changed(value[path[0]], path[1:], to)}


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if not isinstance(value, dict):
        return [path]
    return [path, *(each for key in value for each in _paths(value[key], (*path, key)))][
        0 if path else 1 :
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_settings_of_any_type_give_a_format_error_or_the_weight(case, tmp_path):
    """Each value of the settings, replaced by values of other types."""
    source = case.folder(tmp_path / "q")
    file, read = source / "config.json", 0
    document = json.loads(file.read_text())
    for path in _paths(case.config):
        for odd in _ODD:
            config = _changed(case.config, path, odd)
            file.write_text(json.dumps({**document, "quantization_config": config}))
            try:
                with Checkpoint(source) as checkpoint:
                    read += not survey(checkpoint).faults
            except FormatError:
                pass
    assert read
    mixed = {"quant_algo": "MIXED_PRECISION", "quant_method": "modelopt"}
    for odd in (*_ODD, *({"a": each} for each in _ODD), {"a": {"quant_algo": [1]}}):
        config = {**mixed, "quantized_layers": odd}
        file.write_text(json.dumps({**document, "quantization_config": config}))
        with pytest.raises(FormatError), Checkpoint(source) as checkpoint:
            survey(checkpoint)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_of_any_dtype_and_shape_give_faults_and_no_other_error(case, tmp_path):
    tensors = case.tensors(case.arrays())
    shapes = ((), (0,), (1,), (24, 0), (24, 2), (2, 24), (24, 32), (3, 8, 2), (1, 2, 3, 4, 5))
    dtypes = ("uint8", "int8", "float32", "float16", "int32")
    for number, name in enumerate(tensors):
        for shape in shapes:
            for dtype in dtypes:
                odd = np.zeros(shape, dtype)
                if (odd.dtype, odd.shape) == (tensors[name].dtype, tensors[name].shape):
                    continue
                file = tmp_path / f"{number}.safetensors"
                file.write_bytes(helpers.file_bytes({**tensors, name: odd}))
                with Checkpoint(file) as checkpoint:
                    found = survey(checkpoint)
                    is_one = name.endswith(("weight_scale_2", "weight_global_scale"))
                    assert found.faults or found.unread or not found.weights or is_one


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_are_loaded_and_saved_as_arrays(case, tmp_path):
    """nf4.save writes what libnf4 alone reads, in a file and in a folder."""
    (name, q), *_ = (
        each
        for each in nf4.load(case.folder(tmp_path / "q")).items()
        if isinstance(each[1], nf4.QuantizedTensor)
    )
    for path in (tmp_path / "again.safetensors", tmp_path / "again"):
        nf4.save(path, {name: q})
        again = nf4.load(path)[name]
        assert again.packed.tobytes() == q.packed.tobytes()
        assert (again.format, again.shape, again.scale_rule) == (q.format, q.shape, q.scale_rule)
        expected = case.arrays().dense("fp32", case.divides)
        np.testing.assert_array_equal(nf4.dequantize(again, "fp32"), expected)
        assert findings("fault", path) == []
    assert helpers.stored_config(tmp_path / "again")["quant_method"] == "nf4"
