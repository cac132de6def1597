"""Hostile integer checkpoints: a named error or a result, never a crash or half an output."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import checkpoint_helpers as helpers
import int4_checkpoints as models
import int4_oracle as oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from int4_checkpoints import LAYER, Case
from nf4.checkpoint import (
    Checkpoint,
    FormatError,
    OptionError,
    audit,
    convert_checkpoint,
    dequantize_checkpoint,
    survey,
)
from nf4.cli.inspect import inspect_checkpoint
from strategies import mutated_file

_CASES = {
    str(case): case
    for layout in oracle.LAYOUTS
    for case in (
        Case(layout, shapes=((16, 64),)),
        Case(layout, symmetric=False, act_order=layout != "awq", shapes=((16, 64),)),
    )
}
_JUNK = st.sampled_from(
    [None, True, False, 0, -1, 1, 4, 8, 3.5, 2**31, 2**63, -(2**70), "", "gptq", "4", [], {}, ["a"]]
    + [[1], {"a": 1}, {"-:": 1}, "x" * 1000]
)


def _try_everything(folder: Path) -> None:
    """Every command ends with a result, or a FormatError and no output."""
    audit(str(folder / "in"))
    names = os.listdir(folder)
    commands = [lambda out: inspect_checkpoint(str(folder / "in"))]
    commands.append(lambda out: dequantize_checkpoint(str(folder / "in"), out))
    for to in oracle.LAYOUTS:
        commands.append(lambda out, to=to: convert_checkpoint(str(folder / "in"), out, to))
    for number, command in enumerate(commands):
        try:
            command(str(folder / f"out{number}"))
        except (FormatError, OptionError):
            assert sorted(os.listdir(folder)) == sorted(names)
        else:
            names = os.listdir(folder)


def _stored(case: Case) -> dict[str, np.ndarray]:
    return models.tensors(case.weights()[LAYER])


@st.composite
def _mutated_file(draw: st.DrawFn) -> tuple[Case, bytes]:
    case = _CASES[draw(st.sampled_from(sorted(_CASES)))]
    return case, draw(mutated_file(helpers.file_bytes(_stored(case))))


@settings(max_examples=100)
@given(_mutated_file())
def test_mutated_files(mutated):
    case, content = mutated
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models.write(folder / "in", {}, case.config)
        (folder / "in" / "model.safetensors").write_bytes(content)
        _try_everything(folder)


@st.composite
def _mutated_tensors(draw: st.DrawFn) -> tuple[Case, dict[str, np.ndarray]]:
    """Parts of other dtypes, shapes and values, parts left out, parts of other layouts."""
    case = _CASES[draw(st.sampled_from(sorted(_CASES)))]
    stored = _stored(case)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(stored)))
        what = draw(st.sampled_from(["drop", "dtype", "shape", "values", "name"]))
        if what == "drop" and len(stored) > 1:
            del stored[name]
        elif what == "dtype":
            dtype = draw(st.sampled_from(["uint8", "int32", "int64", "float16", "float32"]))
            stored[name] = np.zeros(stored[name].shape, dtype)
        elif what == "shape":
            shape = draw(st.lists(st.integers(0, 70), max_size=3))
            stored[name] = np.zeros(shape, stored[name].dtype)
        elif what == "values":
            value = draw(st.sampled_from([-(2**31), -1, 0, 1, 7, 65, 2**31 - 1]))
            with np.errstate(over="ignore"):
                stored[name] = np.full(stored[name].shape, value).astype(stored[name].dtype)
        else:
            other = models.names(draw(st.sampled_from(oracle.LAYOUTS)))
            last = draw(st.sampled_from([*other.values(), "weight", "weight_shape"]))
            stored[f"{LAYER}.{last}"] = stored.pop(name)
    return case, stored


@settings(max_examples=100)
@given(_mutated_tensors())
def test_mutated_tensors(mutated):
    case, stored = mutated
    with tempfile.TemporaryDirectory() as name:
        models.write(Path(name, "in"), stored, case.config)
        _try_everything(Path(name))


@st.composite
def _mutated_config(draw: st.DrawFn) -> tuple[Case, dict[str, Any]]:
    """quantization_config with values of any kind somewhere in it."""
    case = _CASES[draw(st.sampled_from(sorted(_CASES)))]
    config = json.loads(json.dumps(case.config))
    for _ in range(draw(st.integers(1, 3))):
        place, path = config, draw(st.integers(0, 3))
        while path and any(isinstance(value, dict) for value in place.values()):
            place = next(value for value in place.values() if isinstance(value, dict))
            path -= 1
        more = ["dynamic", "format", "version", "zero_point", "ignore", "modules_to_not_convert"]
        key = draw(st.sampled_from(sorted({*place, *more, "kv_cache_scheme", "targets"})))
        place[key] = json.loads(json.dumps(draw(_JUNK)))
    return case, config


@settings(max_examples=150)
@given(_mutated_config())
def test_mutated_configurations(mutated):
    case, config = mutated
    with tempfile.TemporaryDirectory() as name:
        models.write(Path(name, "in"), _stored(case), config)
        _try_everything(Path(name))


def test_many_weights_are_found_in_near_linear_time(tmp_path):
    """Names alone: no data is read to find them. Not timed; a quadratic search would not end."""
    path = tmp_path / "a.safetensors"
    header = {f"m.{n}.qweight": helpers.entry("I32", [0, 8], 0, 0) for n in range(60_000)}
    path.write_bytes(helpers.raw_file(header))
    with Checkpoint(path) as checkpoint:
        assert len(survey(checkpoint).faults) == 60_000


def test_output_is_untouched_where_the_source_changes_meanwhile(tmp_path, monkeypatch):
    source = Case("gptq").folder(tmp_path / "in")
    weights = source / "model.safetensors"

    def progress(name: str, count: int) -> None:
        os.utime(weights, ns=(1, 1))

    with pytest.raises(FormatError, match="changed while it was read"):
        convert_checkpoint(str(source), str(tmp_path / "out"), "awq", progress=progress)
    assert helpers.listing(tmp_path) == ["in"]
