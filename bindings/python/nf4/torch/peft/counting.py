"""Counts the parameters of a model. PEFT itself counts the bytes of a 4-bit weight, and knows only
bitsandbytes' weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from torch import nn

from nf4.torch.modules.base import QuantizedModule


def _missed(module: QuantizedModule) -> int:
    """Counts the weights beyond the elements of those parameters that hold them."""
    held = [each for name, each in module._parameters.items() if name != "bias"]
    return math.prod(module.spec.shape) - sum(each.numel() for each in held if each is not None)


def counted(original: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    """Wraps PEFT's get_nb_trainable_parameters."""

    @functools.wraps(original)
    def get_nb_trainable_parameters(self: nn.Module) -> tuple[int, int]:
        trainable, total = original(self)
        quantized = (each for each in self.modules() if isinstance(each, QuantizedModule))
        return trainable, total + sum(map(_missed, quantized))

    return get_nb_trainable_parameters
