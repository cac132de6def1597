"""bitsandbytes' 4-bit layout: what is written, and what is refused when read."""

from __future__ import annotations

import json

import checkpoint_helpers as helpers
import nf4
import numpy as np
import pytest
from nf4.checkpoint import (
    Checkpoint,
    QuantizeOptions,
    State,
    audit,
    dequantize_checkpoint,
    quantize_checkpoint,
    survey,
)
from nf4.checkpoint.audit import value_problems
from nf4.checkpoint.dtypes import NUMPY, STORAGE
from nf4.cli import main

NAME = "layer.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"


def _parts(nested: bool = True, shape: tuple[int, ...] = (8, 40)) -> dict[str, np.ndarray]:
    """The tensors of one 4-bit weight, made here and not by the code under test."""
    weight = nf4.quantize(helpers.random_weight(shape), nested_blocksize=256 if nested else 0)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(shape)}
    parts = {
        NAME: weight.packed.reshape(-1, 1),
        f"{NAME}.absmax": weight.absmax,
        f"{NAME}.quant_map": nf4.codebook("nf4"),
    }
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32"}
        state["nested_offset"] = float(np.asarray(weight.nested_offset).item())
        parts[f"{NAME}.nested_absmax"] = weight.nested_absmax
        parts[f"{NAME}.nested_quant_map"] = weight.nested_code
    parts[STATE] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return parts


def _with_state(parts: dict[str, np.ndarray], **changes: object) -> dict[str, np.ndarray]:
    state = json.loads(parts[STATE].tobytes()) | changes
    state = {key: value for key, value in state.items() if value is not ...}
    return parts | {STATE: np.frombuffer(json.dumps(state).encode(), np.uint8)}


def _without(parts: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in parts.items() if key != name}


def _raw_state(parts: dict[str, np.ndarray], text: bytes) -> dict[str, np.ndarray]:
    return parts | {STATE: np.frombuffer(text, np.uint8)}


