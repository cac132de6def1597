"""Broken indices and shards: a named error, never output."""

from __future__ import annotations

import json
import os
from pathlib import Path

import checkpoint_helpers as helpers
import numpy as np
import pytest
from checkpoint_helpers import raw_file
from nf4.checkpoint import Checkpoint, FormatError, audit
from nf4.cli import main


def _sharded(tmp_path: Path) -> tuple[Path, dict]:
    folder = helpers.write_shards(tmp_path / "model")
    return folder, json.loads((folder / "model.safetensors.index.json").read_text())


def _set_index(folder: Path, index: object) -> None:
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)


INDEX_FAULTS = {
    "not JSON": (lambda index: "{", "not valid JSON"),
    "no weight_map": (lambda index: {"metadata": {}}, "no weight_map"),
    "empty weight_map": (lambda index: {"weight_map": {}}, "no weight_map"),
    "path in a shard": (
        lambda index: {"weight_map": {"a": "../model/model-00001-of-00006.safetensors"}},
        "not a file name",
    ),
    "parent as a shard": (lambda index: {"weight_map": {"a": ".."}}, "not a file name"),
    "NUL in a shard": (lambda index: {"weight_map": {"a": "b\0c"}}, "not a file name"),
    "byte order mark": (lambda index: "\ufeff" + json.dumps(index), "byte order mark"),
    "number as shard": (lambda index: {"weight_map": {"a": 1}}, "not a file name"),
    "missing shard": (lambda index: {"weight_map": {"a": "nowhere.safetensors"}}, "missing"),
    "tensor elsewhere": (
        lambda index: {
            "weight_map": {**index["weight_map"], "a": "model-00001-of-00006.safetensors"}
        },
        "not in its shard",
    ),
    "duplicate key": (
        lambda index: '{"weight_map":{"a":"b","a":"c"}}',
        "duplicate key",
    ),
}


@pytest.mark.parametrize("case", INDEX_FAULTS)
def test_broken_index_is_a_named_error(case, tmp_path, capsys):
    folder, index = _sharded(tmp_path)
    change, phrase = INDEX_FAULTS[case]
    _set_index(folder, change(index))
    assert main(["quantize", str(folder), str(tmp_path / "out")]) == 3
    assert phrase in capsys.readouterr().err
    assert helpers.listing(tmp_path) == ["model"]


def test_huge_index_is_refused_unread(tmp_path):
    folder, _ = _sharded(tmp_path)
    os.truncate(folder / "model.safetensors.index.json", 200_000_000)
    with pytest.raises(FormatError, match="the index is larger than 100000000 bytes"):
        Checkpoint(folder)


@pytest.mark.parametrize("kind", ["a FIFO", "a directory"])
def test_shard_that_is_no_file_is_refused(kind, tmp_path):
    folder, _ = _sharded(tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.unlink()
    if kind == "a FIFO":
        os.mkfifo(shard)
    else:
        shard.mkdir()
    with pytest.raises(FormatError, match=f"{shard.name}: {kind}, not a regular file"):
        Checkpoint(folder)


def test_tensor_in_two_shards_is_refused(tmp_path):
    folder, _ = _sharded(tmp_path)
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(FormatError, match="it is in .*00001.* too"):
        Checkpoint(folder)


def test_verify_reads_the_other_tensors_of_such_shards(tmp_path):
    folder, _ = _sharded(tmp_path)
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    (name,) = helpers.load_all(first)
    second.write_bytes(
        helpers.file_bytes({name: np.ones(3, np.float32), "other": np.ones(5, np.float32)})
    )
    found, findings = audit(str(folder))
    assert [f.tensor for f in findings if "it is in" in f.reason] == [name]
    assert found.dense["other"].shape == (5,)
    assert found.dense[name].shape != (3,)


def test_directory_without_a_clear_choice_is_refused(tmp_path):
    with pytest.raises(FormatError, match="no other safetensors file"):
        Checkpoint(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(raw_file("{}"))
    with pytest.raises(FormatError, match="several to choose from: a.safetensors, b.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with Checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.files) == ["a.safetensors"]
