"""Determines from a model's modules which tensors of a checkpoint transformers loads as 4-bit
weights.

The model is built on torch's meta device: no weight takes memory. Needs torch and transformers, but
not bitsandbytes. architecture.py runs `main` in a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import (
    MODULES_TO_PATCH_FOR_QUANTIZATION,
    get_keys_to_not_convert,
)
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationMethod

from nf4.checkpoint.architecture import ANSWER_MARK
from nf4.checkpoint.model_config import model_config
from nf4.checkpoint.owners import read_by_owners
from nf4.checkpoint.stacks import names_of, parameter_of, parts_problem


def model_class(config: Mapping[str, Any]) -> type[transformers.PreTrainedModel]:
    """Returns transformers' own class for config.json. Raises LookupError if it has none."""
    name = config["architectures"][0]
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise LookupError(f"transformers {transformers.__version__} has no model {name}")
    model_type = getattr(found.config_class, "model_type", None)
    if model_type != config["model_type"]:
        raise LookupError(f"{name} is a {model_type}, not a {config['model_type']}")
    return found


def build(
    kind: type[transformers.PreTrainedModel], config: transformers.PretrainedConfig
) -> transformers.PreTrainedModel:
    """Builds the model on the meta device, as from_pretrained does before it loads weights."""
    config._attn_implementation = "eager"
    with contextlib.ExitStack() as stack:
        for context in kind.get_init_context(torch.float32, True, False, None):
            stack.enter_context(context)
        return kind(config)


# The names of the modules that transformers' bitsandbytes integration replaces.
_REPLACED = ("Linear", "Conv1D")


