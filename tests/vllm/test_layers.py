"""What a layer says of its weights, and of checkpoints that it cannot serve."""

from __future__ import annotations

import json

import nf4.torch
import pytest
import torch
import transformers
from nf4.vllm.arrivals import Expected
from nf4.vllm.config import NF4Config
from nf4.vllm.linear import NF4LinearMethod


class Layer(torch.nn.Module):
    prefix = "layer"

    def weight_loader(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        """Stands for the loader of vLLM's layer; no test loads a tensor."""


def made(is_dense: bool = False, rows: int = 96) -> tuple[NF4LinearMethod, Layer]:
    layer = Layer()
    method = NF4LinearMethod(None, Expected(is_dense, torch.uint8))
    method.create_weights(
        layer, 64, [rows], 64, rows, torch.float32, weight_loader=layer.weight_loader
    )
    return method, layer


def test_only_a_dense_weight_has_dimensions() -> None:
    _, dense = made(is_dense=True)
    assert (dense.weight.input_dim, dense.weight.output_dim) == (1, 0)
    assert not hasattr(dense.weight_absmax, "output_dim")
    assert not hasattr(made()[1].weight, "output_dim")


def weight(rows: int) -> nf4.QuantizedTensor:
    return nf4.torch.quantize(torch.ones(rows, 64), nested_blocksize=0)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ((0, 0, 64), "has row 0 twice"),
        ((0, 32), "has 64 of its 96"),
        ((0, 16, 64), "has row 16 twice"),
    ],
)
def test_rows_are_there_once(starts: tuple[int, ...], message: str) -> None:
    method, layer = made()
    layer.nf4_placed = [(start, weight(32)) for start in reversed(starts)]
    with pytest.raises(ValueError, match=f"layer: the checkpoint {message}"):
        method.process_weights_after_loading(layer)


def test_rows_that_are_missing_are_named() -> None:
    method, layer = made()
    layer.nf4_placed = [(0, weight(32)), (64, weight(64))]
    with pytest.raises(ValueError, match="layer: the checkpoint lacks row 32"):
        method.process_weights_after_loading(layer)


FALCON = transformers.FalconConfig
REORDERED = [
    FALCON(new_decoder_architecture=True, num_attention_heads=8, num_kv_heads=4),
    FALCON(multi_query=False),
    transformers.BloomConfig(),
    transformers.Llama4Config(),
    transformers.Llama4TextConfig(),
    transformers.LlamaConfig(architectures=["K2HorizonForCausalLM"]),
]
KEPT = [
    FALCON(multi_query=True),
    FALCON(new_decoder_architecture=True, num_kv_heads=1),
    transformers.LlamaConfig(),
    transformers.LlamaConfig(architectures=["LlamaForCausalLM"]),
]


@pytest.mark.parametrize("config", REORDERED)
def test_models_whose_rows_are_reordered_are_refused_in_4_bits(config: object) -> None:
    with pytest.raises(ValueError, match=f"models of type {config.model_type} .*--quantization"):
        NF4Config.from_config({}).maybe_update_config("model", config)
    NF4Config.from_config_dict_json("{}").maybe_update_config("model", config)


@pytest.mark.parametrize("config", [*KEPT, None])
def test_other_models_are_served_in_4_bits(config: object) -> None:
    NF4Config.from_config({}).maybe_update_config("model", config)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int8", None])
def test_weights_are_not_quantized_to_other_formats(format: str | None) -> None:
    fields = json.dumps({"bnb_4bit_quant_type": format})
    with pytest.raises(ValueError, match=f"bnb_4bit_quant_type is {format!r}, neither nf4"):
        NF4Config.from_config_dict_json(fields)
