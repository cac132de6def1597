"""Checkpoints of GPTQ, AWQ and compressed-tensors with experts, each of whose matrices is a weight:
nf4.torch.load stacks them, so that one product serves all experts."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "transformers")

import nf4  # noqa: E402
import nf4.torch  # noqa: E402
import torch  # noqa: E402
from experts_cases import MODELS, TOKENS, gpt_oss, qwen3  # noqa: E402
from nf4.checkpoint import FormatError  # noqa: E402
from nf4.torch import Int4Experts, Int4Linear, _int4_stacks  # noqa: E402
from nf4.torch.distributed import empty_model, prepare  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

LAYER = "model.layers.0.mlp.experts"
LAYOUTS = ("gptq", "gptq_v2", "awq", "compressed-tensors")


def integers(folder, model, layout, change=None, symmetric=True):
    """A checkpoint of a model, and the same model with the dequantized weights."""
    model.save_pretrained(folder / "dense")
    tensors = load_file(folder / "dense" / "model.safetensors")
    made, dense = {}, {}
    for name, tensor in tensors.items():
        made[name] = dense[name] = tensor
        if (
            name.endswith(".weight")
            and tensor.dim() == 2
            and not any(part in name for part in ("gate.w", "embed", "lm_head"))
        ):
            made[name] = nf4.torch.quantize_int4(
                tensor, layout=layout, group_size=32, symmetric=symmetric
            )
            dense[name] = nf4.torch.dequantize(made[name], torch.float32)
    config = json.loads((folder / "dense" / "config.json").read_text())
    nf4.save(folder / "made", made if change is None else change(made), config=config)
    nf4.save(folder / "dense", dense, config=config, replace=True)
    return type(model).from_pretrained(folder / "dense", dtype=torch.float32)


def results(model):
    """Logits, and the gradient of what goes into the first layer."""
    x = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    logits = model(inputs_embeds=x).logits
    (grad,) = torch.autograd.grad(logits.square().sum(), x)
    return logits.detach(), grad


def require_near(found, expected):
    for each, exact in zip(found, expected, strict=True):
        assert (each - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize(
    ("name", "layout"), [*(("qwen3", each) for each in LAYOUTS), ("mixtral", "gptq")]
)
def test_experts_are_stacked(name, layout, tmp_path):
    expected = results(integers(tmp_path, MODELS[name](), layout))
    model = nf4.torch.load(tmp_path / "made")
    kinds = [type(each) for each in model.modules()]
    assert (kinds.count(Int4Experts), kinds.count(Int4Linear)) == (4, 8)
    assert model.config._experts_implementation == "nf4"
    require_near(results(model), expected)
    assert model.generate(TOKENS, max_new_tokens=2).shape == (2, 13)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "again")
    prepare(model)
    require_near(results(model), expected)


def test_zero_points_and_back_to_dense(tmp_path):
    expected = results(integers(tmp_path, qwen3(), "compressed-tensors", symmetric=False))
    model = nf4.torch.load(tmp_path / "made")
    assert model.get_submodule(f"{LAYER}.down_proj").zeros is not None
    layer = model.get_submodule(LAYER)
    state = {name: each.clone() for name, each in layer.state_dict().items()}
    assert state.keys() == layer.half().state_dict().keys() and len(state) == 6
    assert all(torch.equal(each, state[name]) for name, each in layer.state_dict().items())
    assert len(nf4.torch.to_dense(model, torch.float32)) == 12
    require_near(results(model), expected)
    model.save_pretrained(tmp_path / "back")
    names = load_file(tmp_path / "back" / "model.safetensors").keys()
    assert f"{LAYER}.5.up_proj.weight" in names


ONE, FIRST = f"{LAYER}.3.up_proj.weight", f"{LAYER}.0.gate_proj.weight"


def dense_one(made):
    return {**made, ONE: torch.zeros(64, 64)}


def other_groups(made):
    return {
        **made,
        ONE: nf4.torch.quantize_int4(
            torch.zeros(64, 64), layout="compressed-tensors", group_size=64
        ),
    }


def other_scales(made):
    return {
        **made,
        ONE: nf4.torch.quantize_int4(
            torch.zeros(64, 64), layout="compressed-tensors", group_size=32, scales_dtype="bf16"
        ),
    }


def act_order(made):
    g_idx = torch.arange(64, dtype=torch.int32) % 2
    return {**made, ONE: dataclasses.replace(made[ONE], g_idx=g_idx)}


def outputs(made):
    """gate and up have as many as the model together."""
    rows = {"gate_proj": 60, "up_proj": 68}
    return {
        name: nf4.torch.quantize_int4(
            torch.zeros(rows[name.split(".")[-2]], 64), layout="compressed-tensors", group_size=32
        ) if LAYER in name and "down" not in name else each
        for name, each in made.items()
    }  # fmt: skip


def one_stack(made):
    return {n: torch.zeros(64, 64) if "down_proj" in n and LAYER in n else t
            for n, t in made.items()}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dense_one, f"as integers, {ONE} is missing"),
        (other_groups, f"'{ONE}': its group_size is not that of {FIRST}"),
        (other_scales, f"'{ONE}': its dtype of scales is not that of {FIRST}"),
        (act_order, f"'{ONE}': it has act order, which is not supported for experts"),
        (outputs, f"'{FIRST}': it has 60 outputs; expected a multiple of 8, to join it"),
        (one_stack, f"{LAYER}.down_proj, which is computed with it, is not of integers"),
    ],
)
def test_what_is_wrong_is_named(change, message, tmp_path, monkeypatch):
    """Before weights are loaded."""
    integers(tmp_path, qwen3(), "compressed-tensors", change)
    monkeypatch.setattr(_int4_stacks, "read", None)
    with pytest.raises(FormatError) as caught:
        nf4.torch.load(tmp_path / "made")
    assert message in str(caught.value)


def test_peft_has_no_adapters_for_these(tmp_path):
    peft = pytest.importorskip("peft")
    integers(tmp_path, qwen3(), "awq")
    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    with pytest.raises(nf4.InvalidArgument, match="experts.down_proj, experts of integers"):
        peft.get_peft_model(nf4.torch.load(tmp_path / "made"), config)


def test_what_stacks_are_not_made_of(tmp_path):
    """empty_model has a layer for each weight, and gpt-oss's stacks are transposed."""
    integers(tmp_path, qwen3(), "gptq")
    with pytest.raises(FormatError, match="only nf4.torch.load loads experts of integers"):
        empty_model(tmp_path / "made")
    model = gpt_oss()
    made = {f"{LAYER}.{n}.down_proj.weight": torch.zeros(64, 96) for n in range(4)}
    integers(tmp_path / "other", model, "gptq", lambda tensors: tensors | {
        name: nf4.torch.quantize_int4(each, layout="gptq", group_size=32)
        for name, each in made.items()
    })  # fmt: skip
    with pytest.raises(FormatError, match=f"{LAYER}.0.down_proj.weight': the model has no"):
        nf4.torch.load(tmp_path / "other" / "made")
