"""Engines of vLLM on libnf4 say what transformers says of the dequantized checkpoint in fp32:
the same greedy tokens, with log-probabilities within 1e-5."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpt_oss_models
import models
import nf4.torch
import pytest
from safetensors.torch import load_file, save_file

TOLERANCE = 1e-5


class Made:
    """Checkpoints in a folder, each made once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.dense = functools.cache(self._dense)
        self.checkpoint = functools.cache(self._checkpoint)
        self.reference = functools.cache(self._reference)

    def _dense(self, name: str) -> Path:
        return models.dense(self._folder / name, name)

    def _checkpoint(self, name: str, **options: Any) -> Path:
        label = re.sub(r"\W+", "-", f"{name} {options} nf4")
        return models.quantized(self.dense(name), self._folder / label, **options)

    def _reference(self, checkpoint: Path) -> dict[str, Any]:
        return models.reference(checkpoint, checkpoint.with_name(checkpoint.name + "-dense"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("models"))


def require_same(said: dict[str, Any], expected: dict[str, Any]) -> None:
    assert said.get("error") is None
    assert said["method"] == "nf4"
    assert said["tokens"] == expected["tokens"]
    pairs = zip(said["logprobs"], expected["logprobs"], strict=True)
    worst = max(abs(a - b) for left, right in pairs for a, b in zip(left, right, strict=True))
    assert worst < TOLERANCE


Engines = Callable[..., list[dict[str, Any]]]
PARALLEL = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # two ranks on any number of cores
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


def test_two_ranks(engines: Engines, made: Made) -> None:
    checkpoints = [made.checkpoint(*each) for each in (("llama",), ("phi3",))]
    checkpoints.append(made.checkpoint("qwen3_moe", experts=True))
    for checkpoint in checkpoints:
        (said,) = engines({"model": str(checkpoint)} | PARALLEL, **UNBOUND)
        require_same(said, made.reference(checkpoint))


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


def test_gpt_oss(engines: Engines, tmp_path: Path) -> None:
    """In MXFP4. On two ranks one has 64 columns of the experts, the other 32."""
    sizes = {"head_dim": 32, "vocab_size": 512}
    state = gpt_oss_models.write(tmp_path / "mxfp4", **sizes)
    dense = gpt_oss_models.dense_model(state, **sizes)
    stored = load_file(tmp_path / "mxfp4" / "model.safetensors")
    for tensor in (stored["lm_head.weight"], dense.lm_head.weight.data):
        tensor *= 20  # so that logits differ clearly
    save_file(stored, tmp_path / "mxfp4" / "model.safetensors", {"format": "pt"})
    dense.save_pretrained(tmp_path / "dense")
    expected = models.greedy(tmp_path / "dense")
    one = {"model": str(tmp_path / "mxfp4"), "quantization": "nf4"}
    options = {"format": "mxfp4", "layout": "gpt-oss"}
    ours = models.quantized(tmp_path / "dense", tmp_path / "ours", **options)
    *said, of_ours = engines(one, one | {"reload": True}, one | {"model": str(ours)})
    for each in said:
        require_same(each, expected)
    require_same(of_ours, models.reference(ours, tmp_path / "ours-dense"))
    (said,) = engines(one | PARALLEL, **UNBOUND)
    require_same(said, expected)


def test_weights_are_loaded_again(engines: Engines, made: Made) -> None:
    checkpoints = [made.checkpoint("llama"), made.checkpoint("qwen3_moe", experts=True)]
    said = engines(*({"model": str(each), "reload": True} for each in checkpoints))
    for checkpoint, each in zip(checkpoints, said, strict=True):
        require_same(each, made.reference(checkpoint))


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
    (said,) = engines({"model": str(made.checkpoint("llama"))}, NF4_VLLM="0")
    assert "Unknown quantization method: bitsandbytes" in said["error"]
