"""What a layer says of its weights, and of checkpoints that it cannot serve."""

from __future__ import annotations

import json

import nf4.torch
import pytest
import torch
import transformers
from nf4.vllm import config as nf4_config
from nf4.vllm.config import NF4Config, NF4LinearMethod
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.linear import UnquantizedLinearMethod


class Layer(torch.nn.Module):
    prefix = "layer"

    def weight_loader(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        """Stands for the loader of vLLM's layer; no test loads a tensor."""


def made(is_dense: bool = False, rows: int = 96) -> tuple[NF4LinearMethod, Layer]:
    layer = Layer()
    method = NF4LinearMethod(
        None, {"": None if is_dense else torch.uint8}, UnquantizedLinearMethod()
    )
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


def test_dense_rows_and_rows_in_4_bits_stay_apart() -> None:
    method, layer = made()
    dense = torch.ones(16, 64)
    layer.nf4_placed = [(80, dense), (32, weight(32)), (64, dense), (0, weight(32))]
    method.process_weights_after_loading(layer)
    assert layer.weight.numel() == 2048 and layer.weight1.shape == (32, 64)
    assert layer.nf4_specs[0][1][0] == 64 and layer.nf4_specs[1] is None


# ---- What is taken -------------------------------------------------------------------------


def taken(user: str | None = None, model_type: str = "llama", **settings: object) -> str | None:
    config = transformers.AutoConfig.for_model(model_type)
    return NF4Config.override_quantization_method(settings, user, hf_config=config)


@pytest.mark.parametrize("method", ["bitsandbytes", "nf4"])
def test_checkpoints_in_4_bits_are_taken(method: str) -> None:
    assert taken(quant_method=method, load_in_4bit=True) == "nf4"


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "fp8", "mxfp4"])
@pytest.mark.parametrize("user", [None, "nf4"])
def test_other_checkpoints_are_left_to_vllm(method: str, user: str | None) -> None:
    assert taken(user, quant_method=method) is None


def test_beside_vllm_bnb_plugin_libnf4_serves_4_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "QUANTIZATION_METHODS", ["nf4", "bitsandbytes"])
    said: list[str] = []
    monkeypatch.setattr(nf4_config.logger, "info_once", said.append)
    assert taken(quant_method="bitsandbytes", load_in_4bit=True) == "nf4"
    assert "--quantization bitsandbytes chooses vllm-bnb-plugin" in said[0]
    assert taken("bitsandbytes", quant_method="bitsandbytes", load_in_4bit=True) is None
    assert taken(quant_method="bitsandbytes", load_in_8bit=True) is None


def test_8_bits_are_refused_where_no_plugin_reads_them() -> None:
    with pytest.raises(
        ValueError, match="does not read 8 bits of bitsandbytes; vllm-bnb-plugin does"
    ):
        taken(quant_method="bitsandbytes", load_in_8bit=True)


@pytest.mark.parametrize("method", ["mxfp4", "gpt_oss_mxfp4"])
@pytest.mark.parametrize(
    ("user", "is_cpu", "has_amx", "expected"),
    [
        (None, True, False, "nf4"),  # vLLM has no kernel
        (None, True, True, None),
        (None, False, False, None),
        ("nf4", False, False, "nf4"),
        ("mxfp4", True, False, None),
    ],
)
def test_who_serves_gpt_oss(
    method: str,
    user: str | None,
    is_cpu: bool,
    has_amx: bool,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(nf4_config.current_platform), "is_cpu", lambda self: is_cpu)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    assert taken(user, "gpt_oss", quant_method=method) == expected


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
    with pytest.raises(ValueError, match=f"models of type {config.model_type}, .*--quantization"):
        NF4Config.from_config({}).maybe_update_config("model", config)
    NF4Config.from_config_dict_json("{}").maybe_update_config("model", config)


@pytest.mark.parametrize("config", [*KEPT, None])
def test_other_models_are_served_in_4_bits(config: object) -> None:
    NF4Config.from_config({}).maybe_update_config("model", config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("blocksize", 128),
        ("bnb_4bit_compute_dtype", "bfloat16"),
        ("bnb_4bit_quant_type", None),
        ("bnb_4bit_blocksize", "128"),
        ("bnb_4bit_use_double_quant", "false"),
        ("llm_int8_skip_modules", "o_proj"),
    ],
)
def test_a_field_that_has_no_effect_is_refused(name: str, value: object) -> None:
    message = rf"{name} is {value!r}; libnf4 expects some of .*llm_int8_skip_modules \(list\)"
    with pytest.raises(ValueError, match=message):
        NF4Config.from_config_dict_json(json.dumps({name: value}))


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int8"])
def test_weights_are_not_quantized_to_other_formats(format: str) -> None:
    fields = json.dumps({"bnb_4bit_quant_type": format})
    with pytest.raises(ValueError, match=f"bnb_4bit_quant_type is {format!r}, neither nf4"):
        NF4Config.from_config_dict_json(fields)
