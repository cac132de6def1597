"""Plans MXFP4 and NVFP4 weights to be written: their tensors, and their config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from nf4.checkpoint.e2m1_config import compressed_config, modelopt_config
from nf4.checkpoint.e2m1_layouts import Layout
from nf4.checkpoint.header import TensorInfo, TensorSpec
from nf4.checkpoint.rules import dense_linear
from nf4.tensor import QuantizedTensor

_PARTS = {"packed": "packed", "scales": "absmax", "global": "nested_absmax"}


@dataclasses.dataclass(frozen=True)
class E2m1Plan:
    """A weight to be written. name: the dense weight's. shape: (outputs, inputs)."""

    name: str
    layout: Layout
    shape: tuple[int, ...]
    blocksize: int

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    def specs(self) -> list[TensorSpec]:
        shapes = self.layout.shapes(self.shape, self.blocksize)
        return [
            TensorSpec(self.layout.tensor(self.module, part), dtype, shapes[part])
            for part, dtype in self.layout.dtypes.items()
        ]

    def parts(self, weight: QuantizedTensor) -> dict[str, np.ndarray]:
        """The data of `specs`: tensor name -> array."""
        return {
            self.layout.tensor(self.module, part): getattr(weight, _PARTS[part])
            for part in self.layout.dtypes
        }


def e2m1_config(
    plans: Sequence[E2m1Plan], dense: Iterable[TensorInfo], architectures: Iterable[str]
) -> dict[str, Any]:
    """Returns the quantization_config for weights of one layout, and the tensors that stay
    dense."""
    layout = plans[0].layout
    kept = dense_linear(dense, [plan.module for plan in plans], architectures)
    build = compressed_config if layout.name == "compressed-tensors" else modelopt_config
    return build(layout, kept)
