"""nf4.torch.load, and nf4 dequantize beside transformers, of forms that public checkpoints of
integers have: nested configs, tensors that a model class ignores, tied heads, experts in matrices.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "in_process")]
torch_cases.require("torch", "transformers")

import nf4  # noqa: E402
import nf4.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from nf4.checkpoint import FormatError, audit  # noqa: E402
from nf4.cli import main  # noqa: E402
from nf4.torch import Int4Linear  # noqa: E402
from nf4.torch.distributed import empty_model, load_checkpoint  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

TOKENS = torch.arange(14).view(2, 7)
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 104, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def integers(tensor: torch.Tensor, layout: str) -> nf4.Int4Tensor:
    return nf4.torch.quantize_int4(
        tensor.contiguous(), layout=layout, group_size=32, symmetric=False
    )


def in_layers(name: str) -> bool:
    return "layers." in name and "norm" not in name and "gate.weight" not in name


def checkpoint(folder: Path, model, layout: str, chosen=in_layers):
    """A checkpoint of a model whose chosen matrices are integers, and the same model with their
    dense numbers."""
    model.save_pretrained(folder / "dense")
    made, dense = {}, {}
    for name, tensor in load_file(folder / "dense" / "model.safetensors").items():
        made[name] = dense[name] = tensor
        if name.endswith(".weight") and tensor.dim() == 2 and chosen(name):
            made[name] = integers(tensor, layout)
            dense[name] = nf4.torch.dequantize(made[name], torch.float32)
    config = json.loads((folder / "dense" / "config.json").read_text())
    nf4.save(folder / "made", made, config=config)
    nf4.save(folder / "dense", dense, config=config, replace=True)
    return folder / "made", loaded(model, folder / "dense")


def loaded(model, folder: Path):
    return type(model).from_pretrained(folder, dtype=torch.float32)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def require_same(found, expected) -> None:
    assert torch_cases.error(logits(found), logits(expected)) <= 1e-5


def require_same_by_every_way(found, dense, path: Path, again: Path) -> None:
    """For a model that was loaded from the folder, saved to `again`, and filled part by part."""
    require_same(found, dense)
    found.save_pretrained(again)
    require_same(nf4.torch.load(again), dense)
    empty = empty_model(path)
    load_checkpoint(empty, path)
    require_same(empty, dense)


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Adds tensors, whose dots are double underscores; None removes one."""
    stored: dict[str, Any] = load_file(folder / "model.safetensors")
    stored |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, edit) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    return config


def llava():
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 16, "patch_size": 8}  # fmt: skip
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **SIZES},
        vision_config={"model_type": "clip_vision_model", **vision},
        image_token_index=103,
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def starcoder2():
    return transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**SIZES)).eval()


def llama(**more: Any):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **more)).eval()


def to_part(config: dict[str, Any]) -> None:
    config["text_config"]["quantization_config"] = config.pop("quantization_config")


@pytest.mark.parametrize("layout", ["gptq_v2", "awq", "compressed-tensors"])
def test_a_config_within_text_config(layout, tmp_path):
    model = llava()
    path, dense = checkpoint(
        tmp_path, model, layout, lambda name: in_layers(name) and "vision" not in name
    )
    edit_config(path, to_part)
    found = nf4.torch.load(path)
    assert sum(isinstance(each, Int4Linear) for each in found.modules()) == 14
    require_same_by_every_way(found, dense, path, tmp_path / "again")
    assert main(["dequantize", str(path), str(tmp_path / "out")]) == 0
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    require_same(loaded(model, tmp_path / "out"), dense)


def test_a_config_in_a_file_beside_is_saved_with_the_model(tmp_path):
    path, dense = checkpoint(tmp_path, llama(), "gptq_v2")
    said = json.loads((path / "config.json").read_text())["quantization_config"]
    edit_config(path, lambda config: config.pop("quantization_config"))
    del said["quant_method"]
    (path / "quantize_config.json").write_text(json.dumps(said))
    found = nf4.torch.load(path)
    require_same(found, dense)
    found.save_pretrained(tmp_path / "again")
    require_same(nf4.torch.load(tmp_path / "again"), dense)


