"""tools/demo: the reader of GGUF, the LLaMA in numpy, text and perplexity of `./dev demo`."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import nf4
import numpy as np
import pytest
from conftest import ROOT
from nf4.checkpoint import FormatError

DEMO = ROOT / "tools" / "demo"
sys.path.insert(0, str(DEMO))

import gguf_llama  # noqa: E402
from numpy_llama import Llama  # noqa: E402

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
# GPT-2's letters for bytes: printable ones are themselves.
TOKENS = ["<end>", *map(chr, BYTES), *map(chr, range(256, 512 - len(BYTES)))]
SCALAR = {int: (4, "<I"), float: (6, "<f"), bool: (7, "<?")}


def packed_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def packed_value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, str):
        return 8, packed_string(value)
    if isinstance(value, list):
        kind = packed_value(value[0])[0] if value else 8
        body = b"".join(packed_value(each)[1] for each in value)
        return 9, struct.pack("<IQ", kind, len(value)) + body
    kind, code = SCALAR[type(value)]
    return kind, struct.pack(code, value)


def q4_1(weight: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Its blocks of 32, and what they stand for."""
    blocks = weight.reshape(-1, 32)
    low = blocks.min(1, keepdims=True).astype(np.float16)
    scale = ((blocks.max(1, keepdims=True) - low) / 15).astype(np.float16)
    codes = np.clip(np.rint((blocks - low) / scale), 0, 15).astype(np.uint8)
    raw = b"".join(
        s.tobytes() + m.tobytes() + (c[:16] | c[16:] << 4).tobytes()
        for s, m, c in zip(scale, low, codes, strict=True)
    )
    return raw, (scale.astype(np.float32) * codes + low).reshape(weight.shape)


def q8_0(weight: np.ndarray) -> tuple[bytes, np.ndarray]:
    blocks = weight.reshape(-1, 32)
    scale = (abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    codes = np.rint(blocks / scale).astype(np.int8)
    raw = b"".join(s.tobytes() + c.tobytes() for s, c in zip(scale, codes, strict=True))
    return raw, (scale.astype(np.float32) * codes).reshape(weight.shape)


def f32(weight: np.ndarray) -> tuple[bytes, np.ndarray]:
    return weight.astype(np.float32).tobytes(), weight.astype(np.float32)


def write_gguf(path: Path, **changes: Any) -> dict[str, np.ndarray]:
    """A small model. Returns what its tensors stand for, by GGUF's names."""
    rng = np.random.default_rng(0)
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {"token_embd.weight": ((len(TOKENS), HIDDEN), q8_0, 8)}
    for layer in range(LAYERS):
        matrices = {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INTERMEDIATE, HIDDEN),
            "ffn_up": (INTERMEDIATE, HIDDEN),
            "ffn_down": (HIDDEN, INTERMEDIATE),
        }
        for name, shape in matrices.items():
            shapes[f"blk.{layer}.{name}.weight"] = (shape, q4_1, 3)
        for name in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{layer}.{name}.weight"] = ((HIDDEN,), f32, 0)
    shapes["output_norm.weight"] = ((HIDDEN,), f32, 0)
    llama = {
        "vocab_size": len(TOKENS),
        "embedding_length": HIDDEN,
        "feed_forward_length": INTERMEDIATE,
        "block_count": LAYERS,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "context_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] + [1] * (len(TOKENS) - 1),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    } | {f"llama.{key}": value for key, value in llama.items()}
    metadata |= changes.get("metadata", {})
    meant, infos, body = {}, b"", b""
    for name, (shape, encode, kind) in shapes.items():
        values = rng.standard_normal(shape) * (0.2 if len(shape) == 2 else 1)
        raw, meant[name] = encode(values.astype(np.float32))
        infos += packed_string(name) + struct.pack("<I", len(shape))
        infos += struct.pack(f"<{len(shape)}Q", *shape[::-1])
        infos += struct.pack("<IQ", changes.get("kind", kind), len(body))
        body += raw + bytes(-len(raw) % 32)
    head = struct.pack("<4sIQQ", b"GGUF", changes.get("version", 3), len(shapes), len(metadata))
    for key, value in metadata.items():
        kind, raw = packed_value(value)
        head += packed_string(key) + struct.pack("<I", kind) + raw
    head += infos
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return meant


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_gguf(path)


@pytest.fixture(scope="module")
def folder(gguf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoint") / "tiny"
    gguf_llama.convert(gguf[0], made)
    return made


def test_every_tensor_is_there_in_bf16(gguf, folder):
    """Heads of q and k in the order of transformers, others as they are."""
    meant = gguf[1]
    tensors = nf4.load(folder)
    assert len(tensors) == len(meant)
    pairs = {
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    for theirs, ours in pairs.items():
        assert np.array_equal(tensors[ours], meant[theirs].astype(tensors[ours].dtype))
    q, expected = (
        tensors["model.layers.1.self_attn.q_proj.weight"],
        meant["blk.1.attn_q.weight"],
    )
    size = HIDDEN // HEADS
    for row in range(HIDDEN):
        head, place = divmod(row, size)
        half, pair = divmod(place, size // 2)
        assert np.array_equal(q[row], expected[head * size + 2 * pair + half].astype(q.dtype))
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"version": 2}, "version 2"),
        ({"kind": 14}, "type 14"),
        ({"metadata": {"general.architecture": "gemma3"}}, "gemma3"),
        ({"metadata": {"tokenizer.ggml.pre": "llama-bpe"}}, "llama-bpe"),
        ({"metadata": {"general.alignment": 0}}, "ZeroDivisionError"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": 1000}}, "IndexError"),
    ],
)
def test_another_gguf_is_refused(changes, said, tmp_path):
    write_gguf(tmp_path / "other.gguf", **changes)
    with pytest.raises(gguf_llama.GgufError, match=said):
        gguf_llama.convert(tmp_path / "other.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_gguf_is_refused(gguf, tmp_path):
    (tmp_path / "short.gguf").write_bytes(gguf[0].read_bytes()[:-64])
    with pytest.raises(gguf_llama.GgufError, match="ends within"):
        gguf_llama.convert(tmp_path / "short.gguf", tmp_path / "out")
    (tmp_path / "cut.gguf").write_bytes(gguf[0].read_bytes()[:100])
    with pytest.raises(gguf_llama.GgufError, match="cut.gguf: not what is read here"):
        gguf_llama.convert(tmp_path / "cut.gguf", tmp_path / "out")
    program = [sys.executable, str(DEMO / "gguf_llama.py")]
    result = subprocess.run(
        [*program, str(DEMO / "demo.py"), str(tmp_path / "out")], capture_output=True, text=True
    )
    assert result.returncode == 1 and "not a GGUF file" in result.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral"},
        {"rope_parameters": {"rope_type": "llama3"}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
    ],
)
def test_what_is_not_computed_is_refused(change, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **change}))
    key = "rope_type" if "rope_parameters" in change else next(iter(change))
    with pytest.raises(FormatError, match=f"{key} is"):
        Llama(tmp_path)


