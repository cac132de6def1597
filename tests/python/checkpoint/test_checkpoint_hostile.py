"""Model directories whose files are hostile or odd: named errors, or nothing lost."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path

import checkpoint_helpers as helpers
import numpy as np
import pytest
from nf4.checkpoint import Checkpoint, FormatError, QuantizeOptions, audit, quantize_checkpoint
from nf4.checkpoint import header as header_module
from nf4.checkpoint.bnb import survey
from nf4.checkpoint.difference import error_statistics
from nf4.checkpoint.jsonio import MAX_MARKS, parse_object
from nf4.checkpoint.skips import SkipMatcher, is_simple
from nf4.cli import main
from nf4.cli.console import natural_key


def _quantized(tmp_path: Path, **config: object) -> Path:
    source, destination = helpers.write_model(tmp_path / "in", **config), tmp_path / "q"
    quantize_checkpoint(str(source), str(destination), QuantizeOptions())
    return destination


def _change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


def _findings(path: Path) -> list[tuple[str, str]]:
    _, findings = audit(str(path))
    return [(finding.severity, finding.reason) for finding in findings]


def test_names_of_many_digits_are_listed(tmp_path, capsys):
    path = tmp_path / "a.safetensors"
    names = ["a.10", "a.9", "a.09", "a." + "1" * 5000, "a.²"]
    path.write_bytes(helpers.file_bytes({name: np.ones(1, np.float32) for name in names}))
    assert main(["inspect", str(path), "--json"]) == 0
    listed = [row["name"] for row in json.loads(capsys.readouterr().out)["tensors"]]
    assert set(listed[:2]) == {"a.9", "a.09"}
    assert listed[2:] == ["a.10", "a." + "1" * 5000, "a.²"]
    assert natural_key("a.9") < natural_key("a.10") < natural_key("b.1")


def test_rank_beyond_numpy_is_refused(tmp_path, capsys):
    rank = header_module.MAX_RANK + 1
    path = tmp_path / "a.safetensors"
    path.write_bytes(helpers.raw_file({"a": helpers.entry("U8", [1] * rank, 0, 1)}, b"x"))
    with pytest.raises(FormatError, match=f"tensor 'a': {rank} dimensions"):
        Checkpoint(path)
    weight = np.ones((8, 1), np.uint8)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [1] * 65}
    encoded = np.frombuffer(json.dumps(state).encode(), np.uint8)
    path.write_bytes(helpers.file_bytes({"a": weight, "a.quant_state.bitsandbytes__nf4": encoded}))
    assert main(["dequantize", str(path), str(tmp_path / "out")]) == 3
    assert "shape of 65 dimensions" in capsys.readouterr().err


def test_odd_configuration_is_kept(tmp_path):
    """Infinity, which Python writes, an unhashable dtype, and half of a surrogate pair."""
    source = helpers.write_model(tmp_path / "in", dtype={"": "bfloat16"}, half="\ud800é")
    config = json.loads((source / "config.json").read_text())
    config |= {"time_step_limit": [0.0, math.inf], "large": math.inf}
    text = json.dumps(config)
    assert "Infinity" in text
    (source / "config.json").write_text(text)
    assert main(["quantize", str(source), str(tmp_path / "q")]) == 0
    assert main(["dequantize", str(tmp_path / "q"), str(tmp_path / "back")]) == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e400", "-1e999"])
def test_numbers_that_json_lacks_are_refused_elsewhere(text):
    with pytest.raises(FormatError, match="it is not valid JSON"):
        parse_object(b'{"a": ' + text.encode() + b"}", "file", "it")


@pytest.mark.parametrize("mark", [",", "[", "{"])
def test_endless_json_is_refused_unparsed(mark):
    with pytest.raises(FormatError, match=f"it has more than {MAX_MARKS} "):
        parse_object(b"{" + mark.encode() * (MAX_MARKS + 1), "file", "it")


def test_header_of_endless_metadata_is_refused_before_the_library_reads_it(tmp_path):
    path = tmp_path / "a.safetensors"
    entries = '"a":"",' * (MAX_MARKS + 1)
    path.write_bytes(helpers.raw_file('{"__metadata__":{' + entries + '"b":""}}'))
    with pytest.raises(FormatError, match="the header has more than"):
        Checkpoint(path)


def test_huge_configuration_is_refused_unread(tmp_path):
    source = helpers.write_model(tmp_path / "in")
    os.truncate(source / "config.json", 20_000_000)
    with pytest.raises(FormatError, match="the configuration is larger than 16000000 bytes"):
        Checkpoint(source)


@pytest.mark.parametrize("value", [5, "lm_head", [1], {"a": 1}])
def test_skip_list_that_is_none(value, tmp_path):
    folder = _quantized(tmp_path)
    _change_config(folder, llm_int8_skip_modules=value)
    assert ("fault", "llm_int8_skip_modules is not a list of names") in _findings(folder)


PATTERNS = ["a{99999999999}", "(" * 5000, "(.*.*)*!!", ".*.*.*.*!!", "(a|a)*b", "x\\", "[", "\\1"]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern[:12])
def test_patterns_that_are_not_simple_are_not_run(pattern, tmp_path):
    assert not is_simple(pattern)
    assert SkipMatcher(["a" * 5000]).first(pattern) is None
    folder = _quantized(tmp_path)
    _change_config(folder, llm_int8_skip_modules=[pattern])
    reason = f"llm_int8_skip_modules has {pattern!r}, a pattern that is not checked"
    assert _findings(folder) == [("warning", reason)]


@pytest.mark.parametrize("entry", ["lm_head", "h.0$", r"model\.layers\.0\-a$", "layer.*", "é_1"])
def test_entries_that_are_written_are_simple(entry):
    assert is_simple(entry)


MODULES = {
    "[" * 100_000: "it is nested too deeply",
    "5": "it is not a list of modules, each with its path",
    '["2_Dense"]': "it is not a list of modules, each with its path",
    '[{"path": 3}]': "it is not a list of modules, each with its path",
    '[{"idx": 0}]': "it is not a list of modules, each with its path",
    '[{"path": ""},]': "it is not valid JSON: ",
}


@pytest.mark.parametrize("text", ["a FIFO", "endless", *MODULES], ids=lambda text: text[:12])
def test_modules_json_that_cannot_be_read_is_refused(text, tmp_path):
    """Without it nobody knows which folders hold layers of the model."""
    source = helpers.write_model(tmp_path / "in")
    path = source / "modules.json"
    if text == "a FIFO":
        os.mkfifo(path)
    elif text == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.write_text(text)
    reason = MODULES.get(text, "a FIFO|a link to /dev/zero")
    with pytest.raises(FormatError, match=f"modules.json: ({reason})"):
        quantize_checkpoint(str(source), str(tmp_path / "q"), QuantizeOptions())
    assert helpers.listing(tmp_path) == ["in"]


def test_configuration_that_is_a_fifo_is_refused(tmp_path):
    source = helpers.write_model(tmp_path / "in")
    (source / "config.json").unlink()
    os.mkfifo(source / "config.json")
    with pytest.raises(FormatError, match="config.json: a FIFO, not a regular file"):
        Checkpoint(source)


def test_side_files_behind_links(tmp_path):
    """Links to directories are followed, each directory once; links to nowhere are listed."""
    source = helpers.write_model(tmp_path / "in")
    (source / "pooling").mkdir()
    (source / "pooling" / "config.json").write_text("{}")
    (source / "pooling" / "tokenizer.json").symlink_to("../tokenizer.json")
    (source / "1_Pooling").symlink_to("pooling")
    (source / "loop").symlink_to(source)
    (source / "nowhere").symlink_to(source / "gone")
    (source / "itself").symlink_to("itself")
    (source / "adapter_model.safetensors").write_bytes(b"weights")
    result = quantize_checkpoint(str(source), str(tmp_path / "q"), QuantizeOptions())
    copied = helpers.tree(tmp_path / "q" / "pooling")
    assert copied == helpers.tree(source / "pooling")
    assert not (tmp_path / "q" / "pooling" / "tokenizer.json").is_symlink()
    left = ["1_Pooling", "adapter_model.safetensors", "itself", "loop", "nowhere"]
    assert sorted(result.left_out) == left


def test_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch, capsys):
    source = helpers.write_model(tmp_path / "in")
    (source / "1_Pooling").mkdir()
    scandir = os.scandir

    def refuse(path: str):
        if str(path).endswith("1_Pooling"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert main(["quantize", str(source), str(tmp_path / "q")]) == 4
    assert "1_Pooling: Permission denied" in capsys.readouterr().err
    assert helpers.listing(tmp_path) == ["in"]


def test_requantizing_with_other_options_keeps_the_configuration(tmp_path):
    source, first, again = helpers.write_model(tmp_path / "in"), tmp_path / "q", tmp_path / "again"
    options = QuantizeOptions(format="fp4", nested=False)
    assert quantize_checkpoint(str(source), str(first), options).dense == 4
    result = quantize_checkpoint(str(first), str(again), QuantizeOptions())
    assert (again / "config.json").read_bytes() == (first / "config.json").read_bytes()
    assert (result.weights, result.dense) == (0, 4)
    assert _findings(again) == []


def test_configuration_of_another_layout_is_a_warning(tmp_path):
    folder = _quantized(tmp_path)
    _change_config(folder, bnb_4bit_quant_type="fp4", bnb_4bit_quant_storage="bfloat16")
    assert _findings(folder) == [
        ("warning", "bnb_4bit_quant_type is 'fp4', but there are weights of nf4"),
        ("warning", "bnb_4bit_quant_storage is 'bfloat16', but there are weights of uint8"),
    ]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dequantize_to_a_dtype_says_so_in_the_configuration(key, tmp_path):
    folder = _quantized(tmp_path, **{key: "bfloat16"})
    for dtype, expected in (("fp16", "float16"), (None, "bfloat16")):
        back = tmp_path / f"back-{dtype}"
        option = ["--dtype", dtype] if dtype else []
        assert main(["dequantize", str(folder), str(back), *option]) == 0
        assert json.loads((back / "config.json").read_text())[key] == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_nonfinite_dense_values_are_a_warning(dtype, tmp_path):
    tensors = helpers.dense_tensors(dtype)
    tensors["model.norm.weight"][7] = np.nan
    tensors["model.embed_tokens.weight"] = large = np.zeros(
        (5, 1 << 20), tensors["model.norm.weight"].dtype
    )
    large[4, -1] = np.inf
    folder = tmp_path / "q"
    source = helpers.write_model(tmp_path / "in", tensors)
    quantize_checkpoint(str(source), str(folder), QuantizeOptions())
    expected = {("warning", "NaN at element 7"), ("warning", f"Inf at element {large.size - 1}")}
    assert set(_findings(folder)) == expected
    assert main(["verify", str(folder)]) == 0


def test_file_that_changes_while_it_is_verified_is_a_fault(tmp_path, monkeypatch):
    folder = _quantized(tmp_path)

    def touch(*_: object) -> list:
        os.utime(folder / "model.safetensors", (time.time(), 1))
        return []

    # By its name the package gives the function `audit`, not the module.
    monkeypatch.setattr(sys.modules["nf4.checkpoint.audit"], "value_problems", touch)
    assert _findings(folder) == [("fault", "changed while it was read")]


def test_gpt2_is_compared_with_a_dense_file(tmp_path):
    """A file has no configuration that says that its layers are transposed."""
    tensors = {"h.0.attn.c_attn.weight": helpers.random_weight((16, 48))}
    source = helpers.write_model(tmp_path / "in", tensors, model_type="gpt2")
    quantize_checkpoint(str(source), str(tmp_path / "q"), QuantizeOptions())
    with Checkpoint(tmp_path / "q") as four_bit, Checkpoint(source / "model.safetensors") as dense:
        (weight,) = survey(four_bit).weights.values()
        assert 0 < error_statistics(weight, four_bit, dense).rms_relative < 0.2


def test_largest_error_is_nan_wherever_the_nan_is(tmp_path, capsys):
    tensors = helpers.dense_tensors()
    source = helpers.write_model(tmp_path / "in", tensors)
    quantize_checkpoint(str(source), str(tmp_path / "q"), QuantizeOptions())
    for name in helpers.QUANTIZED:
        changed = {**tensors, name: tensors[name].copy()}
        changed[name][0, 0] = np.nan
        (source / "model.safetensors").write_bytes(helpers.file_bytes(changed))
        assert main(["inspect", str(tmp_path / "q"), "--dense", str(source), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["totals"]["max_abs_error"] is None