@pytest.mark.parametrize("name", ["act__scales", "act__scale"])
def test_what_the_model_has_no_place_for_is_named(name, tmp_path, capsys):
    """Starcoder2's ScaledActivation of AutoAWQ divides by act.scales: transformers#29421."""
    path, _ = checkpoint(tmp_path, starcoder2(), "awq")
    change(path, **{f"model__layers__0__mlp__{name}": torch.full((128,), 2.0)})
    full = f"model.layers.0.mlp.{name.replace('__', '.')}"
    with pytest.raises(FormatError, match=full):
        nf4.torch.load(path)
    faults = [found for found in audit(str(path))[1] if found.severity == "fault"]
    assert [fault.tensor for fault in faults] == [full]
    for arguments in (["dequantize"], ["convert", "--to", "gptq"]):
        assert main([arguments[0], str(path), str(tmp_path / "out"), *arguments[1:]]) == 3
        assert full in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_buffers_that_a_model_computes_itself_are_no_strangers(tmp_path):
    path, dense = checkpoint(tmp_path, llama(), "gptq")
    attention = "model__layers__0__self_attn__"
    change(path, **{f"{attention}rotary_emb__inv_freq": torch.ones(8),
                    f"{attention}masked_bias": torch.ones(()),
                    f"{attention}bias": torch.ones(1, 1, 4, 4, dtype=torch.bool)})  # fmt: skip
    require_same(nf4.torch.load(path), dense)
    assert [found for found in audit(str(path))[1] if found.severity == "fault"] == []
    assert main(["dequantize", str(path), str(tmp_path / "out")]) == 0


def deepseek(first_k_dense_replace: int = 1):
    sizes = SIZES | {"num_key_value_heads": 4}
    config = transformers.DeepseekV3Config(
        **sizes, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=16, first_k_dense_replace=first_k_dense_replace,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config).eval()


def test_layers_that_the_model_class_ignores(tmp_path, capsys):
    """DeepSeek-V3's layer of multi-token prediction: sglang#40285."""
    path, dense = checkpoint(tmp_path, deepseek(), "gptq")
    tensors, config = nf4.load(path), json.loads((path / "config.json").read_text())
    more = {
        name.replace("layers.1.", "layers.61."): tensor
        for name, tensor in tensors.items()
        if "layers.1." in name
    }
    assert any("experts.3" in name for name in more)
    more["model.layers.61.eh_proj.weight"] = nf4.quantize_int4(
        torch.randn(64, 128).numpy(), layout="gptq", group_size=32, symmetric=False
    )
    more["model.layers.61.enorm.weight"] = torch.ones(64).numpy()
    nf4.save(path, tensors | more, config=config, replace=True)
    require_same(nf4.torch.load(path), dense)
    assert main(["verify", str(path)]) == 0
    capsys.readouterr()
    assert main(["dequantize", str(path), str(tmp_path / "out")]) == 0
    assert "does not load" not in capsys.readouterr().err
    require_same(loaded(dense, tmp_path / "out"), dense)


@pytest.mark.parametrize("layout", ["gptq", "awq", "compressed-tensors"])
def test_a_head_in_integers_beside_tied_embeddings(layout, tmp_path):
    """The head has its own numbers: llm-compressor#2835."""
    path, dense = checkpoint(
        tmp_path, llama(), layout, lambda name: in_layers(name) or name == "lm_head.weight"
    )
    edit_config(path, lambda config: config.update(tie_word_embeddings=True))
    found = nf4.torch.load(path)
    assert isinstance(found.lm_head, Int4Linear) and not found.config.tie_word_embeddings
    require_same_by_every_way(found, dense, path, tmp_path / "again")
    to = "gptq" if layout == "awq" else "awq"
    for arguments in (["dequantize"], ["convert", "--to", to]):
        out = tmp_path / arguments[0]
        assert main([arguments[0], str(path), str(out), *arguments[1:]]) == 0
        assert edit_config(out, lambda config: None)["tie_word_embeddings"] is False
    require_same(loaded(dense, tmp_path / "dequantize"), dense)
    require_same(nf4.torch.load(tmp_path / "convert"), dense)