@pytest.mark.interop
def test_the_llama_in_numpy_is_that_of_transformers(folder):
    transformers, torch = (pytest.importorskip(name) for name in ("transformers", "torch"))
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = np.random.default_rng(1).integers(0, len(TOKENS), 24).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens]), labels=torch.tensor([tokens]))
    ours = Llama(folder)
    in_two = np.concatenate([ours.logits(tokens[:10]), ours.logits(tokens[10:])])
    np.testing.assert_allclose(in_two, expected.logits[0].numpy(), atol=2e-4)
    assert np.log(ours.perplexity(tokens)) == pytest.approx(expected.loss.item(), rel=1e-5)


def test_text_and_perplexity_of_each_kind(folder, tmp_path):
    """config.json does not say what the model is: `nf4 quantize` goes by names then, sooner."""
    pytest.importorskip("tokenizers")
    model = tmp_path / "model"
    model.mkdir()
    for file in folder.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"], config["architectures"]
    (model / "config.json").write_text(json.dumps(config))
    program = [sys.executable, str(DEMO / "language.py"), "--out", str(tmp_path / "out")]
    arguments = ["--model", str(model), "--prompt", "A 4-bit weight"]
    result = subprocess.run([*program, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for kind in ("dense, bf16", "NF4", "integers", "MXFP4"):
        assert re.search(rf"^  {kind} .*B +[1-9][\d.]+ +\d+$", result.stdout, re.M), result.stdout
    assert "'A 4-bit weight' goes on" in result.stdout
    kinds = {
        name: {type(each) for each in nf4.load(tmp_path / "out" / f"model-{name}").values()}
        for name in ("nf4", "int4", "mxfp4")
    }
    assert kinds["nf4"] == kinds["mxfp4"] == {nf4.QuantizedTensor, np.ndarray}
    assert kinds["int4"] == {nf4.Int4Tensor, np.ndarray}


def test_calibrated_nf4_is_an_option(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    import language

    calls = []
    monkeypatch.setattr(language.subprocess, "run", lambda words, **_: calls.append(words))
    assert list(language.quantized(Path("model"), tmp_path, [])) == ["dense, bf16", *language.KINDS]
    assert not any("--calibrate" in words for words in calls)
    found = language.quantized(Path("model"), tmp_path, [Path("a"), Path("b")])
    assert found["NF4, calibrated"] == tmp_path / "model-nf4-calibrated"
    assert calls[-1][3:8] == ["quantize", "--calibrate", "a", "--calibrate", "b"]


def test_what_is_wrong_is_said(tmp_path):
    pytest.importorskip("tokenizers")
    program = [sys.executable, str(DEMO / "language.py"), "--out", str(tmp_path / "out")]
    result = subprocess.run(
        [*program, "--model", str(tmp_path / "none")], capture_output=True, text=True
    )
    assert result.returncode not in (0, None)
    assert "none" in result.stderr and "Traceback" not in result.stderr
