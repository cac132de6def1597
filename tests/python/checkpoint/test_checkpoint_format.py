"""Hostile safetensors files: a named error, never a crash, never output."""

from __future__ import annotations

import json
import os
import re
import struct
import tempfile
from pathlib import Path

import checkpoint_helpers as helpers
import numpy as np
import pytest
from checkpoint_helpers import entry, raw_file
from hypothesis import given, settings
from hypothesis import strategies as st
from nf4.checkpoint import (
    Checkpoint,
    FormatError,
    QuantizeOptions,
    bnb,
    dequantize_checkpoint,
    leftovers,
    quantize_checkpoint,
    survey,
)
from nf4.checkpoint import header as header_module
from nf4.checkpoint.int4_layouts import COMPRESSED_TENSORS, GPTQ
from nf4.checkpoint.reader import SafetensorsFile
from nf4.cli import main
from safetensors import SafetensorError, safe_open
from strategies import mutated_file

ONE = entry("U8", [1], 0, 1)
_ONE_JSON = json.dumps(ONE)


def _one(**changes: object) -> bytes:
    return raw_file({"a": {**ONE, **changes}}, b"x")


HOSTILE = {
    "empty": (b"", "too short"),
    "7 bytes": (b"1234567", "too short"),
    "header length 0": (bytes(8), "header length 0"),
    "header length 2^64-1": (b"\xff" * 8 + b"{}", "not a safetensors file: its header length"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
    "header over 100 MB": (struct.pack("<Q", 100_000_001) + b"{}", "over 100000000"),
    "header past the end": (struct.pack("<Q", 3) + b"{}", "past the end"),
    "not UTF-8": (raw_file(b'{"\xff":1}'), "not valid"),
    "byte order mark": (raw_file(b"\xef\xbb\xbf{}"), "not valid"),
    "truncated JSON": (raw_file('{"a":{"dtype":"U8"'), "not valid"),
    "deeply nested JSON": (raw_file('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), "not valid"),
    "an array": (raw_file("[]"), "not valid"),
    "bytes after the JSON": (raw_file("{}{}"), "not valid"),
    "a space before the JSON": (raw_file(" {}"), "does not start with '{'"),
    "duplicate tensors": (
        raw_file('{"a":' + _ONE_JSON + ',"a":' + _ONE_JSON + "}", b"x"),
        "duplicate",
    ),
    "duplicate fields": (raw_file('{"a":{"dtype":"U8",' + _ONE_JSON[1:] + "}", b"x"), "not valid"),
    "duplicate metadata": (raw_file('{"__metadata__":{"a":"1","a":"2"}}'), "duplicate"),
    "too many tensors": (raw_file("{" + '"":{},' * 500_000 + '"":{}}'), "more than 500000"),
    "metadata of numbers": (raw_file({"__metadata__": {"a": 1}}), "not valid"),
    "NaN in the JSON": (raw_file('{"a":{"x":NaN,' + _ONE_JSON[1:] + "}", b"x"), "not valid"),
    "half of a surrogate pair": (raw_file('{"\\ud800":' + _ONE_JSON + "}", b"x"), "not valid"),
    "entry not an object": (raw_file({"a": 1}), "not valid"),
    "missing fields": (raw_file({"a": {}}), "not valid"),
    "negative size": (_one(shape=[-1]), "not valid"),
    "fractional size": (_one(shape=[1.0]), "not valid"),
    "size of 2^64": (_one(shape=[2**64]), "not valid"),
    "size of 5000 digits": (raw_file('{"a":{"shape":[' + "9" * 5000 + "]}}"), "not valid"),
    "negative offset": (_one(data_offsets=[-1, 1]), "not valid"),
    "three offsets": (_one(data_offsets=[0, 1, 1]), "not valid"),
    "end before begin": (_one(data_offsets=[1, 0]), "not valid"),
    "unknown dtype": (_one(dtype="F12"), "not valid"),
    "overlap": (
        raw_file({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"xyz"),
        "not",
    ),
    "gap": (raw_file({"a": ONE, "b": entry("U8", [1], 2, 3)}, b"xyz"), "not valid"),
    "trailing data": (raw_file({"a": ONE}, b"xy"), "not valid"),
    "truncated data": (raw_file({"a": entry("U8", [2], 0, 2)}, b"x"), "not valid"),
    "no data": (raw_file({"a": ONE}), "not valid"),
    "shape overflows": (_one(shape=[2**62, 2**62]), "not valid"),
    "overflow before a zero": (raw_file({"a": entry("U8", [2**62, 9, 0], 0, 0)}), "not valid"),
    "overflow behind a zero": (raw_file({"a": entry("U8", [0, 2**62, 9], 0, 0)}), "overflows"),
    "shape does not match span": (_one(shape=[2]), "not valid"),
    "half a byte": (raw_file({"a": entry("F4", [1], 0, 1)}, b"x"), "not valid"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_a_named_error_and_leaves_no_output(case, tmp_path, capsys):
    content, phrase = HOSTILE[case]
    source, destination = tmp_path / "bad.safetensors", tmp_path / "out.safetensors"
    source.write_bytes(content)
    for command in ("quantize", "dequantize"):
        assert main([command, str(source), str(destination)]) == 3
        stdout, stderr = capsys.readouterr()
        assert stdout == ""
        assert stderr.startswith(f"nf4: {source}: ") and phrase in stderr
        assert stderr.count("\n") == 1
        assert helpers.listing(tmp_path) == ["bad.safetensors"]
    assert main(["inspect", str(source)]) == 3
    assert main(["verify", str(source)]) == 1


# Messages of our own parser, where the library does not come before it.
OWN_REASONS = {
    "empty": "too short",
    "7 bytes": "too short",
    "header length 0": "header length 0",
    "header length 2^64-1": "not a safetensors file: its header length",
    "a pointer": "a pointer of Git LFS",
    "header over 100 MB": "over 100000000",
    "header past the end": "past the end",
    "not UTF-8": "not UTF-8",
    "byte order mark": "does not start with '{'",
    "truncated JSON": "not valid JSON: Expecting ','",
    "deeply nested JSON": "nested too deeply",
    "an array": "does not start with '{'",
    "bytes after the JSON": "not valid JSON: Extra data",
    "a space before the JSON": "does not start with '{'",
    "duplicate tensors": "duplicate key 'a'",
    "duplicate fields": "duplicate key 'dtype'",
    "duplicate metadata": "duplicate key 'a'",
    "too many tensors": "more than 500000 tensors",
    "metadata of numbers": "__metadata__ is not an object of strings",
    "NaN in the JSON": "NaN is not JSON",
    "half of a surrogate pair": "its name is not valid Unicode",
    "entry not an object": "its header entry is not an object",
    "missing fields": "unknown dtype None",
    "negative size": "shape is not a list of sizes",
    "fractional size": "shape is not a list of sizes",
    "size of 2^64": "shape is not a list of sizes",
    "size of 5000 digits": "not valid JSON: Exceeds the limit",
    "negative offset": "data_offsets is not a pair",
    "three offsets": "data_offsets is not a pair",
    "end before begin": "end 0 before they begin 1",
    "unknown dtype": "unknown dtype 'F12'",
    "overlap": "tensor 'b': overlaps other data",
    "gap": "tensor 'b': leaves a gap before it",
    "trailing data": "trailing bytes",
    "truncated data": "truncated: the tensors take 2 bytes",
    "no data": "truncated: the tensors take 1 bytes",
    "shape overflows": "overflows",
    "overflow before a zero": "overflows",
    "overflow behind a zero": "overflows",
    "shape does not match span": "takes 2 bytes, its span has 1",
    "half a byte": "not a whole number of bytes",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_our_own_parser_stands_without_the_library(case):
    """parse_header must not lean on the library's checks: other readers could let more by."""
    content, _ = HOSTILE[case]
    with pytest.raises(FormatError, match=re.escape(OWN_REASONS[case])):
        length = header_module.header_length(content[:8], len(content), "bad")
        header_module.parse_header(content[8 : 8 + length], len(content) - 8 - length, "bad")


def test_valid_oddities_are_read(tmp_path):
    """Float data at an odd offset, an empty tensor, a scalar, a padded header, no tensors."""
    path = tmp_path / "a.safetensors"
    weight = helpers.random_weight((2, 16))
    path.write_bytes(
        helpers.file_bytes(
            {"a": np.ones(1, np.uint8), "b": weight, "c": np.ones((0, 3), np.float32)}
            | {"d": np.array(7, np.float64)}
        )
    )
    with SafetensorsFile(path) as file:
        assert file.tensors["b"].begin == 1
        assert np.array_equal(file.array(file.tensors["b"]), weight)
        assert file.read(file.tensors["c"]).size == 0
        assert file.read(file.tensors["d"]).view(np.float64) == 7
    path.write_bytes(raw_file("{}     "))
    with SafetensorsFile(path) as file:
        assert file.tensors == {}


def test_reading_goes_on_after_short_reads(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    weight = helpers.random_weight((40, 40))
    path.write_bytes(helpers.file_bytes({"a": weight}))
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7]], at))
    with SafetensorsFile(path) as file:
        assert np.array_equal(file.array(file.tensors["a"]), weight)


def test_file_cut_short_or_changed_while_read_is_an_error(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(helpers.file_bytes({"a": helpers.random_weight((40, 40))}))
    with SafetensorsFile(path) as file:
        file.check_unchanged()
        os.truncate(path, 1000)
        with pytest.raises(FormatError, match="truncated while it was read"):
            file.read(file.tensors["a"])
        with pytest.raises(FormatError, match="changed while it was read"):
            file.check_unchanged()


def _quantized_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, destination = Path(folder, "a.safetensors"), Path(folder, "b.safetensors")
        source.write_bytes(helpers.file_bytes(helpers.dense_tensors()))
        quantize_checkpoint(str(source), str(destination), QuantizeOptions())
        return destination.read_bytes()


_VALID = {"dense": helpers.file_bytes(helpers.dense_tensors()), "quantized": _quantized_file()}


@st.composite
def _mutated(draw: st.DrawFn) -> tuple[str, bytes]:
    kind = draw(st.sampled_from(sorted(_VALID)))
    return kind, draw(mutated_file(_VALID[kind]))


@settings(max_examples=400)
@given(_mutated())
def test_mutated_files_never_crash_and_never_leave_output(case):
    kind, content = case
    with tempfile.TemporaryDirectory() as folder:
        source, destination = Path(folder, "in.safetensors"), Path(folder, "out.safetensors")
        source.write_bytes(content)
        try:
            safe_open(source, framework="np")
            library_accepts = True
        except (SafetensorError, OSError):
            library_accepts = False
        try:
            if kind == "dense":
                quantize_checkpoint(str(source), str(destination), QuantizeOptions())
            else:
                dequantize_checkpoint(str(source), str(destination))
        except FormatError as error:
            assert str(source) in str(error)
            assert os.listdir(folder) == ["in.safetensors"]
            return
        assert library_accepts
        assert sorted(os.listdir(folder)) == ["in.safetensors", "out.safetensors"]
        safe_open(destination, framework="np")


@settings(max_examples=200)
@given(_mutated())
def test_what_the_library_rejects_we_reject(case):
    _, content = case
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "in.safetensors")
        source.write_bytes(content)
        try:
            safe_open(source, framework="np")
        except (SafetensorError, OSError):
            with pytest.raises(FormatError):
                SafetensorsFile(source)
            if len(content) >= 8:
                with pytest.raises(FormatError):
                    length = header_module.header_length(content[:8], len(content), "bad")
                    data_bytes = len(content) - 8 - length
                    header_module.parse_header(content[8 : 8 + length], data_bytes, "bad")


# A part of a weight without the others is a fault, and Hypothesis takes their names from the
# library's source.
PARTS = {*GPTQ.names.values(), *COMPRESSED_TENSORS.names.values(), *bnb._PARTS}


def is_plain(name: str) -> bool:
    last = name.rpartition(".")[2]
    return name != "__metadata__" and last not in PARTS and leftovers.PART.fullmatch(last) is None


@settings(max_examples=100)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(is_plain),
        st.tuples(
            st.sampled_from(["uint8", "float16", "bfloat16", "float32", "int64"]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        max_size=6,
    )
)
def test_copies_keep_every_tensor(specs):
    """Any names, dtypes and shapes go through the reader and the writer bit for bit."""
    tensors = {
        name: helpers.random_weight(tuple(shape), dtype) for name, (dtype, shape) in specs.items()
    }
    tensors["layer.weight"] = helpers.random_weight((4, 16))
    with tempfile.TemporaryDirectory() as folder:
        source, destination = Path(folder, "in.safetensors"), Path(folder, "out.safetensors")
        source.write_bytes(helpers.file_bytes(tensors, {"format": "pt", "who": "é"}))
        options = QuantizeOptions(only=("layer",))
        quantize_checkpoint(str(source), str(destination), options)
        before, after = helpers.load_all(source), helpers.load_all(destination)
        for name in specs:
            if name != "layer.weight":
                assert after[name] == before[name]
        with safe_open(destination, framework="np") as opened:
            assert opened.metadata() == {"format": "pt", "who": "é"}
        with Checkpoint(destination) as checkpoint:
            assert survey(checkpoint).weights.keys() == {"layer.weight"}
