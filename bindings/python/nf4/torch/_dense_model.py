"""Chooses the layers of a dense transformers model that become 4-bit, as `nf4 quantize` would for
the files that the model would be saved as. Imports transformers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from nf4.checkpoint.architecture import Model
from nf4.checkpoint.dtypes import BITS, FLOATS
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.meta_model import LoadPlan
from nf4.checkpoint.quantize_plan import (
    QuantizeOptions,
    chosen_stacks,
    config_of,
    dense_reasons,
    group_size_problem,
    plan_of,
    plan_of_stack,
)
from nf4.checkpoint.rules import Rules, is_matrix, model_types
from nf4.checkpoint.stacks import Stack

_FILE_DTYPES = {getattr(torch, name): file for _, name, file in FLOATS}


class Choice(NamedTuple):
    """modules: the names of the layers that become 4-bit. stacks: the experts. config: the
    quantization_config."""

    modules: list[str]
    stacks: list[Stack]
    config: dict[str, Any]


def _dtype(tensor: Tensor) -> str:
    """Returns the dtype's name in a safetensors file, or torch's name for dtypes that stay
    dense."""
    return _FILE_DTYPES.get(tensor.dtype, str(tensor.dtype))


def _info(name: str, tensor: Tensor) -> TensorInfo:
    dtype = _dtype(tensor)
    nbytes = tensor.numel() * BITS.get(dtype, 0) // 8
    return TensorInfo(name, dtype, tuple(tensor.shape), 0, nbytes)


def _stored(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    """Returns the tensors that save_pretrained would write, without their memory."""
    on_meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    written = revert_weight_conversion(model, on_meta)
    return {name: _info(name, tensor) for name, tensor in written.items()}


def _shared(state: Mapping[str, Tensor]) -> set[str]:
    """Returns the names of tensors that also have another name."""
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return {name for group in names.values() if len(group) > 1 for name in group}


def choose(model: PreTrainedModel, options: QuantizeOptions) -> Choice:
    """Returns the choice. Raises OptionError for a pattern that names no tensor."""
    state = model.state_dict(keep_vars=True)
    dense, shared = _stored(model, state), _shared(state)
    plan = LoadPlan(model)
    matrices = {name: info.shape for name, info in dense.items() if is_matrix(info)}
    others = {name: info.shape for name, info in dense.items() if len(info.shape) != 2}
    answer = plan.answer(matrices, others)
    architecture = type(model).__name__
    config = {**model.config.to_dict(), "architectures": [architecture]}
    found = Model.from_answer(architecture, answer)
    shapes = {name: info.shape for name, info in dense.items()}
    rules = Rules(model_types(config), options.skip, options.only, found, shapes)
    reasons = dense_reasons(dense, rules, options)
    # Weights may be tied without transformers knowing it.
    own = {
        name: reason
        for name, reason in reasons.items()
        if f"{found.modules.get(name)}.weight" not in shared
    }
    problem = group_size_problem(dense, own, options)
    if problem is not None:
        warnings.warn(problem, stacklevel=4)  # the caller of quantize_model
    chosen = [name for name, reason in own.items() if reason is None]
    stacks = chosen_stacks([*found.stacks.values()], options) if options.takes_stacks else []
    plans = [plan_of(dense[name], rules, options) for name in chosen]
    plans += [plan_of_stack(each, _dtype(state[each.parameter]), options) for each in stacks]
    quantized = {*chosen} | {n for n in dense if plan.target(n)[0] in {s.parameter for s in stacks}}
    left = [info for name, info in dense.items() if name not in quantized]
    if not plans:
        return Choice([], [], {})
    # The weights determine the dtype, because config.json gives that of the original files.
    named = {"architectures": [architecture]}
    config = config_of(plans, left, rules, options, named)
    return Choice([found.modules[name] for name in chosen], stacks, config)