FAULTS = {
    "no absmax": (lambda p: _without(p, f"{NAME}.absmax"), "its absmax is missing"),
    "no quant_map": (lambda p: _without(p, f"{NAME}.quant_map"), "its quant_map is missing"),
    "no nested_absmax": (
        lambda p: _without(p, f"{NAME}.nested_absmax"),
        "nested_absmax is missing",
    ),
    "no nested_quant_map": (
        lambda p: _without(p, f"{NAME}.nested_quant_map"),
        "nested_quant_map is missing",
    ),
    "no quant_state": (lambda p: _without(p, STATE), "but no quant_state"),
    "no packed bytes": (lambda p: _without(p, NAME), "packed bytes are missing"),
    "two quant_states": (
        lambda p: p | {f"{NAME}.quant_state.bitsandbytes__fp4": p[STATE]},
        "2 quant_states",
    ),
    "unknown format": (
        lambda p: _without(p, STATE) | {f"{NAME}.quant_state.bitsandbytes__int4": p[STATE]},
        "'int4'; expected nf4, fp4",
    ),
    "state under the wrong key": (
        lambda p: _without(p, STATE) | {f"{NAME}.quant_state.bitsandbytes__fp4": p[STATE]},
        "quant_type 'nf4' under a key for 'fp4'",
    ),
    "state of floats": (
        lambda p: p | {STATE: np.ones(4, np.float32)},
        "its quant_state is F32 of 16 bytes",
    ),
    "huge state": (lambda p: _raw_state(p, b" " * 70_000), "not JSON as U8"),
    "empty state": (lambda p: _raw_state(p, b""), "not valid JSON"),
    "state not UTF-8": (lambda p: _raw_state(p, b"\xff"), "not UTF-8"),
    "state a list": (lambda p: _raw_state(p, b"[]"), "not a JSON object"),
    "state with NaN": (lambda p: _raw_state(p, b'{"nested_offset": NaN}'), "NaN is not JSON"),
    "state nested deeply": (lambda p: _raw_state(p, b"[" * 60_000), "quant_state is"),
    "state with duplicates": (
        lambda p: _raw_state(p, b'{"blocksize": 64, "blocksize": 64}'),
        "duplicate key 'blocksize'",
    ),
    "blocksize 0": (lambda p: _with_state(p, blocksize=0), "blocksize 0"),
    "blocksize 48": (lambda p: _with_state(p, blocksize=48), "blocksize 48"),
    "blocksize true": (lambda p: _with_state(p, blocksize=True), "blocksize True"),
    "blocksize 64.0": (lambda p: _with_state(p, blocksize=64.0), "blocksize 64.0"),
    "blocksize contradicts absmax": (
        lambda p: _with_state(p, blocksize=32),
        "its absmax is U8 of 5, but its quant_state requires U8 of 10",
    ),
    "unknown dtype": (lambda p: _with_state(p, dtype="float8"), "dtype 'float8'"),
    "no shape": (lambda p: _with_state(p, shape=None), "shape None"),
    "shape of nothing": (lambda p: _with_state(p, shape=[]), "shape []"),
    "negative shape": (lambda p: _with_state(p, shape=[-8, 40]), "shape [-8, 40]"),
    "shape overflows": (lambda p: _with_state(p, shape=[2**40, 2**40]), "overflows"),
    "shape overflows behind a zero": (
        lambda p: _with_state(p, shape=[0, 2**40, 2**40]),
        "overflows",
    ),
    "shape contradicts packed": (
        lambda p: _with_state(p, shape=[8, 39]),
        "160 packed bytes, but shape [8, 39] takes 156",
    ),
    "nested_blocksize 3": (lambda p: _with_state(p, nested_blocksize=3), "nested_blocksize 3"),
    "nested_blocksize contradicts": (
        lambda p: _with_state(p, nested_blocksize=2),
        "its nested_absmax is F32 of 1, but its quant_state requires F32 of 3",
    ),
    "nested_dtype": (lambda p: _with_state(p, nested_dtype="float16"), "nested_dtype 'float16'"),
    "nested_offset missing": (lambda p: _with_state(p, nested_offset=...), "nested_offset None"),
    "nested_offset beyond float32": (
        lambda p: _with_state(p, nested_offset=1e39),
        "nested_offset 1e+39",
    ),
    "nested parts of a flat weight": (
        lambda p: _with_state(
            p | {f"{NAME}.absmax": np.ones(5, np.float32)},
            nested_blocksize=...,
            nested_dtype=...,
            nested_offset=...,
        ),
        "not nested",
    ),
    "flat absmax of a nested weight": (
        lambda p: p | {f"{NAME}.absmax": np.ones(5, np.float32)},
        "its absmax is F32 of 5",
    ),
    "packed as int64": (
        lambda p: p | {NAME: p[NAME].reshape(-1).view(np.int64)},
        "cannot be stored as I64",
    ),
    "packed as a row": (lambda p: p | {NAME: p[NAME].reshape(1, -1)}, "expected a single column"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faulty_weight_is_refused_and_listed(case, tmp_path, capsys):
    change, phrase = FAULTS[case]
    source, destination = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    source.write_bytes(helpers.file_bytes(change(_parts())))
    for command in (["dequantize", str(source), str(destination)], ["inspect", str(source)]):
        assert main(command) == 3
        stderr = capsys.readouterr().err
        assert str(source) in stderr and f"tensor '{NAME}'" in stderr and phrase in stderr
    assert helpers.listing(tmp_path) == ["in.safetensors"]
    _, findings = audit(str(source))
    assert any(f.severity == "fault" and f.tensor == NAME and phrase in f.reason for f in findings)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage", STORAGE)
def test_packed_bytes_stored_as_any_dtype_are_never_touched(nested, storage, tmp_path):
    """All 256 byte values, viewed as floats: NaN patterns among them must survive."""
    parts = _parts(nested, (16, 64))
    parts[NAME] = (
        np.random.default_rng(1).permutation(np.arange(512) % 256).astype(np.uint8)[:, None]
    )
    expected = nf4.dequantize(
        nf4.QuantizedTensor(
            packed=parts[NAME],
            absmax=parts[f"{NAME}.absmax"],
            nested_absmax=parts.get(f"{NAME}.nested_absmax"),
            nested_code=parts.get(f"{NAME}.nested_quant_map"),
            nested_offset=np.float32([json.loads(parts[STATE].tobytes())["nested_offset"]])
            if nested
            else None,
            nested_blocksize=256 if nested else 0,
            shape=(16, 64),
        )
    )
    stored = helpers.file_bytes(parts)
    header_dtype = STORAGE[storage]
    source = tmp_path / "in.safetensors"
    itemsize = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}[header_dtype]
    before = f'"{NAME}": {{"dtype": "U8", "shape": [512, 1]'.encode()
    after = f'"{NAME}": {{"dtype": "{header_dtype}", "shape": [{512 // itemsize}, 1]'.encode()
    header_end = 8 + int.from_bytes(stored[:8], "little")
    header = stored[8:header_end].replace(before, after)
    assert after in header
    source.write_bytes(len(header).to_bytes(8, "little") + header + stored[header_end:])
    dequantize_checkpoint(str(source), str(tmp_path / "out.safetensors"))
    dtype, shape, data = helpers.load_all(tmp_path / "out.safetensors")[NAME]
    assert (dtype, shape) == ("F32", (16, 64))
    assert data == expected.tobytes()


@pytest.mark.parametrize("storage", STORAGE)
def test_float_storage_is_written_as_a_view(storage, tmp_path):
    source = tmp_path / "in.safetensors"
    source.write_bytes(helpers.file_bytes({NAME: helpers.random_weight((16, 64))}))
    for kind in ("uint8", storage):
        quantize_checkpoint(
            str(source), str(tmp_path / kind), QuantizeOptions(storage=kind), replace=True
        )
    plain, viewed = (helpers.load_all(tmp_path / kind)[NAME] for kind in ("uint8", storage))
    assert viewed[2] == plain[2]
    assert viewed[0] == STORAGE[storage]


def test_float_storage_that_does_not_fit_is_refused(tmp_path, capsys):
    source = tmp_path / "in.safetensors"
    source.write_bytes(helpers.file_bytes({NAME: helpers.random_weight((7, 11))}))
    code = main(["quantize", str(source), str(tmp_path / "out"), "--quant-storage", "float32"])
    assert code == 2
    assert "39 packed bytes cannot be stored as float32" in capsys.readouterr().err
    assert helpers.listing(tmp_path) == ["in.safetensors"]


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("blocksize", [32, 64, 4096])
def test_round_trip_equals_quantize_and_dequantize(format, nested, dtype, blocksize, tmp_path):
    source, middle, back = (tmp_path / name for name in ("in", "middle", "back"))
    tensors = helpers.dense_tensors(dtype)
    source.write_bytes(helpers.file_bytes(tensors))
    options = QuantizeOptions(format=format, nested=nested, blocksize=blocksize)
    quantize_checkpoint(str(source), str(middle), options)
    dequantize_checkpoint(str(middle), str(back))
    before, after = helpers.load_all(source), helpers.load_all(back)
    assert before.keys() == after.keys()
    for name, (kind, shape, data) in before.items():
        assert after[name][:2] == (kind, shape)
        if name not in helpers.QUANTIZED:
            assert after[name][2] == data
            continue
        weight = nf4.quantize(
            tensors[name],
            format=format,
            blocksize=blocksize,
            nested_blocksize=256 if nested else 0,
        )
        assert after[name][2] == nf4.dequantize(weight).tobytes()


@pytest.mark.parametrize(("dtype", "stored"), [("bf16", "BF16"), ("fp16", "F16"), ("fp32", "F32")])
def test_dequantize_to_a_dtype(dtype, stored, tmp_path):
    source, middle, back = (tmp_path / name for name in ("in", "middle", "back"))
    source.write_bytes(helpers.file_bytes(helpers.dense_tensors()))
    quantize_checkpoint(str(source), str(middle), QuantizeOptions())
    dequantize_checkpoint(str(middle), str(back), dtype=dtype)
    with Checkpoint(middle) as checkpoint:
        for name, weight in survey(checkpoint).weights.items():
            expected = nf4.dequantize(weight.load(checkpoint), dtype)
            assert helpers.load_all(back)[name] == (stored, weight.shape, expected.tobytes())
    assert helpers.load_all(back)["model.norm.weight"][0] == "F32"


def test_state_json_has_one_length_whatever_the_offset():
    lengths = set()
    for offset in (0.0, -1.5, 1 / 3, float(np.float32(1e-45)), -float(np.finfo(np.float32).max)):
        state = State("nf4", 64, "bf16", (4, 64), 256, offset)
        lengths.add(len(state.to_json()))
        assert json.loads(state.to_json())["nested_offset"] == offset
    assert len(lengths) == 1


def test_mixtures_keep_what_is_quantized_already(tmp_path):
    """A file with 4-bit and dense tensors: only the dense matrix changes."""
    source, destination = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    tensors = _parts() | {
        "other.weight": helpers.random_weight((4, 64), seed=3),
    }
    source.write_bytes(helpers.file_bytes(tensors))
    quantize_checkpoint(str(source), str(destination), QuantizeOptions(format="fp4"))
    before, after = helpers.load_all(source), helpers.load_all(destination)
    for name in before.keys() - {"other.weight"}:
        assert after[name] == before[name]
    with Checkpoint(destination) as checkpoint:
        weights = survey(checkpoint).weights
    assert {n: w.state.format for n, w in weights.items()} == {NAME: "nf4", "other.weight": "fp4"}


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F64"])
def test_quant_map_in_torchs_default_dtype_is_the_codebook(tmp_path, capsys, dtype):
    """bitsandbytes#1521: it makes the table in that dtype, and does not read it."""
    table = nf4.codebook("nf4").astype(NUMPY[dtype])
    source, plain = tmp_path / "in.safetensors", tmp_path / "plain.safetensors"
    source.write_bytes(helpers.file_bytes(_parts() | {f"{NAME}.quant_map": table}))
    plain.write_bytes(helpers.file_bytes(_parts()))
    assert main(["verify", str(source)]) == 0
    weight, expected = (nf4.load(path)[NAME] for path in (source, plain))
    assert weight.codebook is None and np.array_equal(weight.packed, expected.packed)
    source.write_bytes(helpers.file_bytes(_parts() | {f"{NAME}.quant_map": -table}))
    assert main(["verify", str(source)]) == 1
    assert "quant_map: not the codebook of nf4" in capsys.readouterr().out


def test_quant_map_of_the_file_is_used_and_flagged(tmp_path, capsys):
    table = np.linspace(-1, 1, 16, dtype=np.float32)
    parts = _parts(nested=False) | {f"{NAME}.quant_map": table}
    source = tmp_path / "in.safetensors"
    source.write_bytes(helpers.file_bytes(parts))
    dequantize_checkpoint(str(source), str(tmp_path / "out"))
    values = np.frombuffer(helpers.load_all(tmp_path / "out")[NAME][2], np.float32)
    code = parts[NAME][0, 0] >> 4
    assert values[0] == table[code] * parts[f"{NAME}.absmax"][0]
    assert main(["verify", str(source)]) == 1
    assert "quant_map: not the codebook of nf4" in capsys.readouterr().out


VALUES = {
    "NaN": (np.nan, "fault", "1 of 5 are NaN, first at 2"),
    "Inf": (np.inf, "fault", "are infinite"),
    "negative": (-1.0, "fault", "are negative"),
    "subnormal": (1e-40, "warning", "are subnormal"),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("case", VALUES)
def test_bad_scales_are_flagged(case, nested, tmp_path):
    value, severity, phrase = VALUES[case]
    parts = _parts(nested)
    part = f"{NAME}.nested_absmax" if nested else f"{NAME}.absmax"
    scales = parts[part].copy()
    scales[0 if nested else 2] = value
    source = tmp_path / "in.safetensors"
    source.write_bytes(helpers.file_bytes(parts | {part: scales}))
    _, findings = audit(str(source))
    phrase = phrase.replace("1 of 5", "1 of 1").replace("at 2", "at 0") if nested else phrase
    assert any(f.severity == severity and phrase in f.reason for f in findings)
    assert all(f.severity == severity for f in findings)
    dequantize_checkpoint(str(source), str(tmp_path / "out"))


def test_sound_weights_have_no_problems():
    for nested in (False, True):
        weight = nf4.quantize(helpers.random_weight((64, 64)), nested_blocksize=256 * nested)
        assert list(value_problems(weight)) == []


def test_nested_codes_are_flagged():
    weight = nf4.quantize(helpers.random_weight((64, 64)))
    code = weight.nested_code.copy()
    code[3] = 0.25
    parts = {name: getattr(weight, name) for name in ("packed", "absmax", "shape")}
    parts |= {"nested_absmax": weight.nested_absmax, "nested_offset": weight.nested_offset}
    other = nf4.QuantizedTensor(**parts, nested_code=code, nested_blocksize=256)
    assert ("warning", "nested_quant_map: not the one of bitsandbytes") in value_problems(other)
    code[3] = np.nan
    assert ("fault", "nested_quant_map: not finite") in value_problems(other)
