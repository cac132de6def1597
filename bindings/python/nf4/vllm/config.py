"""The quantization method "nf4" of vLLM."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

import nf4.torch
from nf4.checkpoint.bnb import NESTED_BLOCKSIZE
from nf4.checkpoint.skips import SkipMatcher
from nf4.torch._checks import DTYPES
from nf4.vllm.arrivals import FORMATS, RENAMED, RENAMED_STACKS, Expected, Quantizer

logger = init_logger("vllm.nf4")
NAME = "nf4"
_OTHER = "bitsandbytes"  # the method of vllm-bnb-plugin
# The methods in config.json whose weights have bitsandbytes' layout.
_SERVED = (NAME, _OTHER)
# Models whose loaders in vLLM reorder rows of q and k, by their type or architecture. Falcon's does
# only where it has several kv heads.
_REORDERED = {"bloom", "llama4", "llama4_text", "K2HorizonForCausalLM"}
_ROUTERS = ("gate", "router", "shared_expert_gate")


class NF4Config(QuantizationConfig):
    """How linear layers and experts get their weights. Which of them are in 4 bits the tensors of
    the checkpoint tell.

    format, blocksize, nested  what a dense weight is quantized to. None as format: it stays dense,
                               and `nested` says what the checkpoint is expected to have
    skip                       entries of llm_int8_skip_modules: layers that stay dense
    """

    def __init__(
        self,
        format: str | None = NAME,
        blocksize: int = 64,
        nested: bool = True,
        skip: tuple[str, ...] = (),
    ):
        super().__init__()
        self.format, self.blocksize, self.nested, self.skip = format, blocksize, nested, skip

    def __repr__(self) -> str:
        return f"NF4Config(format={self.format}, blocksize={self.blocksize}, nested={self.nested})"

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
        return cls(
            format=None,
            nested=bool(config.get("bnb_4bit_use_double_quant")),
            skip=tuple(config.get("llm_int8_skip_modules") or ()),
        )

    @classmethod
    def from_config_dict_json(cls, text: str) -> NF4Config:
        """Makes it for a dense checkpoint. text: the option quantization_config_dict_json of
        hf_overrides, with fields of bitsandbytes' configuration."""
        fields = json.loads(text)
        format = fields.get("bnb_4bit_quant_type", NAME)
        if format not in FORMATS:
            raise ValueError(f"bnb_4bit_quant_type is {format!r}, neither nf4 nor fp4")
        return cls(
            format=format,
            blocksize=fields.get("bnb_4bit_blocksize", 64),
            nested=fields.get("bnb_4bit_use_double_quant", True),
            skip=tuple(fields.get("llm_int8_skip_modules") or ()),
        )

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Takes checkpoints in 4 bits, unless the user names another method."""
        if user_quant not in (None, NAME) or hf_quant_cfg.get("quant_method") not in _SERVED:
            return None
        has_other = _OTHER in QUANTIZATION_METHODS
        if hf_quant_cfg.get("load_in_8bit") or hf_quant_cfg.get("_load_in_8bit"):
            if has_other:
                return None
            raise ValueError(
                "the checkpoint is in 8 bits of bitsandbytes, which libnf4 does not read; "
                "vllm-bnb-plugin does"
            )
        if has_other:
            logger.info_once(
                "libnf4 serves this checkpoint; --quantization bitsandbytes makes vllm-bnb-plugin "
                "serve it"
            )
        return NAME

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Raises ValueError for a checkpoint in 4 bits of a model whose loader in vLLM reorders
        rows: it would move packed bytes, but not their scales."""
        if self.format is None and hf_config is not None and _reorders_rows(hf_config):
            raise ValueError(
                f"vLLM reorders rows of weights of models of type {hf_config.model_type} while it "
                f"loads them, which weights in 4 bits do not allow; serve the dense checkpoint "
                f"with --quantization {NAME}"
            )

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper(orig_to_new_regex=RENAMED_STACKS, orig_to_new_suffix=RENAMED)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from vllm.model_executor.layers.fused_moe import RoutedExperts

        from nf4.vllm.experts import NF4ExpertsMethod
        from nf4.vllm.linear import NF4LinearMethod

        if isinstance(layer, LinearBase):
            quantize = None if self._is_skipped(prefix) else self._quantizer()
            return NF4LinearMethod(quantize, self._expected(prefix))
        if isinstance(layer, RoutedExperts):
            quantize = None if self._is_skipped(prefix) else self._quantizer()
            return NF4ExpertsMethod(layer.moe_config, quantize, self._expected(prefix))
        return None

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

    def _quantizer(self) -> Quantizer | None:
        """Returns what quantizes dense weights; None: they stay dense."""
        if self.format is None:
            return None
        return functools.partial(
            nf4.torch.quantize,
            format=self.format,
            blocksize=self.blocksize,
            nested_blocksize=NESTED_BLOCKSIZE if self.nested else 0,
        )

    def _expected(self, prefix: str) -> Expected:
        """Returns the dtypes that the tensors of a layer are expected to have."""
        is_dense = self.format is not None or self._is_skipped(prefix)
        return Expected(is_dense, torch.uint8 if self.nested else torch.float32)


def _reorders_rows(hf_config: Any) -> bool:
    """Tells if vLLM's model reorders rows of a weight of the checkpoint."""
    if hf_config.model_type != "falcon":
        names = {hf_config.model_type, *(hf_config.architectures or ())}
        return not names.isdisjoint(_REORDERED)
    if hf_config.new_decoder_architecture:
        return hf_config.num_kv_heads > 1
    return not hf_config.multi_query and hf_config.num_attention_heads > 1


def register_config() -> None:
    register_quantization_config(NAME)(NF4Config)
