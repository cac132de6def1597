"""Dense checkpoints whose experts are not those of the model: by `nf4 quantize` they stay dense,
and load_checkpoint refuses them before anything gets memory; a stack that is one tensor when it is
read. Both name the tensor."""

from __future__ import annotations

import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "in_process")]
torch_cases.require("torch", "transformers")

import torch  # noqa: E402
from experts_cases import gpt_oss, qwen3  # noqa: E402
from nf4.checkpoint import FormatError  # noqa: E402
from nf4.checkpoint.audit import audit  # noqa: E402
from nf4.checkpoint.convert import quantize_checkpoint  # noqa: E402
from nf4.checkpoint.quantize_plan import QuantizeOptions  # noqa: E402
from nf4.torch.distributed import empty_model, load_checkpoint  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

LAYER = "model.layers.0.mlp.experts"
ONE, STACK = f"{LAYER}.3.up_proj.weight", f"{LAYER}.gate_up_proj"
# What is changed, and what is said of it, where load_checkpoint says something else also that.
# Qwen3 has a matrix an expert, 6 of [64, 64].
FAULTS = {
    "missing": ({ONE: None}, f"{ONE} is missing"),
    "of all experts": (
        {f"{LAYER}.{expert}.up_proj.weight": None for expert in range(6)},
        "experts.*.up_proj.weight is missing, of all experts",
    ),
    "rows": ({ONE: torch.zeros(32, 64)}, f"{ONE} is of shape [32, 64]; expected [64, 64]"),
    "columns": ({ONE: torch.zeros(64, 32)}, f"{ONE} is of shape [64, 32]; expected [64, 64]"),
    "all rows": (
        {f"{LAYER}.{expert}.up_proj.weight": torch.zeros(32, 64) for expert in range(6)},
        f"the matrices from {LAYER}.0.gate_proj.weight on have 96 outputs, but the model has 128",
    ),
    "more experts": (
        {ONE.replace("3", "6"): torch.zeros(64, 64)},
        f"{ONE.replace('3', '6')} is there, but the model has 6 experts",
    ),
    "scalars": (
        {f"{LAYER}.{expert}.up_proj.weight": torch.tensor(1.0) for expert in range(5)},
        f"{LAYER}.0.up_proj.weight is of shape []; expected [rows, 64]",
    ),
    "beside a stack": (
        {STACK: torch.zeros(6, 128, 64)},
        f"{STACK} is there, beside the matrices of experts",
    ),
    "an expert twice": (
        {ONE.replace("3", "03"): torch.zeros(64, 64)},
        f"{ONE.replace('3', '03')} is there, and {ONE} too",
    ),
    "whole": (
        {STACK: None},
        f"{STACK} is missing",
        f"the model needs {STACK}, and the checkpoint does not have it",
    ),
    "shape of the whole": (
        {STACK: torch.zeros(4, 64, 191)},
        f"{STACK} of shape [4, 64, 192] is made of {STACK} of shape [4, 64, 191]",
        f"tensor '{STACK}': its shape is [4, 64, 191], but [4, 64, 192] in the model",
    ),
}


def changed(folder, model, changes):
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    state = {**load_file(file), **changes}
    kept = {name: each for name, each in state.items() if each is not None}
    save_file(kept, file, metadata={"format": "pt"})


def left_dense(folder, made):
    result = quantize_checkpoint(str(folder), str(made), QuantizeOptions(experts=True))
    (warning,) = result.warnings
    assert warning.startswith(f"2 stacks of experts stay dense, the first {STACK}: ")
    return warning


@pytest.mark.parametrize("name", FAULTS)
def test_the_tensor_is_named(name, tmp_path):
    changes, problem, *other = FAULTS[name]
    model = gpt_oss() if "whole" in name else qwen3()
    changed(tmp_path / "dense", model, changes)
    assert problem in left_dense(tmp_path / "dense", tmp_path / "made")
    assert any(problem in each.reason for each in audit(str(tmp_path / "made"))[1])
    skeleton = empty_model(tmp_path / "dense")
    with pytest.raises(FormatError) as caught:
        load_checkpoint(skeleton, tmp_path / "dense")
    assert str(caught.value).endswith((other or [problem])[0])
    if name != "shape of the whole":
        assert all(each.is_meta for each in skeleton.parameters())


def test_one_of_another_dtype(tmp_path):
    """Which load_checkpoint casts, as transformers does."""
    changed(tmp_path / "dense", qwen3(), {ONE: torch.ones(64, 64, dtype=torch.float16)})
    assert f"{ONE} is F16, but most are F32" in left_dense(tmp_path / "dense", tmp_path / "made")
    model = empty_model(tmp_path / "dense")
    load_checkpoint(model, tmp_path / "dense")
    stack = model.get_parameter(STACK)
    assert stack.dtype == torch.float32 and torch.equal(stack[3, 64:], torch.ones(64, 64))


def test_a_router_that_is_missing(tmp_path):
    router = "model.layers.0.mlp.gate.weight"
    changed(tmp_path, qwen3(), {router: None})
    skeleton = empty_model(tmp_path)
    with pytest.raises(FormatError, match=f"the model needs {router}, and the checkpoint does"):
        load_checkpoint(skeleton, tmp_path)
    assert all(each.is_meta for each in skeleton.parameters())
