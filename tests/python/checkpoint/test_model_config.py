"""Nothing of config.json by which transformers fetches code or weights reaches it."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
from nf4.checkpoint.model_config import model_config


@dataclasses.dataclass
class Vision:
    hidden_act: str = "gelu"


class Config:
    """Has fields of its own, and attributes for the rest, as transformers' configurations have."""

    hidden_act: str = "silu"

    def __init__(self, given: dict[str, Any]):
        self.given = given
        self.vision_config = Vision()

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Config:
        return dataclasses.dataclass(cls, init=False)(given)


KIND: Any = SimpleNamespace(config_class=Config)
REPOSITORIES = ["someone/kernel@revision", "someone/kernel", "someone/kernel:layer", "./kernel",
                "kernels-community/flash-attn2", "a\\b", "paged|someone/kernel"]  # fmt: skip


def _passed(**config: Any) -> dict[str, Any]:
    return model_config(KIND, config).given


def test_what_describes_a_model_passes():
    config = {
        "hidden_size": 64, "hidden_act": "silu", "tie_word_embeddings": True, "layers": [1, [2]],
        "rope_parameters": {"rope_type": "llama3", "factor": 8.0}, "bos_token": "<|im_start|>",
        "text_config": {"model_type": "llama", "dtype": "bfloat16"}, "torch_dtype": "float16",
        "label2id": {"a/b": 0}, "_name_or_path": "someone/model", "dtype": None, "none": None,
        "model_args": {"in_chans": 3, "features_only": True, "out_indices": [0, 1]},
    }  # fmt: skip
    assert _passed(**config) == config
    assert _passed(limits=[0.0, {"__float__": "Infinity"}]) == {"limits": [0.0, math.inf]}


@pytest.mark.parametrize("prefix", ["", "_"])
@pytest.mark.parametrize("suffix", ["", "_internal"])
@pytest.mark.parametrize("option", ["attn_implementation", "experts_implementation"])
def test_implementations(option, prefix, suffix):
    key = f"{prefix}{option}{suffix}"
    for built_in in ("eager", None):
        assert _passed(**{key: built_in}).get(key) == built_in
    for other in ("flash_attention_2", "flash_attention_3", "sonicmoe", "none_such", 5, ["a/b"]):
        assert _passed(**{key: other}) == {}
    assert _passed(**{key: {"": "eager", "vision_config": "flash_attention_2"}}) == {
        key: {"": "eager"}
    }
    for name in REPOSITORIES:
        for config, where in (
            ({key: name}, key),
            ({"text_config": {key: name}}, f"text_config.{key}"),
            ({key: {"vision_config": name}}, f"{key}.vision_config"),
            ({"per_layer_config": {"0": {key: name}}}, f"per_layer_config.0.{key}"),
            ({"parts": [{key: name}]}, f"parts.{key}"),
        ):
            with pytest.raises(ValueError, match="names code to fetch; expected one of ") as caught:
                _passed(**config)
            assert str(caught.value).startswith(f"{where} is {name!r}")


def test_what_loads_or_runs_is_left_out():
    left_out = {
        "auto_map": {"AutoModel": "someone/code--model.Model"}, "trust_remote_code": True,
        "kernel_config": {"a": "b"}, "fusion_config": {"a": True}, "custom_pipelines": {},
        "quantization_config": {"quant_method": "aqlm"}, "backbone_kwargs": {"a": 1},
        "attribute_map": {"a": "_attn_implementation"}, "distributed_config": {},
        "model_name": "someone/model", "towers": ["a", "https://host/x"],
    }  # fmt: skip
    assert _passed(**left_out, nested=left_out) == {"nested": {}}
    assert _passed(use_pretrained_backbone=True) == {"use_pretrained_backbone": False}
    arguments = {"pretrained": True, "in_chans": 3}
    assert _passed(model_args=arguments) == {"model_args": {"in_chans": 3}}
    assert _passed(model_args=None) == {"model_args": None}


REFUSED = [
    ({"transformers_weights": "other.safetensors"}, "transformers_weights names the file"),
    ({"configuration_files": ["config.5.0.0.json"]}, "configuration_files names other"),
    ({"backbone": "resnet50"}, "backbone is 'resnet50', a model of its own"),
    ({"vision_config": {"backbone": "a/b"}}, "vision_config.backbone is 'a/b'"),
    ({"model_args": {"checkpoint_path": "x.pth"}}, "model_args.checkpoint_path is 'x.pth'"),
    ({"a": {"model_args": {"pretrained_cfg": {"url": 1}}}}, "a.model_args.pretrained_cfg is"),
    ({"dtype": "load"}, "dtype is 'load'; expected bfloat16, float16"),
    ({"text_config": {"torch_dtype": "hub"}}, "text_config.torch_dtype is 'hub'"),
    ({"dtype": {"": "load"}}, "dtype. is 'load'"),
    ({"dtype": 5}, "dtype is 5"),
    ({"dtype": ["float16"]}, "dtype is ['float16']; expected bfloat16, float16"),
    ({"model_args": "a/b"}, "model_args is 'a/b'; expected an object"),
    ({"vision_config": {"model_args": ["a/b"]}}, "vision_config.model_args is ['a/b']"),
    ({"hidden_act": "someone/act"}, "hidden_act names a place"),
    ({"vision_config": {"hidden_act": "a:b"}}, "vision_config.hidden_act names a place"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=lambda each: str(each)[:40])
def test_what_would_make_another_model_is_refused(config, reason):
    with pytest.raises(ValueError) as caught:
        _passed(**config)
    assert str(caught.value).startswith(reason)


def test_a_described_backbone_passes():
    described = {"model_type": "timm_backbone", "backbone": "resnet50"}
    assert _passed(backbone_config=described) == {"backbone_config": described}
    assert _passed(backbone="resnet50", backbone_config=described)["backbone"] == "resnet50"
