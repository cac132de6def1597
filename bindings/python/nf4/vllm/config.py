"""The quantization method "nf4" of vLLM."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import base_config
from vllm.platforms import current_platform

import nf4.torch
from nf4.checkpoint.bnb import NESTED_BLOCKSIZE
from nf4.checkpoint.skips import SkipMatcher
from nf4.torch._checks import DTYPES
from nf4.vllm.arrivals import FORMATS, RENAMED, RENAMED_STACKS, Expected, Quantizer
from nf4.vllm.linear import LinearMethod

logger = init_logger("vllm.nf4")
NAME = "nf4"
# A user may set these fields of bitsandbytes' configuration, of these types.
_FIELDS = {"bnb_4bit_quant_type": str, "bnb_4bit_blocksize": int}
_FIELDS |= {"bnb_4bit_use_double_quant": bool, "llm_int8_skip_modules": list}
_OTHER = "bitsandbytes"  # the method of vllm-bnb-plugin
# The methods in config.json whose weights have bitsandbytes' layout.
_SERVED = (NAME, _OTHER)
_GPT_OSS = ("mxfp4", "gpt_oss_mxfp4")  # as in config.json, and as vLLM changes it
# Models whose loaders in vLLM reorder rows of q and k, by their type or architecture. Falcon's does
# only where it has several kv heads.
_REORDERED = {"bloom", "llama4", "llama4_text", "K2HorizonForCausalLM"}
_ROUTERS = ("gate", "router", "shared_expert_gate")


class NF4LinearMethod(LinearMethod, LinearMethodBase):
    """vLLM's view of LinearMethod."""


@quantization.register_quantization_config(NAME)
class NF4Config(base_config.QuantizationConfig):
    """How linear layers and experts get their weights. Which of them are in 4 bits the tensors of
    the checkpoint tell.

    fields  of bitsandbytes' configuration
    format  what dense weights are quantized to; None: they stay dense, and the fields say what the
            checkpoint is expected to have
    """

    def __init__(self, fields: Mapping[str, Any] = MappingProxyType({}), format: str | None = NAME):
        super().__init__()
        self.format, self.blocksize = format, fields.get("bnb_4bit_blocksize", 64)
        self.nested = bool(fields.get("bnb_4bit_use_double_quant", format is not None))
        self.skip = tuple(fields.get("llm_int8_skip_modules") or ())
        self._swiglu_limit: float | None = None  # of gpt-oss, whose experts are in MXFP4

    @classmethod
    def get_name(cls) -> Any:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return list(DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NF4Config:
        """Makes it for a checkpoint in 4 bits."""
        return cls(config, format=None)

    @classmethod
    def from_config_dict_json(cls, text: str) -> NF4Config:
        """Makes it for a dense checkpoint. text: the option quantization_config_dict_json of
        hf_overrides, with fields of bitsandbytes' configuration. Raises ValueError for others."""
        fields = json.loads(text)
        for name, value in fields.items():
            if type(value) is not _FIELDS.get(name):
                expected = ", ".join(f"{each} ({kind.__name__})" for each, kind in _FIELDS.items())
                raise ValueError(f"{name} is {value!r}; libnf4 expects some of {expected}")
        format = fields.get("bnb_4bit_quant_type", NAME)
        if format not in FORMATS:
            raise ValueError(f"bnb_4bit_quant_type is {format!r}, neither nf4 nor fp4")
        return cls(fields, format)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Takes checkpoints in 4 bits, unless the user names another method. gpt-oss stays with
        vLLM's own kernels, unless the user names this method or vLLM has none for the CPU."""
        method = hf_quant_cfg.get("quant_method")
        if user_quant not in (None, NAME) or method not in (*_SERVED, *_GPT_OSS):
            return None
        if method in _GPT_OSS:
            is_lacking = current_platform.is_cpu() and not torch.cpu._is_amx_tile_supported()
            is_ours = user_quant == NAME or is_lacking
            return NAME if is_ours and getattr(hf_config, "model_type", "") == "gpt_oss" else None
        has_other = _OTHER in quantization.QUANTIZATION_METHODS
        if hf_quant_cfg.get("load_in_8bit") or hf_quant_cfg.get("_load_in_8bit"):
            if has_other:
                return None
            raise ValueError("libnf4 does not read 8 bits of bitsandbytes; vllm-bnb-plugin does")
        if has_other:
            logger.info_once("libnf4 serves; --quantization bitsandbytes chooses vllm-bnb-plugin")
        return NAME

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Raises ValueError for a checkpoint in 4 bits of a model whose loader in vLLM reorders
        rows: it would move packed bytes, but not their scales."""
        settings = getattr(hf_config, "quantization_config", None) or {}
        if settings.get("quant_method") in _GPT_OSS:
            self._swiglu_limit = hf_config.swiglu_limit
        if self.format is None and hf_config is not None and _reorders_rows(hf_config):
            raise ValueError(
                f"vLLM reorders rows of weights of models of type {hf_config.model_type}, which 4 "
                f"bits do not allow; serve the dense checkpoint with --quantization {NAME}"
            )

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper(orig_to_new_regex=RENAMED_STACKS, orig_to_new_suffix=RENAMED)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        from vllm.model_executor.layers.fused_moe import RoutedExperts

        from nf4.vllm.experts import NF4ExpertsMethod

        if isinstance(layer, LinearBase):
            return NF4LinearMethod(*self._weights(prefix), UnquantizedLinearMethod())
        if not isinstance(layer, RoutedExperts):
            return None
        if self._swiglu_limit is not None:
            from nf4.vllm.gpt_oss import MXFP4ExpertsMethod

            return MXFP4ExpertsMethod(layer.moe_config, self._swiglu_limit)
        return NF4ExpertsMethod(layer.moe_config, *self._weights(prefix))

    def _is_skipped(self, prefix: str) -> bool:
        """Tells if a layer is expected to be dense."""
        parent, _, name = prefix.rpartition(".")
        if name in _ROUTERS:
            return True
        names = [f"{parent}.{each}" for each in self.packed_modules_mapping.get(name, [name])]
        matcher = SkipMatcher(names)
        skipped = {each for entry in self.skip for each in matcher.skipped(entry)}
        if self.format is not None and 0 < len(skipped) < len(names):
            raise ValueError(
                f"llm_int8_skip_modules names {sorted(skipped)}; vLLM joins {names} in one layer, "
                f"of which it may name all or none"
            )
        return len(skipped) == len(names)

    def _weights(self, prefix: str) -> tuple[Quantizer | None, Expected]:
        """Returns what quantizes dense weights of a layer, or None, and the dtypes that its tensors
        are expected to have."""
        is_skipped = self._is_skipped(prefix)
        expected: Expected = {
            "": None if self.format or is_skipped else torch.uint8,
            "absmax": torch.uint8 if self.nested else torch.float32,
            "quant_state": torch.uint8,
        }
        if self.format is None or is_skipped:
            return None, expected
        nested = NESTED_BLOCKSIZE if self.nested else 0
        options = {"format": self.format, "blocksize": self.blocksize, "nested_blocksize": nested}
        return functools.partial(nf4.torch.quantize, **options), expected


def _reorders_rows(hf_config: Any) -> bool:
    """Tells if vLLM's model reorders rows of a weight of the checkpoint."""
    if hf_config.model_type != "falcon":
        names = {hf_config.model_type, *(hf_config.architectures or ())}
        return not names.isdisjoint(_REORDERED)
    if hf_config.new_decoder_architecture:
        return hf_config.num_kv_heads > 1
    return not hf_config.multi_query and hf_config.num_attention_heads > 1
