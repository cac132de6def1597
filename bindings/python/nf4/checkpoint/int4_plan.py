"""Plans integer weights to be written: their tensors and their config.json."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nf4._quantize_int4 import quantize_int4
from nf4.checkpoint.dtypes import FILE_TO_NF4
from nf4.checkpoint.errors import FormatError, OptionError
from nf4.checkpoint.header import TensorInfo, TensorSpec
from nf4.checkpoint.int4_config import BUILDERS, METHOD_OF, Settings
from nf4.checkpoint.int4_layouts import LAYOUTS, Layout
from nf4.checkpoint.plans import Amax, Writer
from nf4.checkpoint.rules import Rules, dense_linear, is_transposed
from nf4.int4 import Int4Tensor

if TYPE_CHECKING:
    from nf4.checkpoint.quantize_plan import QuantizeOptions

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


def _check(options: QuantizeOptions) -> None:
    if options.layout not in LAYOUTS:
        raise OptionError(f"layout is {options.layout!r}; expected {', '.join(LAYOUTS)}")
    if options.group_size != -1 and (options.group_size <= 0 or options.group_size % 8):
        raise OptionError(f"group_size is {options.group_size}; expected a multiple of 8, or -1")


def _misfit(info: TensorInfo, rules: Rules, options: QuantizeOptions) -> str | None:
    """Says why this layout cannot hold a matrix that may become 4-bit."""
    rows, cols = info.shape
    if is_transposed(info.name, rules.types):
        return "Conv1D"
    if options.group_size != -1 and cols % options.group_size:
        return _ungrouped(options)
    return LAYOUTS[options.layout].misfit((rows, cols))


def _ungrouped(options: QuantizeOptions) -> str:
    return f"columns not a multiple of the group size {options.group_size}"


def _problem(
    dense: Mapping[str, TensorInfo], reasons: Mapping[str, str | None], options: QuantizeOptions
) -> str | None:
    """Says how many matrices stay dense because of the group size alone, and with which group size
    none would; None if there are none. reasons: from dense_reasons."""
    misfit = LAYOUTS[options.layout].misfit
    cols = {
        name: dense[name].shape[1]
        for name, reason in reasons.items()
        if reason in (None, _ungrouped(options)) and not misfit(dense[name].shape)
    }
    left = [name for name in cols if reasons[name] is not None]
    if not left:
        return None
    divisor = math.gcd(*cols.values())
    sizes = (size for size in (64, 32, 16, 8) if size < options.group_size)
    fit = next((size for size in sizes if divisor % size == 0), -1)
    return (
        f"the group size {options.group_size} leaves {len(left)} of {len(cols)} matrices dense, as "
        f"it does not divide their columns; a group size of {fit} leaves none"
    )


def _plan(info: TensorInfo, options: QuantizeOptions, _amax: Amax | None) -> Int4Plan:
    # The layouts do not support float32 scales.
    scales = "F16" if info.dtype == "F32" else info.dtype
    rows, cols = info.shape
    layout, size = LAYOUTS[options.layout], options.group_size
    return Int4Plan(info.name, layout, (rows, cols), size, scales, options.symmetric)


WRITER = Writer(
    layouts={"int4": tuple(LAYOUTS)},
    options=("layout", "group_size", "symmetric"),
    check=_check,
    misfit=_misfit,
    plan=_plan,
    config=integer_config,
    problem=_problem,
)