class LoadPlan:
    """How transformers maps a checkpoint's tensors to the parameters of a model whose
    config.json has bitsandbytes' 4-bit quantization_config."""

    def __init__(self, model: transformers.PreTrainedModel):
        method = SimpleNamespace(quant_method=QuantizationMethod.BITS_AND_BYTES)
        quantizer = Bnb4BitHfQuantizer(method, pre_quantized=True)
        # The loader splits fused experts only if the model is quantized; it then does not find the
        # tensors of a dense checkpoint.
        kinds = {type(module).__name__ for module in model.modules()}
        self.taken_apart = sorted(kinds & MODULES_TO_PATCH_FOR_QUANTIZATION.keys())
        kept = quantizer.get_modules_to_not_convert(model, [], model._keep_in_fp32_modules)
        self._targets: dict[str, tuple[str, str | None]] = {}
        self.base_model_prefix = model.base_model_prefix
        self._ignored = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        self._optional = list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
        self.parameters = dict(model.state_dict(keep_vars=True))
        self.modules = dict(model.named_modules())
        self._buffers = {name for name, _ in model.named_buffers()}
        # These are exactly the modules that
        # transformers.integrations.bitsandbytes.replace_with_bnb_linear replaces.
        self.linear = {
            name: module
            for name, module in self.modules.items()
            if (type(module) is torch.nn.Linear or isinstance(module, Conv1D))
            and should_convert_module(name, kept)
        }
        self.read_by_owners = read_by_owners(model) & self.linear.keys()
        defaults = get_keys_to_not_convert(model)
        self.dense_by_default = {
            name for name in self.linear if not should_convert_module(name, defaults)
        }
        tied = model.all_tied_weights_keys
        self.tied = {name.removesuffix(".weight") for pair in tied.items() for name in pair}
        conversions = get_model_conversion_mapping(model, None, quantizer)
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        (deserialize,) = quantizer.get_weight_conversions()
        self._generic = set(deserialize.source_patterns)
        parts = {source.removeprefix("weight") for source in self._generic}
        self._parts = sorted(parts - {""})

    def target(self, tensor: str) -> tuple[str, str | None]:
        """Returns the parameter that a tensor is loaded into, and the source pattern of its
        converter, as convert_and_load_state_dict_in_model finds them."""
        if tensor not in self._targets:
            self._targets[tensor] = self._find_target(tensor)
        return self._targets[tensor]

    def _find_target(self, tensor: str) -> tuple[str, str | None]:
        prefix, known = self.base_model_prefix, self.parameters
        found = rename_source_key(tensor, self._renamings, self._converters, prefix, known)
        if found[0] not in known and tensor in known:
            return rename_source_key(tensor, [], [], prefix, known)
        return found

    def is_ignored(self, weight: str) -> bool:
        """Tells if the model lacks a weight and its class says that checkpoints may have it."""
        target = self.target(weight)[0]
        return target not in self.parameters and any(
            re.search(pattern, target) for pattern in self._ignored
        )

    def unexpected(self, tensors: Iterable[str]) -> list[str]:
        """Returns the tensors of a checkpoint that the model has no place for and does not
        ignore."""
        known = self.parameters.keys() | self._buffers
        return [
            name
            for name in tensors
            if self.target(name)[0] not in known and not self.is_ignored(name)
        ]

    def missing(self, tensors: Iterable[str]) -> list[str]:
        """Returns the parameters that none of a checkpoint's tensors is loaded into."""
        found = {self.target(tensor)[0] for tensor in tensors}
        return [
            name
            for name in self.parameters
            if name not in found
            and name.removesuffix(".weight") not in self.tied
            and not any(re.search(pattern, name) for pattern in self._optional)
        ]

    def loads_parts(self, tensor: str, target: str, pattern: str | None) -> bool:
        """Tells if the tensors of a 4-bit weight would all be loaded into `target`."""
        if pattern not in self._generic:
            return False
        for part in self._parts:
            found, found_pattern = self._find_target(tensor + part)
            if found != target or found_pattern not in self._generic:
                return False
        return True

    def dense_reason(self, tensor: str, shape: Sequence[int]) -> str | None:
        """Says why transformers cannot load this weight as a 4-bit one; None if it can."""
        if self.taken_apart:
            return f"{self.taken_apart[0]} of the model does not load from a 4-bit checkpoint"
        target, pattern = self.target(tensor)
        parameter = self.parameters.get(target)
        module = target.removesuffix(".weight")
        if parameter is None:
            return "not in the model"
        if module not in self.linear:
            owner = self.modules.get(target.rpartition(".")[0])
            kind = type(owner).__name__
            return "kept dense by transformers" if kind in _REPLACED else f"{kind}, not nn.Linear"
        if module in self.tied:
            return "tied"
        if tuple(parameter.shape) != tuple(shape):
            return "another shape in the model"
        return None if self.loads_parts(tensor, target, pattern) else "merged or split on loading"

    def fits(self, tensor: str, shape: Sequence[int]) -> bool:
        """Tells if the model has a parameter of this name and shape."""
        parameter = self.parameters.get(self.target(tensor)[0])
        return parameter is not None and tuple(parameter.shape) == tuple(shape)

    def stacks(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Any]]:
        """Returns the fields of stacks.Stack for each parameter of experts, by name. shapes: those
        of the dense tensors of a checkpoint."""
        sources: dict[str, dict[str | None, list[str]]] = {}
        for tensor in shapes:
            target, pattern = self.target(tensor)
            sources.setdefault(target, {}).setdefault(pattern, []).append(tensor)
        found = {}
        for path, module in self.modules.items():
            for name in names_of(module):
                full = f"{path}.{name}".lstrip(".")
                shape = tuple(getattr(self.parameters.get(full), "shape", ()))
                if len(shape) == 3:
                    parts, problem = self._tensors_of(full, sources.get(full, {}), shapes)
                    experts, *sizes = shape
                    found[full] = {
                        "module": path,
                        "parameter": full,
                        "name": self._stored_name(full, parts),
                        "shape": (experts, *(sizes[::-1] if module.is_transposed else sizes)),
                        "transposed": bool(module.is_transposed),
                        "parts": parts,
                        "problem": problem,
                    }
        return found

    def _tensors_of(
        self,
        full: str,
        sources: Mapping[str | None, list[str]],
        shapes: Mapping[str, Sequence[int]],
    ) -> tuple[list[list[str]], str | None]:
        """Returns parts and problem of Stack. sources: the tensors of a parameter by the patterns
        of its converter."""
        shape = tuple(self.parameters[full].shape)
        tensors = [tensor for group in sources.values() for tensor in group]
        if not tensors:
            return [], f"{full} is missing"
        if len(tensors) == 1 and tuple(shapes[tensors[0]]) == shape:
            return [tensors], None
        of_these = (c for c in self._converters if not sources.keys().isdisjoint(c.source_patterns))
        converter = next(of_these, None)
        if converter is None or not _stacks_matrices(converter.operations):
            found = f"{tensors[0]} of shape {list(shapes[tensors[0]])}"
            return [], f"{full} of shape {list(shape)} is made of {found} in a way that is not read"
        others = [each for each in sources if each not in converter.source_patterns]
        if others:
            return [], f"{sources[others[0]][0]} is there, beside the matrices of experts"
        absent = [each for each in converter.source_patterns if each not in sources]
        if absent:
            return [], f"{absent[0]} is missing, of all experts"
        parts = [sorted(sources[each], key=_by_numbers) for each in converter.source_patterns]
        problem = parts_problem(parts, shapes, shape)
        return ([], problem) if problem else (parts, None)

    def _stored_name(self, full: str, parts: list[list[str]]) -> str:
        """Returns the stack's name in the checkpoint if the names of its matrices tell it, else its
        name in the model."""
        if not parts or len(parts[0]) == 1:
            return parts[0][0] if parts else full
        name, pattern = rename_source_key(parts[0][0], [], self._converters)
        return full if pattern is None or pattern in self._generic else name

    def stack_of(self, weights: Iterable[str]) -> dict[str, str]:
        """Maps the names of 4-bit stacks to the names of their parameters."""
        found = {name: self.target(parameter_of(name))[0] for name in weights}
        return {name: each for name, each in found.items() if each in self.parameters}

    def answer(
        self,
        shapes: Mapping[str, Sequence[int]],
        others: Mapping[str, Sequence[int]] | None = None,
        weights: Iterable[str] = (),
    ) -> dict[str, Any]:
        """Returns the fields of architecture.Model for the tensors of a checkpoint: the names of
        matrices and of other dense tensors -> shape, and the names of 4-bit stacks."""
        reasons = {name: self.dense_reason(name, shape) for name, shape in shapes.items()}
        others = others or {}
        return {
            "transformers": transformers.__version__,
            "fits": any(self.fits(name, shape) for name, shape in shapes.items()),
            "reasons": reasons,
            "modules": {name: self.target(name)[0].rpartition(".")[0] for name in shapes},
            "linear": sorted(self.linear),
            "conv1d": sorted(n for n, m in self.linear.items() if isinstance(m, Conv1D)),
            "dense_by_default": sorted(self.dense_by_default),
            "read_by_owners": sorted(self.read_by_owners),
            "stacks": self.stacks({**shapes, **others}),
            "missing": self.missing([*shapes, *others]),
            "unexpected": self.unexpected([*shapes, *others]),
            "stack_of": self.stack_of(weights),
        }


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """A sort key that puts expert 10 after expert 9."""
    return [(int(part) if part.isdecimal() else -1, part) for part in name.split(".")]


def _stacks_matrices(operations: Sequence[Any]) -> bool:
    """Tells if these operations stack the matrices of experts, and join the parts of each along its
    outputs."""
    kinds = [(type(each), getattr(each, "dim", None)) for each in operations]
    return kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns LoadPlan.answer to {"config": config.json, "shapes", "others", "weights"}. Raises
    LookupError, or any error of the model's constructor, if the model cannot be built."""
    kind = model_class(request["config"])
    model = build(kind, model_config(kind, request["config"]))
    return LoadPlan(model).answer(request["shapes"], request["others"], request["weights"])


def main() -> None:
    """Answers a request on stdin as JSON on stdout, in a line that begins with a mark, because
    libraries print too."""
    transformers.logging.set_verbosity_error()
    print(f"\n{ANSWER_MARK}{json.dumps(answer(json.load(sys.stdin)))}", flush=True)
