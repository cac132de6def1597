"""What a kind of weights says of its writing, and what a plan is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from nf4.checkpoint.header import TensorInfo, TensorSpec
from nf4.checkpoint.rules import Rules
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.stacks import Stack

if TYPE_CHECKING:
    from nf4.checkpoint.quantize_plan import QuantizeOptions

# Returns the largest magnitude of the weights that share a scale.
Amax: TypeAlias = Callable[[], float]


class WeightPlan(Protocol):
    """A 4-bit weight to be written. name: the dense weight's. specs: its tensors. quantize rounds
    a dense weight to nearest. parts: the data of `specs`, by name."""

    @property
    def name(self) -> str: ...
    def specs(self) -> Sequence[TensorSpec]: ...
    def quantize(self, array: np.ndarray, threads: int) -> Any: ...
    def parts(self, weight: Any) -> Mapping[str, np.ndarray | bytes]: ...


class Writer(NamedTuple):
    """How dense weights become weights of a kind with a quantization_config of its own.

    layouts  the layouts of each format
    options  the fields of QuantizeOptions that the formats have
    check    raises OptionError for options that are not the formats'
    misfit   says why a matrix that may become 4-bit stays dense
    plan     plans a weight for a dense tensor
    config   returns the quantization_config for plans, tensors that stay dense, and architectures
    problem  says how many matrices stay dense because of the options, from dense_reasons
    amax     returns what plan takes last for each dense weight
    experts  the layouts of stacks of experts alone
    check_stacks   raises OptionError if not all stacks, or one, can become 4-bit
    plan_of_stack  plans a weight for a stack
    """

    layouts: Mapping[str, Sequence[str]]
    options: tuple[str, ...]
    check: Callable[[QuantizeOptions], None]
    misfit: Callable[[TensorInfo, Rules, QuantizeOptions], str | None]
    plan: Callable[[TensorInfo, QuantizeOptions, Amax | None], WeightPlan]
    config: Callable[[Sequence[Any], Iterable[TensorInfo], Iterable[str]], dict[str, Any]]
    problem: Callable[..., str | None] = lambda dense, reasons, options: None
    amax: Callable[[Checkpoint, Collection[str]], Mapping[str, Amax]] = lambda checkpoint, names: {}
    experts: tuple[str, ...] = ()
    check_stacks: Callable[[Sequence[Stack], Sequence[Stack]], None] | None = None
    plan_of_stack: Callable[[Stack], WeightPlan] | None = None
