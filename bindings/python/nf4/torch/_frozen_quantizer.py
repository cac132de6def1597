"""The base classes of the quantizers in _nf4_quantizer.py, _int4_quantizer.py and _marks.py. This
module is imported while transformers is being imported, so it imports only two modules of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from nf4.checkpoint.quantization import OF_EXPERTS
from nf4.torch.dense import to_dense


class OurLayers:
    """The answers of a quantizer for models with NF4Linear, Int4Linear and experts."""

    @property
    def is_compileable(self) -> bool:
        return True

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        to_dense(model, dtype)
        return model


class FrozenQuantizer(OurLayers, HfQuantizer):
    """Handles weights that are already quantized and stay frozen."""

    requires_calibration = True

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[Any, dict[str, Any]]:
        from nf4.torch._stored_state import as_stored  # this needs all of nf4.torch

        return as_stored(model), {}

    @property
    def is_trainable(self) -> bool:
        """Adapters are trainable."""
        return True


class StoredConfig(QuantizationConfigMixin):
    """A quantization_config of config.json as an object; to_dict returns the original. Its keys are
    not trusted, so only quant_method becomes an attribute."""

    def __init__(self, fields: Mapping[str, Any], /):
        self.fields = dict(fields)
        self.quant_method = fields.get("quant_method", OF_EXPERTS)

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        made = cls(config_dict)
        return (made, kwargs) if return_unused_kwargs else made

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.fields)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()
