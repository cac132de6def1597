"""Engines of vLLM on libnf4 say what transformers says of the dequantized checkpoint in fp32:
the same greedy tokens, with log-probabilities within 1e-5."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import models
import nf4.torch
from conftest import Engines
from models import Made, require_same
from safetensors.torch import load_file, save_file

CASES = [
    ("llama", {}),
    ("llama", {"nested": False}),
    ("llama", {"format": "fp4", "blocksize": 128}),
    ("llama", {"skip": ("*.k_proj", "*.up_proj"), "storage": "bfloat16"}),
    ("qwen3", {}),
    ("phi3", {}),
    ("phi3", {"nested": False, "blocksize": 32}),
    ("mixtral", {"experts": True}),
    ("mixtral", {}),
    ("qwen3_moe", {"experts": True}),
    ("qwen3_moe", {"experts": True, "nested": False}),
]


def test_checkpoints(engines: Engines, made: Made) -> None:
    checkpoints = [made.checkpoint(name, **options) for name, options in CASES]
    said = engines(*({"model": str(each)} for each in checkpoints))
    for checkpoint, each in zip(checkpoints, said, strict=True):
        require_same(each, made.reference(checkpoint))


def test_nested_scales_become_flat(engines: Engines, made: Made) -> None:
    checkpoints = [made.checkpoint("llama"), made.checkpoint("qwen3_moe", experts=True)]
    said = engines(*({"model": str(each), "flat": True} for each in checkpoints))
    for checkpoint, each in zip(checkpoints, said, strict=True):
        require_same(each, made.reference(checkpoint))


def test_a_dense_checkpoint_is_quantized_while_it_loads(engines: Engines, made: Made) -> None:
    options = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}
    options["llm_int8_skip_modules"] = ["o_proj"]
    overrides = {"quantization_config_dict_json": json.dumps(options)}
    dense = {"model": str(made.dense("llama")), "quantization": "nf4"}
    said = engines(dense, dense | {"hf_overrides": overrides})
    require_same(said[0], made.reference(made.checkpoint("llama")))
    other = made.checkpoint("llama", format="fp4", nested=False, skip=("*.o_proj",))
    require_same(said[1], made.reference(other))


def test_dense_experts_of_one_matrix_each_are_quantized(engines: Engines, made: Made) -> None:
    dense = made.dense("qwen3_moe")
    names = load_file(dense / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.7.down_proj.weight" in names
    overrides = {"quantization_config_dict_json": '{"bnb_4bit_use_double_quant": false}'}
    (said,) = engines({"model": str(dense), "quantization": "nf4", "hf_overrides": overrides})
    stacks = made.checkpoint("qwen3_moe", experts=True, nested=False)  # the same bytes
    require_same(said, made.reference(stacks))


def test_rows_that_vllm_reorders(engines: Engines, made: Made, tmp_path: Path) -> None:
    """vLLM's Falcon reorders the rows of q, k and v, which a dense checkpoint allows. The scales
    are flat, since a nested block would have other rows. `nf4 quantize` leaves Falcon's own linear
    layers dense, as transformers does, so this rounds the weights for the reference."""
    folder = made.dense("falcon")
    rounded, four_bits = (shutil.copytree(folder, tmp_path / name) for name in ("rounded", "bnb"))
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        if ".h." in name and weight.dim() == 2:
            quantized = nf4.torch.quantize(weight, nested_blocksize=0)
            tensors[name] = nf4.torch.dequantize(quantized, "fp32")
    save_file(tensors, rounded / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (four_bits / "config.json").write_text(json.dumps(config))

    overrides = {"quantization_config_dict_json": '{"bnb_4bit_use_double_quant": false}'}
    dense = {"model": str(folder), "quantization": "nf4", "hf_overrides": overrides}
    said, refused = engines(dense, {"model": str(four_bits)})
    require_same(said, models.greedy(rounded))
    assert "reorders rows of weights of models of type falcon" in refused["error"]


def test_other_weights_are_loaded(engines: Engines, made: Made) -> None:
    cases = [("llama", {}), ("qwen3_moe", {"experts": True})]
    checkpoints = [made.checkpoint(name, **options) for name, options in cases]
    others = [made.checkpoint(f"{name}_again", **options) for name, options in cases]
    pairs = list(zip(checkpoints, others, strict=True))
    said = engines(*({"model": str(each), "reload": str(other)} for each, other in pairs))
    for (checkpoint, other), each in zip(pairs, said, strict=True):
        require_same(each, made.reference(other))
        assert each["tokens"] != made.reference(checkpoint)["tokens"]


def test_weights_in_another_format_are_not_loaded(engines: Engines, made: Made) -> None:
    for name in ("llama", "qwen3_moe"):
        options = {"experts": True} if name == "qwen3_moe" else {}
        other = made.checkpoint(name, format="fp4", **options)
        run = {"model": str(made.checkpoint(name, **options)), "reload": str(other)}
        (said,) = engines(run)
        assert "loaded again in another format, blocksize or shape" in said["error"]


def test_lora(engines: Engines, made: Made, tmp_path: Path) -> None:
    checkpoint = made.checkpoint("llama")
    made.reference(checkpoint)
    dense = checkpoint.with_name(checkpoint.name + "-dense")
    models.adapter(tmp_path / "adapter", dense, tmp_path / "merged")
    arguments = {"enable_lora": True, "max_lora_rank": 8, "lora": str(tmp_path / "adapter")}
    (said,) = engines({"model": str(checkpoint)} | arguments)
    expected = models.greedy(tmp_path / "merged")
    assert expected["tokens"] != made.reference(checkpoint)["tokens"]
    require_same(said, expected)


def test_speculative_decoding(engines: Engines, made: Made) -> None:
    """By a second model, which is in FP4, and by n-grams of the prompt."""
    run = {"model": str(made.checkpoint("llama"))}
    draft = {"model": str(made.checkpoint("llama", format="fp4", blocksize=128))}
    ngrams = {"method": "ngram", "prompt_lookup_max": 2}
    of_draft, of_ngrams = (
        run | {"speculative_config": each | {"num_speculative_tokens": 3}}
        for each in (draft, ngrams)
    )
    # After one with n-grams, which imports numba, vLLM cannot make another engine in a process.
    for said in (*engines(of_draft), *engines.alone(of_ngrams)):
        require_same(said, made.reference(made.checkpoint("llama")))
        assert said["draft"] == "nf4"  # the model itself, where there is no second one


def test_compiled(engines: Engines, made: Made) -> None:
    checkpoint = made.checkpoint("llama")
    (said,) = engines({"model": str(checkpoint), "enforce_eager": False})
    require_same(said, made.reference(checkpoint))


def test_what_is_refused(engines: Engines, made: Made, tmp_path: Path) -> None:
    def changed(name: str, change: Callable[[Path], None]) -> dict[str, str]:
        folder = tmp_path / name
        models.quantized(made.dense("qwen3"), folder)
        change(folder)
        return {"model": str(folder)}

    def without_absmax(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight.absmax"]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def without_a_layer(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        kept = {k: v for k, v in tensors.items() if "layers.1.self_attn.k_proj" not in k}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})

    def without_a_shard(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        shards = {name: int("layers.1." in name) for name in tensors}
        for i in range(2):
            part = {name: tensors[name] for name, shard in shards.items() if shard == i}
            save_file(part, folder / f"model-{i}.safetensors", {"format": "pt"})
        index = {"weight_map": {name: f"model-{i}.safetensors" for name, i in shards.items()}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "model.safetensors").unlink()
        (folder / "model-1.safetensors").unlink()

    def eight_bits(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= {"load_in_8bit": True, "load_in_4bit": False}
        (folder / "config.json").write_text(json.dumps(config))

    said = engines(
        changed("absmax", without_absmax),
        changed("layer", without_a_layer),
        changed("shard", without_a_shard),
        changed("eight", eight_bits),
    )
    expected = (
        "model.layers.1.mlp.gate_up_proj (1): the checkpoint lacks ['absmax']",
        "model.layers.1.self_attn.qkv_proj: the checkpoint lacks row 256",
        "model-1.safetensors",  # which vLLM says itself
        "does not read 8 bits of bitsandbytes; vllm-bnb-plugin does",
    )
    for each, words in zip(said, expected, strict=True):
        assert words in each["error"]


def test_switched_off(engines: Engines, made: Made) -> None:
    (said,) = engines.alone({"model": str(made.checkpoint("llama"))}, NF4_VLLM="0")
    assert "Unknown quantization method: bitsandbytes" in said["error"]
