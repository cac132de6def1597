"""Writes a checkpoint of LLaMA's shape with random weights in bitsandbytes' NF4, for speed and for
comparisons of backends: all layers have the same bytes, so it takes seconds at any size.

    python bench/random_llama.py FOLDER [--layers 32] [--hidden 4096] [--heads 32]
        [--kv-heads 32] [--intermediate 11008] [--vocabulary 32000] [--positions 4096]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import nf4
import numpy as np

BLOCK, NESTED = 64, 256


def linear(rng: np.random.Generator, rows: int, cols: int) -> dict[str, np.ndarray]:
    """The parts of a weight, whose elements are about 0.5 / sqrt(cols)."""
    size, blocks = rows * cols, -(-rows * cols // BLOCK)
    offset = float(np.float32(1 / cols**0.5))
    state = {
        "quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": [rows, cols],
        "nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": offset,
    }  # fmt: skip
    return {
        "": np.frombuffer(rng.bytes(size // 2), np.uint8).reshape(-1, 1),
        ".absmax": np.frombuffer(rng.bytes(blocks), np.uint8),
        ".quant_map": np.array(nf4.codebook("nf4"), np.float32),
        ".nested_absmax": np.full(-(-blocks // NESTED), offset / 2, np.float32),
        ".nested_quant_map": np.array(nf4.scale_code(), np.float32),
        ".quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


def bf16(values: np.ndarray) -> np.ndarray:
    """Cut to 16 bits, as uint16."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def tensors(shape: argparse.Namespace) -> dict[str, np.ndarray]:
    """All by name; those of layers are shared."""
    rng, hidden, wide = np.random.default_rng(0), shape.hidden, shape.intermediate
    kv = hidden // shape.heads * shape.kv_heads
    embedding, head = rng.random((2, shape.vocabulary, hidden), np.float32) - np.float32(0.5)
    ones = bf16(np.ones(hidden))
    sizes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }  # fmt: skip
    layer = {"input_layernorm.weight": ones, "post_attention_layernorm.weight": ones}
    for name, (rows, cols) in sizes.items():
        layer |= {f"{name}.weight{part}": value for part, value in linear(rng, rows, cols).items()}
    found = {
        "model.embed_tokens.weight": bf16(embedding), "model.norm.weight": ones,
        "lm_head.weight": bf16(head),
    }  # fmt: skip
    for i in range(shape.layers):
        found |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    # Tensors with the largest elements come first, so that all are aligned.
    return dict(sorted(found.items(), key=lambda item: -item[1].itemsize))


def write(folder: Path, shape: argparse.Namespace) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found, header, begin = tensors(shape), {"__metadata__": {"format": "pt"}}, 0
    dtypes = {4: "F32", 2: "BF16", 1: "U8"}
    for name, value in found.items():
        end = begin + value.nbytes
        described = {"dtype": dtypes[value.itemsize], "shape": list(value.shape)}
        header[name] = described | {"data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in found.values():
            file.write(value.tobytes())
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "vocab_size": shape.vocabulary, "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.positions, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        "quantization_config": {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": ["lm_head"],
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    usual = {
        "layers": 32, "hidden": 4096, "heads": 32, "kv-heads": 32, "intermediate": 11008,
        "vocabulary": 32000, "positions": 4096,
    }  # fmt: skip
    for name, size in usual.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    arguments = parser.parse_args()
    write(arguments.folder, arguments)


if __name__ == "__main__":
    main()
