"""The commands and blocks of docs/experts.md, with small models and on the CPU."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "in_process")]
torch_cases.require("torch", "transformers", "peft")

import nf4.torch  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from experts_cases import TOKENS, qwen3  # noqa: E402
from nf4.cli import main  # noqa: E402
from nf4.torch import Int4Experts, NF4Experts  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

PAGE = Path(__file__).resolve().parents[3] / "docs" / "experts.md"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.M | re.S)


def run(source, **names):
    names |= {"nf4": nf4, "torch": torch, "transformers": transformers, "peft": peft}
    exec(compile(source.replace('"cuda"', '"cpu"'), PAGE, "exec"), names)
    return names["model"]


def count(model, kind):
    return sum(isinstance(each, kind) for each in model.modules())


def test_what_a_user_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    qwen3().bfloat16().save_pretrained("model")
    quantizes, loads, adapts, *_, integers = blocks("python")
    (commands,) = blocks("sh")
    for command in commands.strip().splitlines():
        program, *arguments = shlex.split(command)
        assert program == "nf4" and main(arguments) == 0
    expected = run(quantizes)(TOKENS).logits
    model = run(loads)
    assert count(model, NF4Experts) == 4 and torch.equal(model(TOKENS).logits, expected)

    def train(model):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for _ in range(5):
            losses.append(model(TOKENS, labels=TOKENS).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < losses[0] - 0.1
        trained.append(model.eval()(TOKENS).logits)

    trained: list[torch.Tensor] = []
    model = run(adapts, model=model, train=train)
    # Loaded again, and merged: quantized once more.
    assert count(model, NF4Experts) == 4 and not any("lora" in key for key in model.state_dict())
    assert (model(TOKENS).logits - trained[0]).norm() <= 0.2 * trained[0].norm()
    base = transformers.AutoModelForCausalLM.from_pretrained("model-nf4")
    again = peft.PeftModel.from_pretrained(base, "adapter").eval()
    assert torch.equal(again(TOKENS).logits, trained[0])

    tensors = load_file("model/model.safetensors")
    made = {
        name: nf4.torch.quantize_int4(each, layout="gptq", group_size=32)
        if "_proj" in name else each for name, each in tensors.items()
    }  # fmt: skip
    folder = re.search(r'load\("(.*?)"', integers).group(1)
    nf4.save(folder, made, config=base.config.to_diff_dict() | {
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32,
                                "desc_act": False, "sym": True}
    })  # fmt: skip
    assert count(run(integers), Int4Experts) == 4
