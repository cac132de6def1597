"""Folders of checkpoints that are hostile, odd or good, for the readers in C++, Python and Rust.

    python hostile_folders.py DESTINATION

writes DESTINATION/read/*, which each reader reads, DESTINATION/refused/*, which each refuses with
an error, and DESTINATION/refused_config/*, whose config.json is refused by those that read one. To
read is to open a folder and to describe its NF4 and FP4 weights. Needs nothing but Python.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONTROL = "a\x1b]0;title\x07\n\u009b31m\u202e\x7f"  # a title, a colour and a direction of text
READ: dict[str, Callable[[Path], object]] = {}
REFUSED: dict[str, Callable[[Path], object]] = {}
REFUSED_CONFIG: dict[str, Callable[[Path], object]] = {}


def file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file; a header that is no text is JSON of it. length: what the file says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int, end: int, dtype: str = "U8", shape: object = None) -> dict[str, object]:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


ONE = file({"a": entry(0, 1)}, b"x")
STATE = {"quant_type": "nf4", "blocksize": 32, "dtype": "float16", "shape": [2, 32]}
CODEBOOK = struct.pack("<16f", *(code / 8 - 1 for code in range(16)))


def weight(state: object = STATE, **changes: tuple[str, list[int], bytes] | None) -> bytes:
    """A flat NF4 weight of 2 x 32, with other parts in place of its own; None leaves one out."""
    text = state if isinstance(state, bytes) else json.dumps(state).encode()
    parts = {
        "w.weight": ("U8", [32, 1], bytes(32)),
        "w.weight.absmax": ("F32", [2], struct.pack("<2f", 1, 2)),
        "w.weight.quant_map": ("F32", [16], CODEBOOK),
        "w.weight.quant_state.bitsandbytes__nf4": ("U8", [len(text)], text),
    }
    parts |= {f"w.weight.{name}" if name != "weight" else "w.weight": part
              for name, part in changes.items()}  # fmt: skip
    header, data = {}, b""
    for name, part in parts.items():
        if part is not None:
            header[name] = entry(len(data), len(data) + len(part[2]), *part[:2])
            data += part[2]
    return file(header, data)


def single(table: dict[str, Callable[[Path], object]], name: str, content: bytes) -> None:
    table[name] = lambda folder: (folder / SINGLE).write_bytes(content)


def indexed(table: dict[str, Callable[[Path], object]], name: str, index: object) -> None:
    """A folder with a.safetensors and b.safetensors, whose tensors are a and b, and an index."""

    def make(folder: Path) -> None:
        (folder / "a.safetensors").write_bytes(ONE)
        (folder / "b.safetensors").write_bytes(file({"b": entry(0, 1)}, b"x"))
        text = index if isinstance(index, bytes) else json.dumps(index).encode()
        (folder / INDEX).write_bytes(text)

    table[name] = make


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "directory": os.mkdir,
    "socket": _socket,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "null": lambda path: path.symlink_to("/dev/null"),
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nothing"),
}


def special_files() -> None:
    for kind, make in SPECIAL.items():
        REFUSED[f"weights {kind}"] = lambda folder, make=make: make(folder / SINGLE)
        REFUSED[f"index {kind}"] = lambda folder, make=make: make(folder / INDEX)

        def shard(folder: Path, make: Callable[[Path], object] = make) -> None:
            (folder / "a.safetensors").write_bytes(ONE)
            (folder / INDEX).write_text('{"weight_map": {"a": "a.safetensors", "b": "b"}}')
            make(folder / "b")

        def config(folder: Path, make: Callable[[Path], object] = make) -> None:
            (folder / SINGLE).write_bytes(ONE)
            make(folder / "config.json")

        REFUSED[f"shard {kind}"] = shard
        if kind not in ("loop", "dangling"):  # as if there were none
            REFUSED_CONFIG[kind] = config

    def by_a_link(folder: Path) -> None:
        (folder / "blob").write_bytes(ONE)
        (folder / SINGLE).symlink_to("blob")  # as in the cache of a hub

    READ["weights by a link"] = by_a_link


def folders() -> None:
    READ["another name"] = lambda folder: (folder / "x.safetensors").write_bytes(ONE)
    REFUSED["empty folder"] = lambda folder: None

    def several(folder: Path, names: tuple[str, ...], content: bytes) -> None:
        for name in names:
            (folder / name).write_bytes(content)

    two = ("x.safetensors", "y.safetensors")
    REFUSED["two files"] = lambda folder: several(folder, two, ONE)
    indices = tuple(f"{name}.index.json" for name in two)
    REFUSED["two indices"] = lambda folder: several(folder, indices, b'{"weight_map": {}}')

    def other_index(folder: Path) -> None:
        several(folder, two, ONE)
        (folder / indices[0]).write_text('{"weight_map": {"a": "x.safetensors"}}')

    READ["an index of another name"] = other_index

    def both(folder: Path) -> None:
        (folder / SINGLE).write_bytes(ONE)
        (folder / INDEX).write_text("no JSON, and not looked at")

    READ["a file before an index"] = both


def lengths() -> None:
    single(REFUSED, "empty file", b"")
    single(REFUSED, "seven bytes", b"1234567")
    single(REFUSED, "header of nothing", file(b"", b""))
    for length in (0, 9, 100_000_001, 2**31, 2**63, 2**64 - 1):
        single(REFUSED, f"header of {length} bytes", file(b"{}", b"123456", length))

    def sparse(folder: Path, name: str, head: bytes, size: int) -> None:
        (folder / name).write_bytes(head)
        os.truncate(folder / name, size)

    head = struct.pack("<Q", 100_000_001)
    REFUSED["oversize header"] = lambda folder: sparse(folder, SINGLE, head, 100_000_100)
    REFUSED["header of zeros"] = lambda folder: sparse(folder, SINGLE, struct.pack("<Q", 64), 128)
    REFUSED["oversize index"] = lambda folder: sparse(folder, INDEX, b"{", 100_000_001)
    two = {"a": entry(0, 4), "b": entry(4, 8)}
    single(READ, "two tensors", file(two, b"12345678"))
    single(READ, "no tensors", file({}))
    single(READ, "an empty tensor", file({"a": entry(0, 0), "b": entry(0, 1)}, b"1"))
    single(REFUSED, "truncated", file(two, b"1234567"))
    single(REFUSED, "trailing bytes", file(two, b"123456789"))
    for name, begin, end in (("gap", 5, 9), ("overlap", 3, 7), ("reversed", 8, 4),
                             ("negative", -4, 0), ("beyond int64", 2**63, 2**63 + 4),
                             ("beyond uint64", 2**64, 2**64 + 4)):  # fmt: skip
        tensor = entry(begin, end, shape=[4])
        single(REFUSED, f"offsets {name}", file({"a": entry(0, 4), "b": tensor}, b"12345678"))


def entries() -> None:
    for name, given in {
        "unknown dtype": entry(0, 1, "U7"),
        "no dtype": {"shape": [1], "data_offsets": [0, 1]},
        "dtype of another type": {**entry(0, 1), "dtype": 8},
        "shape of floats": entry(0, 1, shape=[1.0]),
        "shape of texts": entry(0, 1, shape=["1"]),
        "negative shape": entry(0, 1, shape=[-1]),
        "another size": entry(0, 1, shape=[2]),
        "overflowing shape": entry(0, 1, shape=[2**32, 2**32, 1]),
        "overflow behind a zero": entry(0, 1, shape=[2**62, 2**62, 0]),
        "33 dimensions": entry(0, 1, shape=[1] * 33),
        "half a byte": entry(0, 1, "F4", [1]),
        "one offset": {**entry(0, 1), "data_offsets": [1]},
        "an array": [1],
        "null": None,
    }.items():
        single(REFUSED, f"entry with {name}", file({"a": given}, b"x"))
    single(READ, "32 dimensions", file({"a": entry(0, 1, shape=[1] * 32)}, b"x"))


def headers() -> None:
    one = json.dumps(entry(0, 1)).encode()
    for name, text in {
        "array": b"[]", "text": b'"a"', "cut": b'{"a":', "BOM": b"\xef\xbb\xbf{}",
        "blank first": b" {}", "rubbish after": b"{} x", "comma": b'{"a":' + one + b",}",
        "NaN": b'{"a":NaN}', "deep array": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "duplicate": b'{"a":' + one + b',"a":' + one + b"}",
        "duplicate by an escape": b'{"a":' + one + b',"\\u0061":' + one + b"}",
        "duplicate inside": b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        "not UTF-8": b'{"\xff":' + one + b"}", "a surrogate": b'{"\xed\xa0\x80":' + one + b"}",
        "half a pair": b'{"\\ud800":' + one + b"}", "a raw newline": b'{"\n":' + one + b"}",
        "numbers as metadata": b'{"__metadata__":{"a":1},"a":' + one + b"}",
    }.items():  # fmt: skip
        single(REFUSED, f"header with {name}", file(text, b"x" if one in text else b""))
    dots = "." * 200_000
    single(READ, "a name of dots", file({dots: entry(0, 1)}, b"x"))
    parts = {f"{'.a' * n}.": entry(0, 0) for n in range(500)}
    single(READ, "names of names", file(parts))
    single(READ, "no name", file({"": entry(0, 1)}, b"x"))
    for name in (CONTROL, dots, "\0", "../../etc/passwd"):
        single(READ, f"name {len(READ)}", file({name: entry(0, 1)}, b"x"))
        single(REFUSED, f"name {len(REFUSED)}", file({name: entry(0, 2, shape=[1])}, b"xx"))
        single(REFUSED, f"dtype {len(REFUSED)}", file({"a": entry(0, 1, name)}, b"x"))


def indices() -> None:
    good = {"a": "a.safetensors", "b": "b.safetensors"}
    indexed(READ, "index", {"weight_map": good})
    indexed(READ, "index of one", {"weight_map": {"a": "a.safetensors"}, "metadata": {"a": [1.5]}})
    for name, text in {
        "no JSON": b"{", "nothing": b"", "array": b"[]", "null": b"null", "BOM": b"\xef\xbb\xbf{}",
        "deep": b'{"weight_map":' + b"[" * 100_000,
        "duplicate": b'{"weight_map":{"a":"b.safetensors","a":"a.safetensors"}}',
        "two maps": b'{"weight_map":{"a":"a.safetensors"},"weight_map":{"b":"b.safetensors"}}',
        "NaN": b'{"weight_map":{"a":"a.safetensors"},"x":NaN}',
        "not UTF-8": b'{"weight_map":{"\xff":"a.safetensors"}}',
    }.items():  # fmt: skip
        indexed(REFUSED, f"index with {name}", text)
    for name, found in {"none": None, "array": ["a"], "empty": {}, "text": "a", "null": 1}.items():
        indexed(REFUSED, f"map {name}", {} if found is None else {"weight_map": found})
    for file_name in ("../a.safetensors", "/etc/passwd", "", ".", "..", "./a.safetensors", "a/", 1,
                      "a.safetensors\0", "missing", "missing\x1b\n", None, ["a"], {}):  # fmt: skip
        indexed(REFUSED, f"shard {len(REFUSED)}", {"weight_map": good | {"a": file_name}})
    indexed(REFUSED, "not in its shard", {"weight_map": good | {"c": "a.safetensors"}})
    indexed(REFUSED, "named by escapes", {"weight_map": good | {CONTROL: "a.safetensors"}})
    indexed(REFUSED, "in another shard", {"weight_map": {**good, "a": "b.safetensors"}})

    def twice(folder: Path) -> None:
        for name in good.values():
            (folder / name).write_bytes(file({CONTROL: entry(0, 1)}, b"x"))
        (folder / INDEX).write_text(json.dumps({"weight_map": good}))

    REFUSED["in two shards"] = twice


def states() -> None:
    single(READ, "weight", weight())
    single(READ, "weight of another table", weight(quant_map=("F32", [16], bytes(64))))
    nested = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0}
    for name, state in {
        "no JSON": b"{",
        "nothing": b"",
        "array": b"[]",
        "null": b"null",
        "not UTF-8": b'{"\xff":1}',
        "deep": b"[" * 30_000,
        "duplicate": json.dumps(STATE)[:-1].encode() + b',"blocksize":64}',
        "another type": STATE | {"quant_type": "fp4"},
        "unknown dtype": STATE | {"dtype": "int8"},
        "empty shape": STATE | {"shape": []},
        "negative shape": STATE | {"shape": [-2, -32]},
        "large shape": STATE | {"shape": [2**62, 32]},
        "another shape": STATE | {"shape": [4, 32]},
        "shape of floats": STATE | {"shape": [2.0, 32]},
        "no shape": {key: value for key, value in STATE.items() if key != "shape"},
        "blocksize 0": STATE | {"blocksize": 0},
        "blocksize 33": STATE | {"blocksize": 33},
        "large blocksize": STATE | {"blocksize": 2**40},
        "blocksize true": STATE | {"blocksize": True},
        "nested, without parts": STATE | nested,
        "huge offset": STATE | nested | {"nested_offset": 1e300},
    }.items():
        single(REFUSED, f"state with {name}", weight(state))
    for name in ("absmax", "quant_map"):
        single(REFUSED, f"weight without {name}", weight(**{name: None}))
    single(REFUSED, "short codes", weight(weight=("U8", [31, 1], bytes(31))))
    single(REFUSED, "long absmax", weight(absmax=("F32", [3], bytes(12))))
    single(REFUSED, "absmax of bytes", weight(absmax=("U8", [2], bytes(2))))
    single(REFUSED, "short table", weight(quant_map=("F32", [15], bytes(60))))


def configs() -> None:
    def make(name: str, text: bytes) -> None:
        def folder_of(folder: Path) -> None:
            (folder / SINGLE).write_bytes(ONE)
            (folder / "config.json").write_bytes(text)

        REFUSED_CONFIG[name] = folder_of

    make("no JSON", b"{")
    make("array", b"[]")
    make("deep", b"[" * 100_000)
    make("duplicate", b'{"a":1,"a":2}')
    make("two quantization configs", b'{"quantization_config":{},"quantization_config":{"a":1}}')
    make("not UTF-8", b'{"\xff":1}')
    make("BOM", b"\xef\xbb\xbf{}")
    make("large", b"{" + b" " * 16_000_000 + b"}")


def main() -> None:
    for fill in (special_files, folders, lengths, entries, headers, indices, states, configs):
        fill()
    destination = Path(sys.argv[1])
    for verdict, table in (
        ("read", READ),
        ("refused", REFUSED),
        ("refused_config", REFUSED_CONFIG),
    ):
        for name, make in table.items():
            folder = destination / verdict / name
            folder.mkdir(parents=True)
            make(folder)


if __name__ == "__main__":
    main()
