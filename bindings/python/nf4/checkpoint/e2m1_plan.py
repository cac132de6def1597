"""Plans MXFP4 and NVFP4 weights to be written: their tensors, their quantization by rounding, and
their config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nf4._convert import dtype_name
from nf4._formats import has_global_scales
from nf4._quantize import quantize
from nf4.checkpoint.dtypes import NUMPY
from nf4.checkpoint.e2m1_config import compressed_config, gpt_oss_config, modelopt_config
from nf4.checkpoint.e2m1_layouts import BLOCKSIZES, FIELDS, GPT_OSS, MXFP4, WRITTEN, Layout
from nf4.checkpoint.errors import OptionError
from nf4.checkpoint.header import TensorInfo, TensorSpec
from nf4.checkpoint.plans import Amax, Writer
from nf4.checkpoint.rules import Rules, dense_linear, is_transposed
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.stacks import Stack
from nf4.tensor import QuantizedTensor

if TYPE_CHECKING:
    from nf4.checkpoint.quantize_plan import QuantizeOptions

# Layers that engines fuse, for which they want one global scale.
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
# The largest scale of a block in E4M3, times the largest E2M1.
_LARGEST = np.float32(448 * 6)


class _Largest:
    """The largest magnitude of several dense weights, read once."""

    def __init__(self, checkpoint: Checkpoint, names: Sequence[str]):
        self._checkpoint, self._names = checkpoint, names
        self._found: float | None = None

    def __call__(self) -> float:
        if self._found is None:
            self._found = max(map(self._of_one, self._names))
        return self._found

    def _of_one(self, name: str) -> float:
        info = self._checkpoint.info(name)
        largest = 0.0
        for _, piece in self._checkpoint.owner[name].pieces(info):
            largest = max(largest, largest_of(np.frombuffer(piece, NUMPY[info.dtype])))
        return largest


def largest_of(values: np.ndarray) -> float:
    """Returns the largest finite magnitude."""
    magnitudes = np.abs(values.astype(np.float32))
    return float(np.max(magnitudes, initial=0, where=np.isfinite(magnitudes)))


def fused_with(name: str, names: Collection[str]) -> list[str]:
    """Returns the weights among `names` that engines fuse with this one, which is one of them."""
    parent, _, last = name.removesuffix(".weight").rpartition(".")
    group = next((group for group in _FUSED if last in group), (last,))
    prefix = f"{parent}." if parent else ""
    return [each for part in group if (each := f"{prefix}{part}.weight") in names] or [name]


def global_scale(largest: float, divides: bool) -> np.float32:
    """Returns the global scale of NVFP4, as compressed-tensors and ModelOpt choose it: the block
    with the largest element gets the largest scale. 1 for weights of zeros."""
    with np.errstate(all="ignore"):
        amax = np.float32(largest)
        # torch, and so compressed-tensors, divides a number by a tensor in these two steps.
        scale = np.float32(1) / amax * _LARGEST if divides else amax / _LARGEST
    return scale if np.isfinite(scale) and scale > 0 else np.float32(1)


@dataclasses.dataclass(frozen=True)
class E2m1Plan:
    """A weight to be written. name: the dense weight's. shape: (outputs, inputs), or (experts,
    outputs, inputs). amax: for NVFP4, the largest magnitude of the weights that share a global
    scale; None: that of this one."""

    name: str
    layout: Layout
    shape: tuple[int, ...]
    blocksize: int
    amax: Amax | None = None

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    def specs(self) -> list[TensorSpec]:
        shapes = self.layout.shapes(self.shape, self.blocksize)
        return [
            TensorSpec(self.layout.tensor(self.module, part), dtype, shapes[part])
            for part, dtype in self.layout.dtypes.items()
        ]

    def quantize(self, array: np.ndarray, threads: int) -> QuantizedTensor:
        """Quantizes a dense weight, rounding to nearest, with compressed-tensors' rule for the
        scales of MXFP4."""
        rule, of_all = self.layout.rule, None
        if has_global_scales(self.layout.format):
            largest = largest_of(array) if self.amax is None else self.amax()
            of_all = np.array([global_scale(largest, rule == "divisor")], np.float32)
        *rows, cols = self.shape
        return quantize(
            array,
            threads=threads,
            out=QuantizedTensor(
                packed=np.empty((*rows, cols // 2), np.uint8),
                absmax=np.empty((*rows, cols // self.blocksize), np.uint8),
                nested_absmax=of_all,
                format=self.layout.format,
                blocksize=self.blocksize,
                scale_rule=rule,
                shape=self.shape,
                dtype=dtype_name(array.dtype),
            ),
        )

    def parts(self, weight: QuantizedTensor) -> dict[str, np.ndarray]:
        """The data of `specs`: tensor name -> array."""
        return {
            self.layout.tensor(self.module, part): getattr(weight, FIELDS[part])
            for part in self.layout.dtypes
        }


def e2m1_config(
    plans: Sequence[E2m1Plan], dense: Iterable[TensorInfo], architectures: Iterable[str]
) -> dict[str, Any]:
    """Returns the quantization_config for weights of one layout, and the tensors that stay dense.
    Raises OptionError for the layout of gpt-oss in another model."""
    layout = plans[0].layout
    if layout is GPT_OSS:
        names = list(architectures)
        if names != ["GptOssForCausalLM"]:
            raise OptionError(
                f"layout is 'gpt-oss', but the model is {', '.join(names)}; expected "
                f"GptOssForCausalLM"
            )
        return gpt_oss_config()
    kept = dense_linear(dense, [plan.module for plan in plans], architectures)
    build = compressed_config if layout.name == "compressed-tensors" else modelopt_config
    return build(layout, kept)


def _check(options: QuantizeOptions) -> None:
    layouts = WRITER.layouts[options.format]
    if options.layout not in layouts:
        expected = " or ".join(layouts)
        raise OptionError(
            f'layout is {options.layout!r}; expected {expected} with format "{options.format}"'
        )


def _misfit(info: TensorInfo, rules: Rules, options: QuantizeOptions) -> str | None:
    """Says why a matrix that may become 4-bit is not a whole number of blocks."""
    size = BLOCKSIZES[options.format][0]
    if options.layout == GPT_OSS.name:
        return "no expert"
    if is_transposed(info.name, rules.types):
        return "Conv1D"
    return f"columns not a multiple of {size}" if info.shape[1] % size else None


def _amax(checkpoint: Checkpoint, names: Collection[str]) -> Mapping[str, Amax]:
    """Returns the largest magnitude that each weight shares with those that it is fused with."""
    found: dict[str, Amax] = {}
    for name in names:
        group = fused_with(name, names)
        found[name] = found.get(group[0]) or _Largest(checkpoint, group)
        found.setdefault(group[0], found[name])
    return found


def _plan(info: TensorInfo, options: QuantizeOptions, amax: Amax | None) -> E2m1Plan:
    layout, size = WRITTEN[options.layout][options.format], BLOCKSIZES[options.format][0]
    return E2m1Plan(info.name, layout, info.shape, size, amax)


def _check_stacks(stacks: Sequence[Stack], chosen: Sequence[Stack]) -> None:
    """Requires all experts, in whole blocks, as gpt-oss has them."""
    size = BLOCKSIZES[MXFP4][0]
    for stack in stacks:
        if stack not in chosen:
            raise OptionError(
                f"skip and only leave {stack.name} dense; expected all experts with layout "
                f'"{GPT_OSS.name}"'
            )
        if stack.shape[-1] % size:
            raise OptionError(
                f"{stack.name} has {stack.shape[-1]} columns; expected a multiple of {size}"
            )


WRITER = Writer(
    layouts={
        format: [name for name, known in WRITTEN.items() if format in known]
        for format in BLOCKSIZES
    },
    options=("layout",),
    check=_check,
    misfit=_misfit,
    plan=_plan,
    config=e2m1_config,
    amax=_amax,
    experts=(GPT_OSS.name,),
    check_stacks=_check_stacks,
    plan_of_stack=lambda stack: E2m1Plan(stack.name, GPT_OSS, stack.shape, BLOCKSIZES[MXFP4][0]),
)
