"""The quantization method "nf4" of SGLang."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

import nf4.torch
from nf4.torch._checks import DTYPES
from nf4.vllm.arrivals import RENAMED
from nf4.vllm.linear import LinearMethod

NAME = "nf4"
# Models that were tested. Others may reorder rows of a weight while they load it, which would move
# packed bytes, but not their scales.
MODELS = ("llama", "qwen3", "phi3")


class NF4LinearMethod(LinearMethod, LinearMethodBase):
    """SGLang's view of LinearMethod."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        for name, param in layer.named_parameters(recurse=False):
            if name != "bias":
                param.weight_loader = _refuse


def _refuse(*_: Any, **__: Any) -> None:
    """Takes the place of SGLang's loader, which would copy codes of scales to fp32 scales."""
    raise ValueError("libnf4 does not load weights a second time in SGLang")


class NF4Config(QuantizationConfig):
    """How linear layers get their weights. fields: of config.json, for a checkpoint in 4 bits,
    whose tensors tell which layers are dense; None: dense weights are quantized."""

    def __init__(self, fields: Mapping[str, Any] | None = None):
        super().__init__()
        self._quantize = nf4.torch.quantize if fields is None else None
        self._expected = {"": None if fields is None else torch.uint8}

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return list(DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NF4Config:
        """Raises ValueError for 8 bits, and for a model that was not tested."""
        if config.get("load_in_8bit"):
            raise ValueError("libnf4 does not read 8 bits of bitsandbytes")
        found = getattr(config.get("hf_config"), "model_type", None)
        if found not in MODELS:
            raise ValueError(
                f"libnf4 serves checkpoints in 4 bits of {', '.join(MODELS)} in SGLang, not of "
                f"{found}"
            )
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None
    ) -> str | None:
        """Takes checkpoints in 4 bits where the user asks for it."""
        method = hf_quant_cfg.get("quant_method")
        return NAME if user_quant == NAME and method in (NAME, "bitsandbytes") else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, FusedMoE):
            raise ValueError(f"{prefix}: libnf4 does not serve experts in SGLang")
        if not isinstance(layer, LinearBase):
            return None
        layer.prefix = prefix
        return NF4LinearMethod(self._quantize, self._expected, UnquantizedLinearMethod())

    def get_scaled_act_names(self) -> list[str]:
        return []


def renamed(weights: Iterable[tuple[str, Tensor]], *_: Any, **__: Any) -> Iterator[Any]:
    """Gives the parts of bitsandbytes' weights the names of their placeholders."""
    for name, tensor in weights:
        suffix = next((each for each in RENAMED if name.endswith(each)), "")
        yield name.removesuffix(suffix) + RENAMED.get(suffix, ""), tensor


QUANTIZATION_METHODS[NAME] = NF4Config
QUANTIZATION_CHOICES.append(NAME)
HookRegistry.register(
    "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator",
    renamed,
    HookType.AFTER,
)
