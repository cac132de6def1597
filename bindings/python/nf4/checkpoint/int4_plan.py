"""The tensors of an integer weight that is written, quantized anew or repacked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

import nf4
from nf4.checkpoint.dtypes import FILE_TO_NF4
from nf4.checkpoint.header import TensorSpec
from nf4.checkpoint.int4_layouts import Layout

_DTYPES = {"packed": "I32", "zeros": "I32", "g_idx": "I32", "shape": "I64"}


@dataclasses.dataclass(frozen=True)
class Int4Plan:
    """name: of the dense weight. shape: (outputs, inputs). group_size -1: the whole row. scales:
    their dtype, by safetensors' name. symmetric: all zero points are 8. act_order: it has a g_idx
    that matters."""

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
        """Of a row."""
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

    def quantize(self, array: np.ndarray, threads: int) -> nf4.Int4Tensor:
        """Round a dense weight to the nearest."""
        return nf4.quantize_int4(
            array,
            layout=self.layout.name,
            group_size=self.group_size,
            symmetric=self.symmetric,
            scales_dtype=FILE_TO_NF4[self.scales],
            threads=threads,
        )

    def parts(self, weight: nf4.Int4Tensor) -> dict[str, np.ndarray]:
        """The data of `specs`: tensor name -> array."""
        return self.tensors(
            {"packed": weight.packed, "scales": weight.scales, "zeros": weight.zeros}
        )

    def tensors(self, arrays: Mapping[str, np.ndarray | None]) -> dict[str, np.ndarray]:
        """The data of `specs` from arrays by part. Without g_idx it is the plain one."""
        given = dict(arrays)
        if given.get("g_idx") is None:
            given["g_idx"] = np.arange(self.shape[1], dtype=np.int32) // np.int32(
                self.shape[1] // self.groups
            )
        given["shape"] = np.array(self.shape, np.int64)
        names = {f"{self.module}.{name}": part for part, name in self.layout.names.items()}
        return {spec.name: given[names[spec.name]] for spec in self.specs()}
