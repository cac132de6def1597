"""Plans the quantization of a model's dense tensors, in a file or in memory: which stay dense, the
tensors of those that become 4-bit, and the quantization_config."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nf4.checkpoint.bnb import NESTED_BLOCKSIZE, Plan, State
from nf4.checkpoint.dtypes import FILE_TO_NF4
from nf4.checkpoint.e2m1_layouts import BLOCKSIZES, GPT_OSS, MXFP4, NVFP4, WRITTEN
from nf4.checkpoint.e2m1_plan import E2m1Plan, e2m1_config
from nf4.checkpoint.errors import OptionError
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.int4_layouts import LAYOUTS
from nf4.checkpoint.int4_plan import Int4Plan, integer_config
from nf4.checkpoint.model_files import compute_dtype, quantization_config
from nf4.checkpoint.rules import (
    Rules,
    architectures,
    is_transposed,
    matches,
    module_of,
    transposed_if_conv1d,
)
from nf4.checkpoint.stacks import Stack
from nf4.checkpoint.weights import Weight

# The options that only some formats have.
_FORMATS_OF = {
    **dict.fromkeys(("blocksize", "nested", "storage"), ("nf4", "fp4")),
    **dict.fromkeys(("group_size", "symmetric"), ("int4",)),
    "layout": ("int4", MXFP4, NVFP4),
}
# The formats whose layouts have room for no other kind of 4-bit weights.
OWN_CONFIG = ("int4", MXFP4, NVFP4)


@dataclasses.dataclass(frozen=True)
class QuantizeOptions:
    """How to quantize a checkpoint.

    format           "nf4", "fp4", "int4", "mxfp4" or "nvfp4"
    blocksize        weights for each scale: a power of two, 32..4096
    nested           double quantization: 8-bit scales
    storage          torch's name of the dtype as which packed bytes are viewed
    skip             patterns of modules to leave dense besides the default ones
    only             patterns of the modules to quantize; empty: the default rules
    compute          torch's name of the dtype to compute in; None: the model's own
    allow_nonfinite  accept NaN (stored as 0) and Inf (as the largest of its block)
    threads          CPU threads; 0: all

    Only for nf4 and fp4: blocksize, nested, storage, compute, and

    experts          quantize stacks of experts too. transformers loads these if nf4.torch is
                     imported

    Only for int4, and layout for mxfp4 and nvfp4 too:

    layout           "compressed-tensors", for int4 also "gptq", "gptq_v2" or "awq", for nvfp4
                     "modelopt", for mxfp4 "gpt-oss", which has the experts of gpt-oss alone
    group_size       columns for each scale: a multiple of 8; -1: the whole row
    symmetric        all zero points are 8; else each group has one
    """

    format: str = "nf4"
    blocksize: int = 64
    nested: bool = True
    storage: str = "uint8"
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    compute: str | None = None
    allow_nonfinite: bool = False
    threads: int = 0
    layout: str = "compressed-tensors"
    group_size: int = 128
    symmetric: bool = True
    experts: bool = False

    @property
    def takes_stacks(self) -> bool:
        """Whether stacks of experts become 4-bit."""
        return self.experts or self.layout == GPT_OSS.name

    def __post_init__(self) -> None:
        self._check_uses()
        if self.format in OWN_CONFIG and self.experts:
            raise OptionError(f'experts is True; expected False with format "{self.format}"')
        if self.format == "int4":
            self._check_integers()
        elif self.format in OWN_CONFIG:
            self._check_floats()
        for name in ("skip", "only"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise OptionError(f"{name} is {value!r}; expected a tuple of patterns")

    def _check_uses(self) -> None:
        """Raises OptionError for an option of another format, which would be ignored."""
        for field in dataclasses.fields(self):
            value, formats = getattr(self, field.name), _FORMATS_OF.get(field.name, ())
            if formats and self.format not in formats and value != field.default:
                expected = " or ".join(f'"{each}"' for each in formats)
                raise OptionError(
                    f'{field.name} is {value!r}, but format "{self.format}" has none; expected '
                    f"format {expected}"
                )

    def _check_floats(self) -> None:
        layouts = [name for name, known in WRITTEN.items() if self.format in known]
        if self.layout not in layouts:
            expected = " or ".join(layouts)
            raise OptionError(
                f'layout is {self.layout!r}; expected {expected} with format "{self.format}"'
            )

    def _check_integers(self) -> None:
        if self.layout not in LAYOUTS:
            raise OptionError(f"layout is {self.layout!r}; expected {', '.join(LAYOUTS)}")
        if self.group_size != -1 and (self.group_size <= 0 or self.group_size % 8):
            raise OptionError(f"group_size is {self.group_size}; expected a multiple of 8, or -1")


def dense_reasons(
    dense: Mapping[str, TensorInfo],
    rules: Rules,
    options: QuantizeOptions,
) -> dict[str, str | None]:
    """Returns why each dense tensor stays dense; None if it becomes 4-bit. Raises OptionError for a
    pattern that names none of them."""
    known: tuple[Stack, ...] = ()
    if options.takes_stacks and rules.model is not None:
        known = tuple(rules.model.stacks.values())
    stacks = [name for stack in known for name in (stack.name, stack.parameter)]
    unknown = rules.unmatched([*map(module_of, dense), *stacks])
    if unknown:
        patterns = ", ".join(map(repr, unknown))
        raise OptionError(
            f"skip or only: no module matches {patterns}; expected whole parts of a module's name, "
            f"such as lm_head, or a glob over the whole name"
        )
    reasons = {name: rules.dense_reason(info) for name, info in dense.items()}
    if options.format not in OWN_CONFIG:
        return reasons
    misfit = _integer_reason if options.format == "int4" else _float_reason
    return {name: reason or misfit(dense[name], rules, options) for name, reason in reasons.items()}


def _float_reason(info: TensorInfo, rules: Rules, options: QuantizeOptions) -> str | None:
    """Says why a matrix that may become 4-bit is not a whole number of blocks."""
    size = BLOCKSIZES[options.format][0]
    if options.layout == GPT_OSS.name:
        return "no expert"
    if is_transposed(info.name, rules.types):
        return "Conv1D"
    return f"columns not a multiple of {size}" if info.shape[1] % size else None


def _integer_reason(info: TensorInfo, rules: Rules, options: QuantizeOptions) -> str | None:
    """Says why this layout cannot hold a matrix that may become 4-bit."""
    rows, cols = info.shape
    if is_transposed(info.name, rules.types):
        return "Conv1D"
    if options.group_size != -1 and cols % options.group_size:
        return _ungrouped(options)
    return LAYOUTS[options.layout].misfit((rows, cols))


def _ungrouped(options: QuantizeOptions) -> str:
    return f"columns not a multiple of the group size {options.group_size}"


def group_size_problem(
    dense: Mapping[str, TensorInfo], reasons: Mapping[str, str | None], options: QuantizeOptions
) -> str | None:
    """Says how many matrices stay dense because of the group size alone, and with which group size
    none would; None if there are none. reasons: from dense_reasons."""
    if options.format != "int4":
        return None
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


def stacks_of(
    dense: Mapping[str, TensorInfo], rules: Rules, options: QuantizeOptions, why: str
) -> tuple[list[Stack], list[str]]:
    """Returns the stacks of experts that become 4-bit, and warnings of those that cannot. Raises
    OptionError if the stacks are unknown or cannot be quantized. why: the second result of
    choose_rules."""
    if not options.takes_stacks:
        return [], []
    if rules.model is None:
        raise OptionError(f"experts are quantized by a model of transformers, not by {why}")
    stacks, already = list(rules.model.stacks.values()), {*rules.model.stack_of.values()}
    # The stacks of one module are computed together.
    reasons: dict[str, str | None] = {}
    for stack in stacks:
        reasons[stack.module] = reasons.get(stack.module) or stack.dense_reason(dense)
    chosen = chosen_stacks(stacks, options)
    left: dict[str, list[str]] = {}
    for stack in chosen:
        reason = reasons[stack.module]
        if reason is not None and stack.parameter not in already:
            left.setdefault(reason, []).append(stack.name)
    warnings = [
        f"{len(names)} stacks of experts stay dense, the first {names[0]}: {reason}"
        for reason, names in left.items()
    ]
    return [stack for stack in chosen if reasons[stack.module] is None], warnings


def chosen_stacks(stacks: Sequence[Stack], options: QuantizeOptions) -> list[Stack]:
    """Chooses stacks by the patterns of modules. Raises OptionError if there are none, if only one
    of two that are computed together is chosen, or if experts do not begin with a block."""
    if not stacks:
        asked = "experts is True" if options.experts else f"layout is {options.layout!r}"
        expected = "False" if options.experts else "another"
        raise OptionError(
            f"{asked}, but the model has no experts whose products transformers lets other "
            f"libraries compute; expected {expected}"
        )

    def named(patterns: Sequence[str], stack: Stack) -> bool:
        names = (stack.name, stack.parameter)
        return any(matches(pattern, name) for pattern in patterns for name in names)

    chosen = [
        stack
        for stack in stacks
        if not named(options.skip, stack) and (not options.only or named(options.only, stack))
    ]
    modules = {stack.module for stack in chosen}
    for stack in stacks:
        if stack.module in modules and stack not in chosen:
            raise OptionError(
                f"skip and only leave {stack.name} dense beside a stack of {stack.module} that "
                f"becomes 4-bit; expected both or neither"
            )
    if options.layout == GPT_OSS.name:
        _require_blocks_of_all(stacks, chosen)
        return chosen
    for stack in chosen:
        experts, rows, cols = stack.shape
        if experts > 1 and rows * cols % options.blocksize:
            raise OptionError(
                f"{stack.name}: an expert has {rows * cols} elements; expected a multiple of the "
                f"blocksize, {options.blocksize}, so that each begins with a block"
            )
    return chosen


def _require_blocks_of_all(stacks: Sequence[Stack], chosen: Sequence[Stack]) -> None:
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


def plan_of_stack(stack: Stack, dtype: str, options: QuantizeOptions) -> Plan | E2m1Plan:
    """Plans the tensors of a stack. dtype: the dense tensors' dtype in a file. Raises OptionError
    if that is not a dtype of weights."""
    if dtype not in FILE_TO_NF4:
        expected = ", ".join(FILE_TO_NF4)
        raise OptionError(f"{stack.parameter}: dtype {dtype}; expected one of {expected}")
    if options.layout == GPT_OSS.name:
        return E2m1Plan(stack.name, GPT_OSS, stack.shape, BLOCKSIZES[MXFP4][0])
    state = State(
        format=options.format,
        blocksize=options.blocksize,
        dtype=FILE_TO_NF4[dtype],
        shape=stack.shape,
        nested_blocksize=NESTED_BLOCKSIZE if options.nested else 0,
    )
    return _storable(Plan(stack.weight_name, state, options.storage))


def _storable(plan: Plan) -> Plan:
    problem = plan.storage_problem()
    if problem:
        raise OptionError(f"{plan.name}: {problem}")
    return plan


def plan_of(info: TensorInfo, rules: Rules, options: QuantizeOptions) -> Plan | Int4Plan | E2m1Plan:
    """Plans the tensors for a dense tensor that becomes 4-bit."""
    if options.format in BLOCKSIZES:
        layout, size = WRITTEN[options.layout][options.format], BLOCKSIZES[options.format][0]
        return E2m1Plan(info.name, layout, info.shape, size)
    plan = _integer_plan if options.format == "int4" else _bnb_plan
    return plan(info, rules, options)


def _integer_plan(info: TensorInfo, _rules: Rules, options: QuantizeOptions) -> Int4Plan:
    # The layouts do not support float32 scales.
    scales = "F16" if info.dtype == "F32" else info.dtype
    rows, cols = info.shape
    layout, size = LAYOUTS[options.layout], options.group_size
    return Int4Plan(info.name, layout, (rows, cols), size, scales, options.symmetric)


def _bnb_plan(info: TensorInfo, rules: Rules, options: QuantizeOptions) -> Plan:
    state = State(
        format=options.format,
        blocksize=options.blocksize,
        dtype=FILE_TO_NF4[info.dtype],
        shape=transposed_if_conv1d(info.name, info.shape, rules.types),
        nested_blocksize=NESTED_BLOCKSIZE if options.nested else 0,
    )
    return _storable(Plan(info.name, state, options.storage))


def config_of(
    plans: Sequence[Plan | Int4Plan | E2m1Plan],
    dense: Iterable[TensorInfo],
    rules: Rules,
    options: QuantizeOptions,
    config: Mapping[str, Any],
    quantized: Mapping[str, Weight] | None = None,
) -> dict[str, Any]:
    """Returns the quantization_config for these weights. dense: the tensors that stay dense.
    config: the model's. quantized: the weights that were 4-bit before."""
    before = quantized or {}
    if options.format in BLOCKSIZES:
        floats = [plan for plan in plans if isinstance(plan, E2m1Plan)]
        return e2m1_config(floats, dense, architectures(config))
    if options.format == "int4":
        integers = [plan for plan in plans if isinstance(plan, Int4Plan)]
        return integer_config(integers, dense, architectures(config))
    names = [*(plan.name for plan in plans), *before]
    states = [plan.state for plan in plans if isinstance(plan, Plan)]
    dtypes = [state.dtype for state in states]
    shapes = [*(state.shape for state in states), *(each.shape for each in before.values())]
    return quantization_config(
        format=states[0].format if states else options.format,
        nested=options.nested,
        compute=options.compute or compute_dtype(config, dtypes),
        storage=options.storage,
        skip_modules=rules.skip_modules(dense, names, architectures(config)),
        # bitsandbytes has neither stacks of experts nor scales of 8 bits without a table.
        experts=any(len(shape) == 3 for shape in shapes)
        or any(state.scale_bytes for state in states),
    )
