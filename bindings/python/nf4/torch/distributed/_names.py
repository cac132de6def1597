"""Finds the module or tensor of a model that a checkpoint's tensor belongs to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from nf4.checkpoint import Checkpoint, FormatError
from nf4.checkpoint.bnb import STATE_MARK
from nf4.checkpoint.quantization import config_path
from nf4.checkpoint.stacks import joined
from nf4.checkpoint.weights import Weight
from nf4.torch._model_source import class_and_config
from nf4.torch.distributed._cuts import Ranges
from nf4.torch.modules.base import QuantizedModule

if TYPE_CHECKING:
    from nf4.checkpoint.meta_model import LoadPlan

# Parts that wrappers add to the names of modules, but not always to the names in a state_dict:
# activation checkpointing, torch.compile, FSDP1.
_NOT_IN_STATES = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
_WRAPPERS = (*_NOT_IN_STATES, "base_layer", "original_module")  # the last two are of PEFT
_OF_PEFT = "base_model.model."


def _plain(name: str) -> str:
    """Returns a name as it was before anything was wrapped."""
    return ".".join(p for p in name.removeprefix(_OF_PEFT).split(".") if p not in _WRAPPERS)


def in_state_dict(name: str) -> str:
    """Returns a name of the model or of a state_dict without the parts that only some of them
    have."""
    return ".".join(part for part in name.split(".") if part not in _NOT_IN_STATES)


class Names(NamedTuple):
    """`target` returns the model's name, without wrappers, for a checkpoint's tensor. `is_ignored`
    tells if the model's class ignores a weight. `joined` puts the stacks of the model in the place
    of the matrices of experts in 4 bits. `begins` holds where an expert's matrix begins in
    the stack into which transformers puts it."""

    target: Callable[[str], str]
    is_ignored: Callable[[str], bool]
    joined: Callable[[Mapping[str, Weight]], Mapping[str, Weight]]
    begins: dict[str, tuple[int, int, int]]
    layers: dict[str, QuantizedModule]
    tensors: dict[str, tuple[nn.Module, str]]

    @classmethod
    def of(cls, model: nn.Module, checkpoint: Checkpoint, weights: Iterable[str] = ()) -> Names:
        """weights: the names of the checkpoint's 4-bit weights."""
        layers, tensors = {}, {}
        for path, module in model.named_modules(remove_duplicate=False):
            names = {*module._parameters, *module._buffers}
            if isinstance(module, QuantizedModule):
                layers[f"{_plain(path)}.weight".lstrip(".")] = module
                names &= {"bias"}
            for name in names:
                tensors[_plain(f"{path}.{name}".lstrip("."))] = (module, name)
        names = {*_weights(checkpoint), *weights}
        return cls(*_targets({*tensors, *layers}, checkpoint, names), layers, tensors)

    def layer(self, weight: str, file: str) -> QuantizedModule:
        """Returns the layer of a 4-bit weight. Raises FormatError if the model has none."""
        found = self.layers.get(self.target(weight))
        if found is None:
            raise FormatError(file, f"the model has no {self.target(weight)} in 4 bits", weight)
        return found

    def tensor(self, name: str) -> Tensor | None:
        """Returns the model's current tensor for a dense tensor of the checkpoint."""
        module, attribute = self.tensors.get(self.target(name), (None, ""))
        return None if module is None else getattr(module, attribute)

    def rows(self, name: str) -> Ranges | None:
        """Returns the rows of a dense tensor that the model has; None: all. Only the bias of a cut
        layer has fewer."""
        module, _ = self.tensors.get(self.target(name), (None, ""))
        cut = module.cut_of if isinstance(module, QuantizedModule) else None
        return cut.ranges if cut is not None and cut.dim == 0 else None


def _targets(
    known: set[str], checkpoint: Checkpoint, names: set[str]
) -> tuple[Any, Any, Any, dict[str, tuple[int, int, int]]]:
    """Returns target, is_ignored, joined and begins of Names: the checkpoint's own names if the
    model has them, else the names under which transformers loads them. names: those of weights."""
    own = (lambda name: name), (lambda name: False), (lambda weights: weights)
    if names <= known:
        return *own, {}
    try:
        from nf4.checkpoint.meta_model import LoadPlan, build, model_class

        model_class(checkpoint.config)
    except (ImportError, LookupError, TypeError):  # no transformers model
        return *own, {}
    kind, config = class_and_config(checkpoint)
    try:
        plan = LoadPlan(build(kind, config))
    except Exception as error:  # model classes raise errors of any type
        reason = f"transformers cannot build the model: {' '.join(str(error).split())}"
        raise FormatError(config_path(checkpoint), reason) from None

    def target(name: str) -> str:
        found = plan.target(name)[0]
        stack = plan.stack_of([name]).get(name, "") if f"{found}.weight" not in known else found
        return f"{stack}.weight" if f"{stack}.weight" in known else found

    stacked = functools.partial(joined, plan)
    return target, plan.is_ignored, stacked, _begins(plan, known, checkpoint)


def _begins(
    plan: LoadPlan, known: set[str], checkpoint: Checkpoint
) -> dict[str, tuple[int, int, int]]:
    """Returns `begins` of Names. Raises FormatError if the matrices of experts do not make up a
    stack that is dense in the model."""
    begins = {}
    shapes = {info.name: info.shape for _, info in checkpoint.tensors()}
    for full, stack in plan.stacks(shapes).items():
        if stack["problem"] is not None and full in known:
            raise FormatError(checkpoint.path, stack["problem"])
        row = 0
        for group in stack["parts"]:
            for expert, name in enumerate(group):
                if len(shapes[name]) == 2:
                    begins[name] = (expert, row, 0)
            row += shapes[group[0]][0]
    return begins


def _weights(checkpoint: Checkpoint) -> Iterator[str]:
    """Yields the names of weights that are dense or in bitsandbytes' 4 bits."""
    for name in checkpoint.owner:
        if name.endswith(".weight"):
            yield name
        elif STATE_MARK in name:
            yield name.partition(STATE_MARK)[0]
