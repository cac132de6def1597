"""Engines of SGLang on libnf4 say what transformers says of the dequantized checkpoint in fp32, as
those of vLLM do."""

from __future__ import annotations

from types import SimpleNamespace

import nf4.torch
import pytest
import torch
from conftest import Engines
from models import Made, require_same
from nf4.sglang import config as nf4_config
from nf4.sglang.config import NF4Config
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

CASES = [
    ("llama_plain", {}),
    ("qwen3", {"nested": False, "skip": ("*.k_proj", "*.up_proj")}),
    ("phi3", {"format": "fp4"}),
]


def test_checkpoints(sglang_engines: Engines, made: Made) -> None:
    checkpoints = [made.checkpoint(name, **options) for name, options in CASES]
    said = sglang_engines(*({"model_path": str(e), "quantization": "nf4"} for e in checkpoints))
    for checkpoint, each in zip(checkpoints, said, strict=True):
        require_same(each, made.reference(checkpoint))


def test_a_dense_checkpoint_is_quantized_while_it_loads(
    sglang_engines: Engines, made: Made
) -> None:
    (said,) = sglang_engines({"model_path": str(made.dense("qwen3")), "quantization": "nf4"})
    require_same(said, made.reference(made.checkpoint("qwen3")))


@pytest.mark.parametrize("method", ["bitsandbytes", "nf4"])
def test_it_serves_where_the_user_asks(method: str) -> None:
    take = NF4Config.override_quantization_method
    assert take({"quant_method": method}, "nf4") == "nf4"
    assert take({"quant_method": method}, None) is None
    assert take({"quant_method": "gptq"}, "nf4") is None


def test_models_that_were_not_tested_are_refused_in_4_bits() -> None:
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    llama, bloom = (SimpleNamespace(model_type=each) for each in ("llama", "bloom"))
    NF4Config.from_config({**settings, "hf_config": llama})
    with pytest.raises(ValueError, match="llama, qwen3, phi3 in SGLang, not of bloom"):
        NF4Config.from_config({**settings, "hf_config": bloom})
    with pytest.raises(ValueError, match="8 bits"):
        NF4Config.from_config({**settings, "load_in_8bit": True, "hf_config": llama})


def test_experts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model.experts: .* does not serve experts in SGLang"):
        NF4Config().get_quant_method(FusedMoE.__new__(FusedMoE), "model.experts")
    assert NF4Config().get_quant_method(torch.nn.Embedding(2, 2), "model.embed_tokens") is None
    method = NF4Config().get_quant_method(LinearBase(64, 64), "model.q_proj")
    assert isinstance(method, nf4_config.NF4LinearMethod)


def test_weights_are_not_loaded_a_second_time() -> None:
    layer = torch.nn.Module()
    layer.prefix, layer.nf4_sizes, layer.nf4_arrivals = "layer", (32, 64, 64), {}
    layer.nf4_placeholders = []
    layer.nf4_placed = [(0, nf4.torch.quantize(torch.ones(32, 64), nested_blocksize=0))]
    layer.bias = torch.nn.Parameter(torch.ones(32))
    NF4Config().get_quant_method(LinearBase(64, 64), "").process_weights_after_loading(layer)
    assert not hasattr(layer.bias, "weight_loader")
    for name in ("weight", "weight_absmax"):
        param = layer.get_parameter(name)
        with pytest.raises(ValueError, match="does not load weights a second time in SGLang"):
            param.weight_loader(param, torch.zeros_like(param))


def test_parts_get_the_names_of_placeholders() -> None:
    names = ["q_proj.weight", "q_proj.weight.absmax", "q_proj.weight.quant_state.bitsandbytes__nf4"]
    found = [name for name, _ in nf4_config.renamed((name, torch.zeros(1)) for name in names)]
    assert found == ["q_proj.weight", "q_proj.weight_absmax", "q_proj.weight_quant_state"]
