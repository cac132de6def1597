"""Plans integer weights to be written: their tensors and their config.json."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nf4._quantize_int4 import quantize_int4
from nf4.checkpoint.dtypes import FILE_TO_NF4
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.header import TensorInfo, TensorSpec
from nf4.checkpoint.int4_config import BUILDERS, METHOD_OF, Settings
from nf4.checkpoint.int4_layouts import Layout
from nf4.checkpoint.rules import dense_linear
from nf4.int4 import Int4Tensor

_DTYPES = {"packed": "I32", "zeros": "I32", "g_idx": "I32", "shape": "I64"}


@dataclasses.dataclass(frozen=True)
class Int4Plan:
    """An integer weight to be written. name: the dense weight's. shape: (outputs, inputs).
    group_size -1: the whole row. scales: their dtype, by safetensors' name. symmetric: all zero
    points are 8. act_order: it has a g_idx that matters."""

    name: str
    layout: Layout
    shape: tuple[int, int]
    group_size: int
    scales: str
    symmetric: bool
    act_order: bool = False

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def groups(self) -> int:
        """The number of groups in a row."""
        return 1 if self.group_size == -1 else self.shape[1] // self.group_size

    def specs(self) -> list[TensorSpec]:
        shapes = {**self.layout.shapes(self.shape, self.groups), "shape": (2,)}
        dtypes = {**_DTYPES, "scales": self.scales}
        # compressed-tensors has neither the zero points of symmetric weights nor a g_idx without
        # act order; GPTQ has both.
        bare = self.layout.by_row
        left_out = {"zeros": bare and self.symmetric, "g_idx": bare and not self.act_order}
        return [
            TensorSpec(f"{self.module}.{name}", dtypes[part], shapes[part])
            for part, name in self.layout.names.items()
            if not left_out.get(part)
        ]

    def quantize(self, array: np.ndarray, threads: int) -> Int4Tensor:
        """Quantizes a dense weight, rounding to nearest."""
        return quantize_int4(
            array,
            layout=self.layout.name,
            group_size=self.group_size,
            symmetric=self.symmetric,
            scales_dtype=FILE_TO_NF4[self.scales],
            threads=threads,
        )

    def parts(self, weight: Int4Tensor) -> dict[str, np.ndarray]:
        """The data of `specs`: tensor name -> array."""
        return self.tensors(
            {"packed": weight.packed, "scales": weight.scales, "zeros": weight.zeros}
        )

    def tensors(self, arrays: Mapping[str, np.ndarray | None]) -> dict[str, np.ndarray]:
        """Returns the data of `specs` from arrays by part. The default g_idx is column /
        group_size."""
        given = dict(arrays)
        if given.get("g_idx") is None:
            given["g_idx"] = np.arange(self.shape[1], dtype=np.int32) // np.int32(
                self.shape[1] // self.groups
            )
        given["shape"] = np.array(self.shape, np.int64)
        names = {f"{self.module}.{name}": part for part, name in self.layout.names.items()}
        return {spec.name: given[names[spec.name]] for spec in self.specs()}


def integer_config(
    plans: Sequence[Int4Plan],
    dense: Iterable[TensorInfo],
    architectures: Iterable[str],
    path: str = "",
) -> dict[str, Any]:
    """Returns the quantization_config for these weights and the tensors that stay dense. Raises
    FormatError, with the checkpoint's path, if the layout supports only one group size and the
    weights have several."""
    to = plans[0].layout
    sizes = [size for size, _ in Counter(plan.group_size for plan in plans).most_common()]
    if len(sizes) > 1 and not to.by_row:
        other = next(plan for plan in plans if plan.group_size == sizes[1])
        reason = (
            f"cannot become {to.name}, which has one group size for all weights: it has "
            f"{other.group_size}, others {sizes[0]}"
        )
        raise FormatError(path, reason, other.name)
    modules: dict[int, list[str]] = {size: [] for size in sizes}
    for plan in plans:
        modules[plan.group_size].append(plan.module)
    kept = dense_linear(dense, [plan.module for plan in plans], architectures)
    settings = Settings(
        to,
        tuple(sizes),
        all(plan.symmetric for plan in plans),
        any(plan.act_order for plan in plans),
        tuple(kept),
    )
    return BUILDERS[METHOD_OF[to.name]](settings, modules)
