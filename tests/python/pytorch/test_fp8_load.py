"""nf4.torch.load of mixed checkpoints: layers in FP8 are dense, beside layers in 4 bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import e2m1_models as models  # noqa: E402
import nf4.torch  # noqa: E402
from e2m1_checkpoints import CASES  # noqa: E402
from fp8_cases import FORMS, Fp8  # noqa: E402
from nf4.checkpoint import FormatError, dequantize_checkpoint  # noqa: E402
from nf4.cli import main  # noqa: E402
from nf4.torch import NF4Experts, NF4Linear  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

pytestmark = pytest.mark.usefixtures("in_process")
NVFP4 = next(case for case in CASES if case.name == "modelopt" and case.blocksize == 16)
NAME = "model.layers.1.mlp.down_proj"
TOKENS = torch.arange(14).view(2, 7)


def _replace(folder: Path, form: Fp8, modules: list[str]) -> dict[str, np.ndarray]:
    """Puts layers in FP8 in the place of those in 4 bits. Returns their values."""
    stored = load_file(folder / "model.safetensors")
    values, layers = {}, {"others": {"quant_algo": "NVFP4"}}
    for seed, module in enumerate(modules):
        rows, half = stored[f"{module}.weight"].shape
        for key in [key for key in stored if key.startswith(f"{module}.")]:
            del stored[key]
        tensors = form.tensors(module, (rows, 2 * half), seed)
        values[f"{module}.weight"] = form.dense(tensors, module)
        stored |= {name: models.tensor(each) for name, each in tensors.items()}
        layers[module] = {"quant_algo": "FP8"}
    models.save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return values


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_model_has_their_values(form, tmp_path):
    folder = models.write(models.llama(), NVFP4, tmp_path / "q")
    values = _replace(folder, form, [NAME])
    model = nf4.torch.load(folder, dtype="fp32")
    layer = model.get_submodule(NAME)
    assert type(layer) is torch.nn.Linear
    assert torch.equal(layer.weight, torch.from_numpy(values[f"{NAME}.weight"]))
    assert sum(isinstance(each, NF4Linear) for each in model.modules()) == 13
    dense = nf4.torch.load(folder, dtype="fp32")
    nf4.torch.to_dense(dense)
    for found, wanted in zip(
        models.gradients(model, TOKENS), models.gradients(dense, TOKENS), strict=True
    ):
        assert models.distance(found, wanted) < 2e-6
    in_bf16 = nf4.torch.load(folder, dtype="bf16").get_submodule(NAME).weight
    assert torch.equal(in_bf16, layer.weight.bfloat16())


def test_a_model_is_saved_once_it_is_dense(tmp_path):
    folder = models.write(models.llama(), NVFP4, tmp_path / "q")
    _replace(folder, FORMS[0], [NAME])
    model = nf4.torch.load(folder)
    with pytest.raises(nf4.InvalidArgument, match=f"{NAME} was in FP8.*to_dense"):
        model.save_pretrained(tmp_path / "again")
    nf4.torch.to_dense(model)
    model.save_pretrained(tmp_path / "dense")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


def test_experts_of_a_stack_that_is_dense(tmp_path):
    """transformers stacks the matrices of the experts."""
    folder = models.write(models.qwen3_moe(), NVFP4, tmp_path / "q")
    experts = [f"model.layers.1.mlp.experts.{index}." for index in range(4)]
    names = [f"{each}{part}_proj" for each in experts for part in ("gate", "up", "down")]
    values = _replace(folder, FORMS[0], names)
    model = nf4.torch.load(folder, dtype="fp32")
    stacks = [name for name, each in model.named_modules() if isinstance(each, NF4Experts)]
    assert len(stacks) == 2 and all("layers.0" in each for each in stacks)
    made = model.model.layers[1].mlp.experts
    for index, each in enumerate(experts):
        gate, up, down = (values[f"{each}{part}_proj.weight"] for part in ("gate", "up", "down"))
        assert np.array_equal(made.gate_up_proj[index].detach(), np.concatenate([gate, up]))
        assert np.array_equal(made.down_proj[index].detach(), down)


def test_a_layer_that_the_model_does_not_have_is_named(tmp_path):
    folder = models.write(models.llama(), NVFP4, tmp_path / "q")
    _replace(folder, FORMS[0], [NAME])
    stored = load_file(folder / "model.safetensors")
    other = "model.layers.7.mlp.down_proj"
    for part in ("weight", "weight_scale"):
        stored[f"{other}.{part}"] = stored[f"{NAME}.{part}"].clone()
    models.save_file(stored, folder / "model.safetensors")
    with pytest.raises(FormatError, match=rf"{other}.weight.*no place"):
        nf4.torch.load(folder)


@pytest.mark.parametrize("modules", [("lm_head",), ("lm_head", "model.embed_tokens")])
def test_tied_weights_in_fp8_are_refused(modules, tmp_path):
    """One would overwrite the other. Once they are dense, they are not tied."""
    folder = models.write(models.llama(), NVFP4, tmp_path / "q")
    _replace(folder, FORMS[0], [NAME])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    stored = load_file(folder / "model.safetensors")
    for seed, module in enumerate(modules):
        tensors = FORMS[0].tensors(module, (100, 64), seed)
        stored |= {name: models.tensor(each) for name, each in tensors.items()}
    models.save_file(stored, folder / "model.safetensors")
    tied = "lm_head.weight.*ties it to model.embed_tokens.weight"
    with pytest.raises(FormatError, match=tied if modules == ("lm_head",) else "ties it to"):
        nf4.torch.load(folder)
    dequantize_checkpoint(str(folder), str(tmp_path / "d"))
    made = json.loads((tmp_path / "d" / "config.json").read_text())
    assert made["tie_word_embeddings"] is False


def test_a_model_that_was_made_dense_is_quantized_and_saved(tmp_path):
    folder = models.write(models.llama(), NVFP4, tmp_path / "q")
    _replace(folder, FORMS[0], [NAME])
    stored = load_file(folder / "model.safetensors")
    del stored["lm_head.weight"]
    tensors = FORMS[0].tensors("lm_head", (100, 64))  # which stays dense
    stored |= {name: models.tensor(each) for name, each in tensors.items()}
    models.save_file(stored, folder / "model.safetensors")
    model = nf4.torch.load(folder)
    nf4.torch.to_dense(model)
    nf4.torch.quantize_model(model, format="nvfp4")
    model.save_pretrained(tmp_path / "again")
    again = nf4.torch.load(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_another_shape_is_named(tmp_path):
    folder = models.write(models.llama(), NVFP4, tmp_path / "q")
    _replace(folder, FORMS[0], [NAME])
    stored = load_file(folder / "model.safetensors")
    stored[f"{NAME}.weight"] = stored[f"{NAME}.weight"].T.contiguous()
    models.save_file(stored, folder / "model.safetensors")
    with pytest.raises(FormatError, match=rf"{NAME}.weight.*shape is \[128, 64\], but \[64, 128\]"):
        nf4.torch.load(folder)


def test_deepseek_v4(tmp_path):
    """Experts in MXFP4, and all else dense: it computes as the dequantized checkpoint."""
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("transformers has no DeepSeek-V4")
    import deepseek_models

    folder = deepseek_models.write(tmp_path / "q")
    assert main(["verify", str(folder)]) == 0
    model = nf4.torch.load(folder, dtype="fp32")
    stacks = [each for each in model.modules() if isinstance(each, NF4Experts)]
    assert len(stacks) == 8 and {each.format for each in stacks} == {"mxfp4"}
    dequantize_checkpoint(str(folder), str(tmp_path / "d"), dtype="fp32")
    assert "expert_dtype" not in json.loads((tmp_path / "d" / "config.json").read_text())
    dense = transformers.DeepseekV4ForCausalLM.from_pretrained(tmp_path / "d", dtype=torch.float32)
    tokens = torch.randint(128, (2, 12), generator=torch.Generator().manual_seed(0))
    results = []
    for each in (model, dense):  # its first routers look experts up by the tokens
        embedded = each.get_input_embeddings().weight.requires_grad_()
        logits = each(tokens).logits
        results.append((logits, *torch.autograd.grad(logits.square().sum(), embedded)))
    for found, wanted in zip(*results, strict=True):
        assert models.distance(found, wanted) < 1e-5
    for name in ("self_attn.q_a_proj", "self_attn.o_a_proj", "mlp.shared_experts.down_proj"):
        ours, theirs = (each.model.layers[1].get_submodule(name) for each in (model, dense))
        assert torch.equal(ours.weight, theirs.weight)
