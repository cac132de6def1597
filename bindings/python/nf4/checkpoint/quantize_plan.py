"""Plans the quantization of a model's dense tensors, in a file or in memory: which stay dense, the
tensors of those that become 4-bit, and the quantization_config."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nf4.checkpoint.bnb import NESTED_BLOCKSIZE, Plan, State
from nf4.checkpoint.dtypes import FILE_TO_NF4
from nf4.checkpoint.errors import OptionError
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.kinds import WRITERS
from nf4.checkpoint.model_files import compute_dtype, quantization_config
from nf4.checkpoint.plans import Amax, WeightPlan, Writer
from nf4.checkpoint.rules import Rules, architectures, matches, module_of, transposed_if_conv1d
from nf4.checkpoint.stacks import Stack
from nf4.checkpoint.weights import Weight

_OF_BITSANDBYTES = ("blocksize", "nested", "storage", "compute", "experts")
# Options that other formats ignore, or refuse with another message.
_NOT_CHECKED = ("compute", "experts")


@dataclasses.dataclass(frozen=True)
class QuantizeOptions:
    """How to quantize a checkpoint.

    format           "nf4", "fp4", "int4", "mxfp4" or "nvfp4"
    blocksize        weights for each scale: a power of two, 32..4096; None: 64
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
    blocksize: int | None = None
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
    def writer(self) -> Writer | None:
        """How weights become the format's; None: as bitsandbytes has them."""
        return WRITERS.get(self.format)

    @property
    def options(self) -> tuple[str, ...]:
        """The options that only some formats have, and this one has."""
        return _OF_BITSANDBYTES if self.writer is None else self.writer.options

    @property
    def takes_stacks(self) -> bool:
        """Whether stacks of experts become 4-bit."""
        return self.experts or (self.writer is not None and self.layout in self.writer.experts)

    def __post_init__(self) -> None:
        self._check_uses()
        if self.writer is None and self.blocksize is None:
            object.__setattr__(self, "blocksize", 64)
        if self.writer is not None:
            if self.experts:
                raise OptionError(f'experts is True; expected False with format "{self.format}"')
            self.writer.check(self)
        for name in ("skip", "only"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise OptionError(f"{name} is {value!r}; expected a tuple of patterns")

    def _check_uses(self) -> None:
        """Raises OptionError for an option of another format, which would be ignored."""
        for field in dataclasses.fields(self):
            formats = () if field.name in _NOT_CHECKED else formats_with(field.name)
            value, is_own = getattr(self, field.name), not formats or self.format in formats
            if not is_own and value != field.default:
                expected = " or ".join(f'"{each}"' for each in formats)
                raise OptionError(
                    f'{field.name} is {value!r}, but format "{self.format}" has none; expected '
                    f"format {expected}"
                )


def formats_with(option: str) -> tuple[str, ...]:
    """Returns the formats that have an option; none if all have it."""
    if option in _OF_BITSANDBYTES:
        return ("nf4", "fp4")
    return tuple(format for format, writer in WRITERS.items() if option in writer.options)


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
    if options.writer is None:
        return reasons
    misfit = options.writer.misfit
    return {name: reason or misfit(dense[name], rules, options) for name, reason in reasons.items()}


def group_size_problem(
    dense: Mapping[str, TensorInfo], reasons: Mapping[str, str | None], options: QuantizeOptions
) -> str | None:
    """Says how many matrices stay dense because of the options, and which would leave none; None if
    there are none. reasons: from dense_reasons."""
    return options.writer and options.writer.problem(dense, reasons, options)


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
    if options.writer is not None and options.writer.check_stacks is not None:
        options.writer.check_stacks(stacks, chosen)
        return chosen
    for stack in chosen:
        experts, rows, cols = stack.shape
        if experts > 1 and rows * cols % options.blocksize:
            raise OptionError(
                f"{stack.name}: an expert has {rows * cols} elements; expected a multiple of the "
                f"blocksize, {options.blocksize}, so that each begins with a block"
            )
    return chosen


def plan_of_stack(stack: Stack, dtype: str, options: QuantizeOptions) -> WeightPlan:
    """Plans the tensors of a stack. dtype: the dense tensors' dtype in a file. Raises OptionError
    if that is not a dtype of weights."""
    if dtype not in FILE_TO_NF4:
        expected = ", ".join(FILE_TO_NF4)
        raise OptionError(f"{stack.parameter}: dtype {dtype}; expected one of {expected}")
    if options.writer is not None and options.writer.plan_of_stack is not None:
        return options.writer.plan_of_stack(stack)
    return _bnb_plan(stack.weight_name, FILE_TO_NF4[dtype], stack.shape, options)


def plan_of(
    info: TensorInfo, rules: Rules, options: QuantizeOptions, amax: Amax | None = None
) -> WeightPlan:
    """Plans the tensors for a dense tensor that becomes 4-bit. amax: from Writer.amax."""
    if options.writer is not None:
        return options.writer.plan(info, options, amax)
    shape = transposed_if_conv1d(info.name, info.shape, rules.types)
    return _bnb_plan(info.name, FILE_TO_NF4[info.dtype], shape, options)


def _bnb_plan(name: str, dtype: str, shape: tuple[int, ...], options: QuantizeOptions) -> Plan:
    nested_blocksize = NESTED_BLOCKSIZE if options.nested else 0
    state = State(options.format, options.blocksize, dtype, shape, nested_blocksize)
    plan = Plan(name, state, options.storage)
    if problem := plan.storage_problem():
        raise OptionError(f"{name}: {problem}")
    return plan


def config_of(
    plans: Sequence[WeightPlan],
    dense: Iterable[TensorInfo],
    rules: Rules,
    options: QuantizeOptions,
    config: Mapping[str, Any],
    quantized: Mapping[str, Weight] | None = None,
) -> dict[str, Any]:
    """Returns the quantization_config for these weights. dense: the tensors that stay dense.
    config: the model's. quantized: the weights that were 4-bit before."""
    before = quantized or {}
    if options.writer is not None:
        return options.writer.config(plans, dense, architectures(config))
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
