"""transformers' own from_pretrained of checkpoints with experts in 4 bits."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest
import torch_cases
import warm

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "in_process")]
torch_cases.require("torch", "transformers")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from experts_cases import MODELS, TOKENS, logits, qwen3  # noqa: E402
from nf4.checkpoint import FormatError  # noqa: E402
from nf4.torch import NF4Experts, NF4Linear, quantize_model  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM  # noqa: E402
from transformers.quantizers import auto  # noqa: E402


def saved(folder, model, **options):
    """Of a model that is quantized for that; its logits."""
    quantize_model(model, experts=True, **options)
    model.save_pretrained(folder, max_shard_size="30KB")
    return logits(model)


def change(folder, made):
    """made: from the tensors to others. All in one file."""
    tensors = {}
    for file in folder.glob("*.safetensors*"):
        tensors |= load_file(file) if file.suffix == ".safetensors" else {}
        file.unlink()
    save_file(made(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def count(model, kind):
    return sum(isinstance(each, kind) for each in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_loaded_and_saved_again(name, tmp_path):
    expected = saved(tmp_path / "made", MODELS[name]())
    assert len(list((tmp_path / "made").glob("*.safetensors"))) > 1
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "made", output_loading_info=True, device_map="cpu"
    )
    assert not any(info.values()) and not model.training
    assert (count(model, NF4Experts), count(model, NF4Linear)) == (4, 8)
    assert torch.equal(logits(model), expected)
    own, other = model.state_dict(), nf4.torch.load(tmp_path / "made").state_dict()
    assert own.keys() == other.keys() and all(torch.equal(own[k], other[k]) for k in own)
    model.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == config
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), expected)
    assert len(nf4.torch.to_dense(again)) == 12
    assert not again.is_quantized and again.config._experts_implementation != "nf4"
    again.save_pretrained(tmp_path / "dense")
    names = {
        name for file in (tmp_path / "dense").glob("*.safetensors") for name in load_file(file)
    }
    MODELS[name]().save_pretrained(tmp_path / "before")
    assert names == load_file(tmp_path / "before" / "model.safetensors").keys()
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert count(dense, NF4Experts) == 0
    torch.testing.assert_close(logits(dense), expected, rtol=1e-4, atol=1e-5)


def test_other_ways_to_keep_a_checkpoint(tmp_path):
    """In 16 bits, flat, some layers dense, packed bytes as another dtype, a stack in the place of
    its parameter, and a model without its head."""
    options = {"format": "fp4", "nested": False, "skip": ["layers.1.mlp.experts"]}
    saved(tmp_path, qwen3().bfloat16(), **options)
    change(tmp_path, lambda state: {
        key.replace("experts.down_proj.weight", "experts.down_proj"):
        each.view(-1).view(torch.bfloat16).view(-1, 1) if key.endswith("_proj.weight") else each
        for key, each in state.items()
    })  # fmt: skip
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert model.dtype == torch.bfloat16 and count(model, NF4Experts) == 2
    expected = logits(nf4.torch.load(tmp_path))
    assert torch.equal(logits(model), expected)
    model = AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        hidden = model(TOKENS).last_hidden_state
    head = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    assert torch.equal(hidden @ head.T, expected)


def test_what_is_wrong_is_named(tmp_path):
    saved(tmp_path, qwen3())
    place = "model.layers.0.mlp.experts.down_proj"
    change(tmp_path, lambda state: {k: t for k, t in state.items() if not k.startswith(place)})
    with pytest.raises(FormatError, match=f"{place} is not in 4 bits, as the other experts"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    other = NF4Experts.from_dense(torch.randn(5, 64, 64)).state_dict()
    change(tmp_path, lambda state: state | {f"{place}.{k}": each for k, each in other.items()})
    with pytest.raises(FormatError, match=f"{place}.*its shape is .5, 64, 64., but .6, 64, 64."):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    change(tmp_path, lambda state: {k: t for k, t in state.items() if not k.startswith(place)}
           | {f"model.norm.{k}": each for k, each in other.items()})  # fmt: skip
    with pytest.raises(FormatError, match="norm.weight': the model has no experts model.norm"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_offloaded_layers_are_refused(tmp_path):
    pytest.importorskip("accelerate")
    saved(tmp_path / "made", qwen3())
    names = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    places = dict.fromkeys(names, "cpu") | {"model.layers.1": "disk"}
    with pytest.raises(nf4.InvalidArgument, match=r"layers\.1.*: device_map offloads it"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "made", device_map=places, offload_folder=tmp_path / "offload"
        )


def test_variants_in_one_folder(tmp_path):
    """Saving one removes the shards of another."""
    expected = {}
    for variant in ("other", None):
        model = qwen3()
        quantize_model(model, experts=True)
        model.save_pretrained(tmp_path / "one", max_shard_size="30KB", variant=variant)
        expected[variant] = logits(model)
        shutil.copytree(tmp_path / "one", tmp_path / "all", dirs_exist_ok=True)
        # "other" is alone at first.
        for each, found in expected.items():
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "all", variant=each)
            assert torch.equal(logits(loaded), found)
    assert not torch.equal(expected["other"], expected[None])


def test_without_libnf4_transformers_refuses(tmp_path, monkeypatch):
    """As it would take experts for missing, and the layers in 4 bits for such of other shapes."""
    saved(tmp_path, qwen3())
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "nf4")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_in_a_fresh_process(tmp_path):
    """Where transformers is imported first. Generating with the settings of the folder, by either
    function that loads one."""
    model = qwen3()
    expected = saved(tmp_path, model)
    transformers.GenerationConfig(max_new_tokens=3, eos_token_id=7).save_pretrained(tmp_path)
    tokens = model.generate(TOKENS, max_new_tokens=3, do_sample=False)
    torch.save((expected, tokens), tmp_path / "expected.pt")
    code = """
from transformers import AutoModelForCausalLM
import nf4.torch, torch
expected, tokens = torch.load("expected.pt")
for load in (AutoModelForCausalLM.from_pretrained, nf4.torch.load):
    model = load(".")
    given = torch.arange(22).view(2, 11)
    assert torch.equal(model(given).logits, expected)
    assert torch.equal(model.generate(given), tokens), load
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    made = warm.run(code, cwd=tmp_path, env=environment)
    assert made.returncode == 0, made.stderr
