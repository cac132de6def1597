"""A model on meta, sharded and loaded by three processes, each its part; what they check is in
checkpoint_checks.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch_cases

pytestmark = pytest.mark.interop
torch_cases.require("torch", "transformers")

import checkpoint_checks  # noqa: E402
import nf4.torch  # noqa: E402
import ranks  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

NAMES = [name for name in vars(checkpoint_checks) if name.startswith("check_")]
QUANTIZED = {
    "quantized": {},
    "flat": {"nested": False, "format": "fp4"},
    "gptq": {"format": "int4", "layout": "gptq", "group_size": 32, "symmetric": False},
    "compressed": {"format": "int4", "layout": "compressed-tensors", "group_size": 32},
}


def llama(tied: bool = False, hidden: int = 128) -> transformers.PreTrainedModel:
    torch.manual_seed(hidden)
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def write_models(data: Path) -> None:
    """dense in two files, tied, of another width, without one file, and in 4 bits."""
    llama().save_pretrained(data / "dense", max_shard_size="700KB")
    llama(tied=True).save_pretrained(data / "tied")
    llama(hidden=192).save_pretrained(data / "wide")
    shutil.copytree(data / "dense", data / "broken")
    (data / "broken" / "model-00002-of-00002.safetensors").unlink()
    for name, options in QUANTIZED.items():
        model = llama()
        nf4.torch.quantize_model(model, **options)
        model.save_pretrained(data / name)
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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str | None]]]:
    data = tmp_path_factory.mktemp("checkpoints")
    write_models(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHECKPOINTS", str(data))
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed is no longer resident
        yield ranks.run("checkpoint_checks", NAMES, 3, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint(name: str, found: dict[str, list[str | None]]) -> None:
    failed = {rank: error for rank, error in enumerate(found[name]) if error is not None}
    assert not failed, "\n".join(f"rank {rank}: {error}" for rank, error in failed.items())
