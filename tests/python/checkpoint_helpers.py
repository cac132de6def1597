"""Small safetensors files and models for the checkpoint and CLI tests."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import nf4
import numpy as np
from limits import HANG
from nf4.cli import main

# For the programs that the tests start: they must find the package that is tested.
_PACKAGE = str(Path(nf4.__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_PACKAGE, os.environ.get("PYTHONPATH")]))

NUMPY_NAMES = {
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "int8": "I8",
    "uint32": "U32",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
}


def stored_config(folder: Path) -> dict[str, Any]:
    """The quantization_config of a model's config.json."""
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def raw_file(header: object, data: bytes = b"") -> bytes:
    """The bytes of a file with this header, which need not be a sensible one."""
    if isinstance(header, (dict, list)):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    assert isinstance(header, bytes)
    return struct.pack("<Q", len(header)) + header + data


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_bytes(tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    """A valid file, in the order given and without any alignment."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, array in tensors.items():
        end = len(data) + array.nbytes
        header[name] = entry(NUMPY_NAMES[array.dtype.name], list(array.shape), len(data), end)
        data += array.tobytes()
    return raw_file(header, data)


def random_weight(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape)
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def dense_tensors(dtype: str = "float32") -> dict[str, np.ndarray]:
    """A tiny model: an embedding, two layers (one with an odd number of elements), a norm and
    a head."""
    return {
        "model.embed_tokens.weight": random_weight((10, 32), dtype, 1),
        "model.layers.0.proj.weight": random_weight((24, 32), dtype, 2),
        "model.layers.0.proj.bias": random_weight((24,), dtype, 3),
        "model.layers.1.proj.weight": random_weight((7, 11), dtype, 4),
        "model.norm.weight": random_weight((32,), dtype, 5),
        "lm_head.weight": random_weight((10, 32), dtype, 6),
    }


QUANTIZED = ("model.layers.0.proj.weight", "model.layers.1.proj.weight")


def write_model(folder: Path, tensors: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    """A model directory with one weights file, a config, and a tokenizer."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(file_bytes(tensors or dense_tensors()))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "tokenizer.json").write_text('{"vocab": "caf\u00e9"}', encoding="utf-8")
    return folder


def write_shards(folder: Path, tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A model directory with a shard for each tensor, and the index."""
    folder.mkdir(parents=True)
    tensors = tensors or dense_tensors()
    weight_map = {}
    for number, (name, array) in enumerate(tensors.items(), 1):
        shard = f"model-{number:05}-of-{len(tensors):05}.safetensors"
        (folder / shard).write_bytes(file_bytes({name: array}))
        weight_map[name] = shard
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return folder


def load_all(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of the safetensors files at a path, as dtype, shape and bytes, read by a
    few lines of their own."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    found = {}
    for file in files:
        content = file.read_bytes()
        start = 8 + struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8:start])
        header.pop("__metadata__", None)
        for name, info in header.items():
            begin, end = (start + offset for offset in info["data_offsets"])
            found[name] = (info["dtype"], tuple(info["shape"]), content[begin:end])
    return found


def command(*arguments: object) -> list[str]:
    """`nf4` with these arguments, for subprocess."""
    return [sys.executable, "-m", "nf4", *map(str, arguments)]


def run_cli(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=HANG, check=False, **options
    )


def listing(folder: Path) -> list[str]:
    """All names in a directory, hidden ones and temporaries included."""
    return sorted(os.listdir(folder))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file under a directory by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def report(capsys: Any, *arguments: object, code: int = 0) -> dict[str, Any]:
    """Runs `nf4 ... --json`, and returns what it prints."""
    assert main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)
