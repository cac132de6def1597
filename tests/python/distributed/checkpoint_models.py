"""The checkpoints that checkpoint_checks.py loads."""

import json
import shutil
from pathlib import Path

import e2m1_models
import gpt_oss_models
import nf4.torch
import torch
import transformers
from e2m1_checkpoints import CASES
from safetensors.torch import save_file

QUANTIZED = {
    "quantized": {},
    "flat": {"nested": False, "format": "fp4"},
    "gptq": {"format": "int4", "layout": "gptq", "group_size": 32, "symmetric": False},
    "compressed": {"format": "int4", "layout": "compressed-tensors", "group_size": 32},
}
E2M1 = {case.format: case for case in CASES if case.name == "compressed-tensors"}


def llama(tied: bool = False, hidden: int = 128) -> transformers.PreTrainedModel:
    torch.manual_seed(hidden)
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def mixture() -> transformers.PreTrainedModel:
    """5 experts, which 3 ranks do not share evenly."""
    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=100, moe_intermediate_size=64, num_experts=5,
        num_experts_per_tok=2, head_dim=32,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).eval()


def write_models(data: Path) -> None:
    """dense in two files, tied, of another width, without one file, in 4 bits, and experts, also
    as matrices of compressed-tensors and as gpt-oss has them."""
    mixture().save_pretrained(data / "mixture")
    experts = mixture()
    nf4.torch.quantize_model(experts, experts=True)
    experts.save_pretrained(data / "experts")
    llama().save_pretrained(data / "dense", max_shard_size="1200KB")
    llama(tied=True).save_pretrained(data / "tied")
    llama(hidden=192).save_pretrained(data / "wide")
    shutil.copytree(data / "dense", data / "broken")
    (data / "broken" / "model-00002-of-00002.safetensors").unlink()
    for name, options in QUANTIZED.items():
        model = llama()
        nf4.torch.quantize_model(model, **options)
        model.save_pretrained(data / name)
    for name in ("mxfp4", "nvfp4"):
        e2m1_models.write(llama(), E2M1[name], data / name)
    e2m1_models.write(mixture(), E2M1["nvfp4"], data / "matrices")
    gpt_oss_models.write(data / "gpt-oss")
    write_large(data / "large")


def write_large(folder: Path, layers: int = 12) -> None:
    """100 MB of random codes and scales."""
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers,
        num_attention_heads=8, vocab_size=100, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tensors = {"model.embed_tokens.weight": torch.randn(100, 1024)}
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            layer = nf4.torch.NF4Linear(module.in_features, module.out_features, bias=False)
            layer.weight.data.random_()
            layer.nested_code.copy_(torch.linspace(-1, 1, 256))
            tensors |= {f"{name}.{key}": each for key, each in layer.state_dict().items()}
        elif "norm" in name:
            tensors[f"{name}.weight"] = torch.ones(1024)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(fields))