def llama4(folder: Path):
    """A checkpoint in which each expert has matrices of its own, as quantizers make them."""
    config = transformers.Llama4TextConfig(
        **SIZES, intermediate_size_mlp=64, head_dim=16, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=1,
    )  # fmt: skip
    transformers.Llama4ForCausalLM(config).save_pretrained(folder / "dense")
    made = {}
    for name, tensor in load_file(folder / "dense" / "model.safetensors").items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith("experts"):
            made[name] = tensor
            continue
        for expert in range(4):
            matrices = tensor[expert].T.chunk(2) if last == "gate_up_proj" else [tensor[expert].T]
            kinds = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            for kind, matrix in zip(kinds, matrices, strict=True):
                made[f"{stem}.{expert}.{kind}.weight"] = integers(matrix, "compressed-tensors")
    nf4.save(folder / "made", made, config=json.loads((folder / "dense/config.json").read_text()))
    return folder / "made"


def test_experts_that_the_model_class_does_not_stack_are_told(tmp_path, capsys):
    """transformers then has them as missing: vllm#16309."""
    path = llama4(tmp_path)
    assert main(["dequantize", str(path), str(tmp_path / "out")]) == 0
    stderr = capsys.readouterr().err
    assert "warning: Llama4ForCausalLM" in stderr and "does not load this" in stderr
    assert "feed_forward.experts.gate_up_proj and 3 more" in stderr.replace(
        "down_proj", "gate_up_proj"
    )
    with pytest.raises(FormatError, match=r"experts\.0\."):
        nf4.torch.load(path)


def test_experts_that_the_model_class_stacks(tmp_path, capsys):
    path, dense = checkpoint(tmp_path, deepseek(), "awq")
    assert main(["dequantize", str(path), str(tmp_path / "out")]) == 0
    assert "does not load" not in capsys.readouterr().err
    require_same(loaded(dense, tmp_path / "out"), dense)


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_a_checkpoint_of_auto_round(layout, tmp_path):
    path, dense = checkpoint(tmp_path, llama(), layout)

    def as_auto_round(config: dict[str, Any]) -> None:
        config["quantization_config"] = {
            "bits": 4, "data_type": "int", "group_size": 32, "sym": False,
            "packing_format": f"auto_round:auto_{layout}", "quant_method": "auto-round",
            "block_name_to_quantize": "model.layers",
        }  # fmt: skip

    edit_config(path, as_auto_round)
    require_same(nf4.torch.load(path), dense)
    found = nf4.torch.load(path)
    found.save_pretrained(tmp_path / "again")
    require_same(nf4.torch.load(tmp_path / "again"), dense)


def test_what_is_not_read_is_named(tmp_path):
    path, _ = checkpoint(tmp_path, llama(), "gptq")
    edit_config(path, lambda config: config["quantization_config"].update(quant_method="quip"))
    with pytest.raises(FormatError, match="is quantized by 'quip', which is not read"):
        nf4.torch.load(path)
    with pytest.raises(FormatError, match="is quantized by 'quip', which is not read"):
        empty_model(path)


def test_layers_that_the_model_class_ignores_without_experts(tmp_path):
    """empty_model and load_checkpoint, which stack no experts of integers."""
    model = deepseek(first_k_dense_replace=2)
    path, dense = checkpoint(tmp_path, model, "awq")
    tensors, config = nf4.load(path), json.loads((path / "config.json").read_text())
    more = {n.replace("layers.1.", "layers.61."): each for n, each in tensors.items()}
    nf4.save(path, tensors | more, config=config, replace=True)
    empty = empty_model(path)
    load_checkpoint(empty, path)
    require_same(empty, dense)
