"""Whole trainings through transformers and PEFT: the losses are those of PEFT's own forward, and of
bitsandbytes' own kernels as far as its CPU kernels go, which dequantize less exactly."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch_cases

pytestmark = pytest.mark.interop
torch_cases.require("torch", "transformers", "accelerate", "bitsandbytes", "peft", "_nf4_fast")

import bitsandbytes as bnb  # noqa: E402
import nf4.torch  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from nf4.torch import bitsandbytes as backend  # noqa: E402
from nf4.torch import peft as nf4_peft  # noqa: E402
from peft_cases import counted  # noqa: E402

EXAMPLE = Path(__file__).parents[3] / "examples" / "python" / "qlora.py"
STEPS, LAYERS = 25, 14


@pytest.fixture(scope="module")
def qlora():
    spec = importlib.util.spec_from_file_location("qlora", EXAMPLE)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def own():
    """bitsandbytes and PEFT without libnf4."""
    nf4_peft.unregister()
    yield
    nf4_peft.register()
    backend.unregister()


def adapted(qlora, folder, seed=0) -> peft.PeftModel:
    torch.manual_seed(seed)
    base = qlora.base_model(str(folder))
    base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    config = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base, config).train()


def losses(qlora, model, steps=STEPS, autocast=None) -> list[float]:
    torch.manual_seed(1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    found = []
    for _ in range(steps):
        batch = qlora.sequences(qlora.BATCH)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_the_losses_of_peft_and_bitsandbytes(qlora, own, tmp_path, monkeypatch):
    of_bitsandbytes = losses(qlora, adapted(qlora, tmp_path))
    backend.register()
    of_peft = losses(qlora, adapted(qlora, tmp_path))
    nf4_peft.register()
    for converted in (False, True):
        model = adapted(qlora, tmp_path)
        if converted:
            nf4.torch.convert(model)
        with counted(monkeypatch) as fused:
            found = losses(qlora, model)
        assert fused.count == STEPS * LAYERS
        assert found[-1] < 0.9 * found[0]
        assert found == pytest.approx(of_peft, rel=1e-5)
        assert found == pytest.approx(of_bitsandbytes, rel=1e-2)


def test_under_autocast(qlora, own, tmp_path, monkeypatch):
    """x comes in fp32 from the norms, and the layers compute in bf16, as Trainer's bf16=True has
    it. One step: what rounds alike stays alike."""
    backend.register()
    expected = losses(qlora, in_bf16(adapted(qlora, tmp_path)), 2, torch.bfloat16)
    nf4_peft.register()
    with counted(monkeypatch) as fused:
        found = losses(qlora, in_bf16(adapted(qlora, tmp_path)), 2, torch.bfloat16)
    assert fused.count == 2 * LAYERS
    assert found == pytest.approx(expected, rel=2e-3)


def in_bf16(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.compute_dtype = torch.bfloat16
    return model


def test_transformers_trainer(qlora, own, tmp_path, monkeypatch):
    """With gradient checkpointing, accumulation and a scheduler."""

    class Sequences(torch.utils.data.Dataset):
        def __init__(self) -> None:
            torch.manual_seed(2)
            self.rows = qlora.sequences(64)

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            return {"input_ids": self.rows[i], "labels": self.rows[i]}

    def trained() -> list[float]:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"), per_device_train_batch_size=8, max_steps=4,
            gradient_accumulation_steps=2, gradient_checkpointing=True, learning_rate=5e-3,
            logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", seed=3,
            gradient_checkpointing_kwargs={"use_reentrant": False}, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=adapted(qlora, tmp_path), args=arguments, train_dataset=Sequences()
        )
        trainer.train()
        return [each["loss"] for each in trainer.state.log_history if "loss" in each]

    expected = trained()
    backend.register()
    nf4_peft.register()
    with counted(monkeypatch) as fused:
        found = trained()
    assert fused.count >= 4 * 2 * LAYERS
    assert len(found) == 4 and found == pytest.approx(expected, rel=1e-3)
