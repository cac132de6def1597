"""gpt-oss in MXFP4: loads without a dense expert, generates and trains as the dense model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("in_process")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import e2m1_models as models  # noqa: E402
import gpt_oss_models  # noqa: E402
import nf4  # noqa: E402
import nf4.torch  # noqa: E402
from nf4.checkpoint import OptionError, QuantizeOptions, quantize_checkpoint  # noqa: E402
from nf4.cli import main  # noqa: E402
from nf4.torch import NF4Experts, _fast, _kernels  # noqa: E402
from safetensors.torch import load_file  # noqa: E402


def _tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(128, (2, 12), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def never_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every way to a dense weight fail."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a weight is dequantized")

    for owner in (nf4, _fast, _kernels):
        monkeypatch.setattr(owner, "dequantize", refuse)


@pytest.mark.usefixtures("never_dense")
def test_it_generates_as_the_dense_model(tmp_path):
    dense = gpt_oss_models.dense_model(gpt_oss_models.write(tmp_path / "q"))
    model = nf4.torch.load(tmp_path / "q")
    stacks = {name: each for name, each in model.named_modules() if isinstance(each, NF4Experts)}
    assert len(stacks) == 4 and {each.format for each in stacks.values()} == {"mxfp4"}
    assert not any(name.endswith(gpt_oss_models.STACKS) for name, _ in model.named_parameters())
    with torch.no_grad():
        expected = dense(_tokens()).logits
        assert models.distance(model(_tokens()).logits, expected) < 2e-6
    options = {"max_new_tokens": 16, "do_sample": False}
    assert torch.equal(model.generate(_tokens(), **options), dense.generate(_tokens(), **options))


def test_in_bf16_its_error_is_that_of_the_dense_model(tmp_path):
    state = gpt_oss_models.write(tmp_path / "q", torch.bfloat16)
    dense, model = gpt_oss_models.dense_model(state), nf4.torch.load(tmp_path / "q")
    exact = gpt_oss_models.dense_model({name: each.float() for name, each in state.items()})
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        errors = [models.distance(each(_tokens()).logits, exact(_tokens()).logits)
                  for each in (model, dense)]  # fmt: skip
    assert errors[0] < 1.25 * errors[1]


def _adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["q_proj", "v_proj", "o_proj"],
        target_parameters=[f"experts.{name}" for name in gpt_oss_models.STACKS],
        r=4,
        lora_alpha=8,
    )
    torch.manual_seed(1)
    return peft.get_peft_model(model, config).train()


def _losses(model: Any, steps: int = 4) -> list[float]:
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=0.02), []
    for step in range(steps):
        loss = model(input_ids=_tokens(step), labels=_tokens(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_adapters_on_attention_and_experts_train_as_over_the_dense_model(tmp_path):
    """PEFT nests the adapters of experts in the order of the parameters, so their names agree."""
    dense = _adapted(gpt_oss_models.dense_model(gpt_oss_models.write(tmp_path / "q")))
    model = _adapted(nf4.torch.load(tmp_path / "q"))
    begin = {name: each for name, each in model.named_parameters() if each.requires_grad}
    own = {name: each for name, each in dense.named_parameters() if each.requires_grad}
    assert {n: p.shape for n, p in begin.items()} == {n: p.shape for n, p in own.items()}
    assert any("experts" in name for name in begin)
    with torch.no_grad():
        for name, each in own.items():
            each.copy_(begin[name])
    assert _losses(model) == pytest.approx(_losses(dense), rel=1e-5)
    for name, each in own.items():
        assert models.distance(begin[name], each) < 1e-3, name
    merged, wanted = model.merge_and_unload(), dense.merge_and_unload()
    for name, stack in merged.named_modules():
        if isinstance(stack, NF4Experts):
            assert stack.format == "mxfp4"
            expected = wanted.get_parameter(name).transpose(1, 2)
            assert models.distance(stack.dequantize(), expected) < 0.15, name
    merged.save_pretrained(tmp_path / "merged")
    again = nf4.torch.load(tmp_path / "merged")
    with torch.no_grad():
        assert torch.equal(again(_tokens()).logits, merged.eval()(_tokens()).logits)


def test_checkpointed_and_compiled(tmp_path):
    """As Trainer and PEFT prepare a model: activations are computed again, with the same
    gradients; a compiled model has the same logits."""
    peft = pytest.importorskip("peft")
    gpt_oss_models.write(tmp_path / "q")
    gradients = []
    for checkpointed in (False, True):
        model = nf4.torch.load(tmp_path / "q")
        peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointed)
        model = _adapted(model)
        model(input_ids=_tokens(), labels=_tokens()).loss.backward()
        gradients.append([each.grad for each in model.parameters() if each.requires_grad])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    model = nf4.torch.load(tmp_path / "q")
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(_tokens()).logits, model(_tokens()).logits)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_it_is_saved_as_it_was(tmp_path):
    gpt_oss_models.write(tmp_path / "q", torch.bfloat16)
    nf4.torch.load(tmp_path / "q").save_pretrained(tmp_path / "again")
    stored, again = (load_file(tmp_path / each / "model.safetensors") for each in ("q", "again"))
    assert stored.keys() == again.keys()
    for name, tensor in stored.items():
        assert (tensor.dtype, tensor.shape) == (again[name].dtype, again[name].shape), name
        assert _bytes(tensor) == _bytes(again[name]), name


def test_state_dict_round_trip(tmp_path):
    gpt_oss_models.write(tmp_path / "q")
    model = nf4.torch.load(tmp_path / "q")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = nf4.torch.load(tmp_path / "q")
    for stack in (each for each in other.modules() if isinstance(each, NF4Experts)):
        stack.weight.data.zero_()
        stack.absmax.zero_()
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    with torch.no_grad():
        assert torch.equal(other(_tokens()).logits, model(_tokens()).logits)


@pytest.mark.parametrize("part", ["_scales", "_blocks"])
def test_a_missing_part_is_named(part, tmp_path):
    gpt_oss_models.write(tmp_path / "q")
    file: Path = tmp_path / "q" / "model.safetensors"
    stored = load_file(file)
    del stored[f"model.layers.1.mlp.experts.down_proj{part}"]
    models.save_file(stored, file)
    with pytest.raises(nf4.checkpoint.FormatError, match=r"layers\.1\.mlp\.experts\.down_proj"):
        nf4.torch.load(tmp_path / "q")


def test_converted_to_nf4(tmp_path):
    """The attention stays dense, as it is in the source."""
    gpt_oss_models.write(tmp_path / "q")
    assert main(["convert", str(tmp_path / "q"), str(tmp_path / "nf4"), "--to", "nf4"]) == 0
    assert main(["verify", str(tmp_path / "nf4")]) == 0
    model, before = (nf4.torch.load(tmp_path / each) for each in ("nf4", "q"))
    stack = model.model.layers[0].mlp.experts.gate_up_proj
    assert (stack.format, stack.spec.shape) == ("nf4", (4, 192, 64))
    error = models.distance(
        stack.dequantize("fp32"), before.model.layers[0].mlp.experts.gate_up_proj.dequantize("fp32")
    )
    assert 0.01 < error < 0.2
    with torch.no_grad():
        assert model(_tokens()).logits.isfinite().all()


def test_to_dense_makes_transformers_own_model(tmp_path):
    state = gpt_oss_models.write(tmp_path / "q", torch.bfloat16)
    model = nf4.torch.load(tmp_path / "q")
    nf4.torch.to_dense(model)
    found = model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def _dense_folder(folder: Path) -> Path:
    """The dequantized checkpoint, as a dense model that was trained further is saved."""
    gpt_oss_models.write(folder.with_name("source"), torch.bfloat16)
    model = nf4.torch.load(folder.with_name("source"))
    nf4.torch.to_dense(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(gpt_oss_models.STACKS):
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


def test_a_dense_model_becomes_a_checkpoint_of_gpt_oss(tmp_path):
    folder = _dense_folder(tmp_path / "dense")
    words = ["quantize", str(folder), str(tmp_path / "q"), "--format", "mxfp4"]
    assert main([*words, "--layout", "gpt-oss"]) == 0
    assert main(["verify", str(tmp_path / "q")]) == 0
    stored, source = (load_file(tmp_path / n / "model.safetensors") for n in ("q", "source"))
    assert {n: (t.dtype, t.shape) for n, t in stored.items()} == {
        n: (t.dtype, t.shape) for n, t in source.items()
    }
    dense = transformers.GptOssForCausalLM.from_pretrained(folder)
    model = nf4.torch.load(tmp_path / "q")
    name = "model.layers.1.mlp.experts.down_proj"
    wanted = dense.get_parameter(name).transpose(1, 2)
    expected = nf4.quantize(wanted.contiguous().detach(), format="mxfp4", scale_rule="even")
    assert torch.equal(stored[f"{name}_blocks"].view(-1), expected.packed)
    assert torch.equal(stored[f"{name}_scales"].view(-1), expected.absmax)
    names = nf4.torch.quantize_model(dense, format="mxfp4", layout="gpt-oss")
    assert len(names) == 4 and all(each.endswith(gpt_oss_models.STACKS) for each in names)
    with torch.no_grad():
        assert torch.equal(dense(_tokens()).logits, model(_tokens()).logits)
    dense.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(_bytes(saved[name]) == _bytes(stored[name]) for name in stored)
    configs = [(tmp_path / each / "config.json").read_text() for each in ("saved", "q")]
    one, other = (json.loads(each)["quantization_config"] for each in configs)
    assert one == other and one["quant_method"] == "mxfp4"


def test_what_the_layout_of_gpt_oss_refuses(tmp_path):
    folder, to = _dense_folder(tmp_path / "dense"), tmp_path / "q"
    for options, said in (
        ({"format": "nvfp4"}, "layout is 'gpt-oss'; expected compressed-tensors or modelopt"),
        ({"format": "nf4"}, "layout is 'gpt-oss', but format \"nf4\" has none"),
        ({"format": "mxfp4", "experts": True}, "experts is True; expected False"),
        ({"format": "mxfp4", "skip": ("layers.0.mlp.experts",)}, "leave .*layers.0.*expected all"),
    ):
        with pytest.raises(OptionError, match=said):
            quantize_checkpoint(str(folder), str(to), QuantizeOptions(layout="gpt-oss", **options))
    for model, said in (
        (models.qwen3_moe(), "the model is Qwen3MoeForCausalLM; expected GptOssForCausalLM"),
        (models.llama(), "the model has no experts"),
    ):
        with pytest.raises(nf4.InvalidArgument, match=said):
            nf4.torch.quantize_model(model, format="mxfp4", layout="gpt-oss")
