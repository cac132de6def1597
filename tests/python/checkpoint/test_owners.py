"""Layers whose owner reads their `weight` itself are found by the owner's code, and stay dense."""

from __future__ import annotations

import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "in_process")]
torch_cases.require("torch", "transformers")

import nf4  # noqa: E402
import nf4.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from nf4.checkpoint import QuantizeOptions, quantize_checkpoint  # noqa: E402
from nf4.checkpoint.owners import read_by_owners  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import linear  # noqa: E402


def product(module, x):
    return linear(x, module.helped.weight)


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in (
            "called",
            "asked",
            "read",
            "named",
            "method",
            "helped",
            "cast",
            "got",
            "guarded",
        ):
            setattr(self, name, nn.Linear(8, 8))
        self.several = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.pairs = nn.ModuleDict({"a": nn.Linear(8, 8)})
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        nn.init.zeros_(self.called.weight)

    def forward(self, x):
        x = self.called(x.to(self.asked.weight.device))
        x = x @ self.read.weight
        layer = self.named
        x = linear(x, layer.weight, layer.bias)
        x = product(self, self._method(x)).to(self.cast.weight.dtype)
        for index, each in enumerate(self.several):
            x = x + index * each.weight.sum()
        for _, each in self.pairs.items():
            x = x @ each.weight
        x = x @ self.inner[1].weight @ getattr(self, "got").weight  # noqa: B009
        return self._guarded(x)

    def _method(self, x):
        return x @ self.method.weight.T

    def _guarded(self, x):
        if self.guarded.weight.dtype != torch.uint8:
            x = x.to(self.guarded.weight.dtype)
        return self.guarded(x)

    def never(self, x):
        return x @ self.called.weight


class Derived(Owner):
    def forward(self, x):
        return self.called(x)


class Extended(Owner):
    def forward(self, x):
        return super().forward(x) @ self.asked.weight


READ = {
    *("read", "named", "method", "helped", "cast", "got", "several.0", "several.1", "pairs.a"),
    *("inner.0", "inner.1"),
}


def test_reads_are_found_by_the_code():
    assert Owner()(torch.randn(2, 8)).shape == (2, 8)
    assert read_by_owners(Owner()) == READ


def test_the_code_is_that_of_the_class_at_hand():
    assert read_by_owners(Derived()) == set()
    assert read_by_owners(Extended()) == {*READ, "asked"}
    assert read_by_owners(nn.Sequential(Owner(), nn.Linear(8, 8))) == {f"0.{name}" for name in READ}


def mamba():
    config = transformers.MambaConfig(
        hidden_size=64, state_size=8, num_hidden_layers=1, vocab_size=100, time_step_rank=64
    )
    return transformers.MambaForCausalLM(config).eval(), {"input_ids": torch.arange(14).view(2, 7)}


def jamba():
    config = transformers.JambaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, num_experts=2, mamba_d_state=8, mamba_dt_rank=64,
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
    )  # fmt: skip
    return transformers.JambaForCausalLM(config).eval(), {"input_ids": torch.arange(14).view(2, 7)}


def wavlm():
    config = transformers.WavLMConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        conv_dim=(32,) * 7,
    )  # fmt: skip
    return transformers.WavLMModel(config).eval(), {"input_values": torch.randn(1, 4000)}


MODELS = {
    "mamba": (mamba, "mixer.in_proj", "mixer.dt_proj"),
    "jamba": (jamba, "mamba.in_proj", "mamba.dt_proj"),
    "wavlm": (wavlm, "feed_forward.intermediate_dense", "attention.q_proj"),
}


@pytest.mark.parametrize("options", [{}, {"format": "int4", "group_size": 32}])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_reads_weights_runs_quantized(tmp_path, name, options):
    make, quantized, dense = MODELS[name]
    model, inputs = make()
    model.save_pretrained(tmp_path / "dense")
    names = nf4.torch.quantize_model(model, **options)
    assert any(each.endswith(quantized) for each in names)
    assert not any(each.endswith(dense) for each in names)
    with torch.no_grad():
        assert model(**inputs)[0].isfinite().all()
    if name == "mamba":  # trains through another function, which reads more
        model.train()(**inputs, use_cache=False)[0].sum().backward()
    quantize_checkpoint(tmp_path / "dense", tmp_path / "made", QuantizeOptions(**options))
    model.save_pretrained(tmp_path / "saved")
    made, saved = (load_file(tmp_path / each / "model.safetensors") for each in ("made", "saved"))
    assert made.keys() == saved.keys()


def test_only_does_not_quantize_what_its_owner_reads():
    with pytest.raises(nf4.InvalidArgument, match="no layer that may become 4-bit"):
        nf4.torch.quantize_model(mamba()[0], only=("dt_proj",))
