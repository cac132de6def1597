"""load_checkpoint: reads each rank's part of a checkpoint into a model that is sharded already."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nf4 import _torch
from nf4.checkpoint import Checkpoint, FormatError, Survey, survey
from nf4.checkpoint.fp8 import Fp8Weight
from nf4.checkpoint.kinds import require_loadable
from nf4.checkpoint.weights import Weight
from nf4.errors import InvalidArgument, kind_of
from nf4.torch._checks import DTYPES
from nf4.torch.distributed import _adapters, _reading
from nf4.torch.distributed._agreement import agreed, gathered
from nf4.torch.distributed._filling import fill_layer, tensor_of
from nf4.torch.distributed._names import Names
from nf4.torch.modules.base import QuantizedModule, torch_device


def load_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | int | None = None,
) -> None:
    """Fills a model from a checkpoint. Each rank reads only its own bytes of tensors that are
    sharded (by fully_shard or parallelize_module), so that no rank holds the whole model. Every
    rank must call this, because they wait for each other.

    model   a model that empty_model made and fully_shard sharded, for example, or one that has
            memory. 4-bit layers must have the checkpoint's format and blocksize. PEFT's LoRA
            adapters on meta get the values that PEFT begins with; others keep theirs
    path    a directory with safetensors files of bitsandbytes, GPTQ, AWQ, compressed-tensors,
            ModelOpt or gpt-oss, or dense ones; a file; or an index
    device  where tensors on meta get memory; by default the CPU. Other tensors stay where they are

    Raises on every rank, even if only one rank finds the fault. nf4.checkpoint.FormatError: the
    checkpoint breaks the format, contradicts the model or is incomplete, or ranks read different
    checkpoints. InvalidArgument: an argument is wrong, or a tensor on meta is in no checkpoint,
    such as a buffer that is not persistent, or an adapter whose first values depend on the weight.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is {kind_of(model)}; expected a torch.nn.Module")
    moved_to = torch_device(device) or torch.device("cpu")
    fault = functools.partial(FormatError, path)
    with contextlib.ExitStack() as stack:
        opened = agreed(functools.partial(_open, path, stack), fault, "the checkpoint")
        seed = gathered(_seed())[0][1]
        fill = functools.partial(_fill, model, opened, moved_to, seed)
        agreed(fill, fault, "the checkpoint")


def load_alone(model: nn.Module, path: str | os.PathLike[str], device: torch.device | None) -> None:
    """Like load_checkpoint, for one process that waits for no other."""
    with contextlib.ExitStack() as stack:
        opened, _ = _open(path, stack)
        _fill(model, opened, device or torch.device("cpu"), _seed())


def _seed() -> int:
    """Draws a seed for adapters, and leaves torch's generator where it was."""
    with torch.random.fork_rng(devices=[]):
        return int(torch.randint(2**62, ()))


class _Opened(NamedTuple):
    checkpoint: Checkpoint
    found: Survey

    def summary(self) -> str:
        """Returns the tensors' dtypes and shapes in words, with a digest."""
        infos = sorted((i.name, i.dtype, i.shape) for _, i in self.checkpoint.tensors())
        digest = hashlib.sha256(repr(infos).encode()).hexdigest()[:8]
        kinds = sorted({_kind(weight) for weight in self.found.weights.values()})
        named = f" in {', '.join(kinds)}" if kinds else ""
        return f"{len(infos)} tensors ({digest}), {len(self.found.weights)} of them 4-bit{named}"


def _kind(weight: Weight) -> str:
    size = weight.describe().get("blocksize") or weight.describe().get("group_size")
    return f"{weight.format} of {size}"


def _open(path: str | os.PathLike[str], stack: contextlib.ExitStack) -> tuple[_Opened, str]:
    """Opens the checkpoint on every rank. stack: closes it, also if another rank fails."""
    checkpoint = stack.enter_context(Checkpoint(path))
    found = survey(checkpoint)
    require_loadable(checkpoint, found)
    opened = _Opened(checkpoint, found)
    return opened, opened.summary()


def _fill(model: nn.Module, opened: _Opened, device: torch.device, seed: int) -> tuple[None, str]:
    checkpoint, found = opened
    names, adapters = Names.of(model, checkpoint, found.weights), _adapters.untrained(model)
    weights = {n: each for n, each in found.weights.items() if not names.is_ignored(n)}
    weights = dict(names.joined(weights))
    found = dataclasses.replace(found, weights=weights)
    _require_sources(model, names, _Opened(checkpoint, found), adapters)
    _give_memory(model, device)
    _adapters.begin(adapters, seed)
    for name, weight in found.weights.items():
        fill_layer(names.layer(name, weight.path), weight, checkpoint)
    for name, info in found.dense.items():
        own, begin = names.tensor(name), names.begins.get(name)
        if own is not None and begin is not None:
            _reading.fill_box(own, begin, checkpoint.owner[name], info)
        elif own is not None:
            _reading.fill(own, checkpoint.owner[name], info, rows=names.rows(name))
    for in_fp8 in found.fp8.values():
        _fill_fp8(names, in_fp8, checkpoint)
    checkpoint.check_unchanged()
    return None, ""


def _fill_fp8(names: Names, weight: Fp8Weight, checkpoint: Checkpoint) -> None:
    """Dequantizes a weight in FP8 into a dense tensor of the model."""
    own = names.tensor(weight.name)
    if own is None:
        if names.is_ignored(weight.name):
            return
        raise FormatError(weight.path, "the model has no place for it", weight.name)
    owner: Any = names.tensors[names.target(weight.name)][0]
    owner.was_in_fp8 = True
    dtype = _torch.dtype_name(own.dtype) if own.dtype in DTYPES else "fp32"
    dense = tensor_of(weight.dense(checkpoint, dtype))
    _reading.put(own, names.begins.get(weight.name), dense, weight.path, weight.name)


def _require_sources(
    model: nn.Module, names: Names, opened: _Opened, adapters: list[_adapters.Untrained]
) -> None:
    """Requires that every tensor will get a value, before anything gets memory."""
    checkpoint, found = opened
    begun = {id(parameter) for each in adapters for _, _, parameter in each.tensors()}
    filled = {id(names.tensor(name)) for name in (*found.dense, *found.fp8)}
    filled |= {id(names.layer(name, weight.path)) for name, weight in found.weights.items()}
    _require_untied(names, found)
    for name, own, source in _tensors(model):
        if isinstance(source, str):
            if own.is_meta and id(own) not in begun:
                raise InvalidArgument(
                    f"{name} is on meta, and {source} is in no checkpoint; expected a tensor with "
                    f"values"
                )
        elif id(source) not in filled:
            what = f"{name} in 4 bits" if isinstance(source, QuantizedModule) else name
            reason = f"the model needs {what}, and the checkpoint does not have it"
            raise FormatError(checkpoint.path, reason)


def _require_untied(names: Names, found: Survey) -> None:
    """Refuses a weight in FP8 that the model ties to another tensor, which it would overwrite.
    Weights that transformers puts into one stack are not tied."""
    filled = {id(own): name for name in found.dense if (own := names.tensor(name)) is not None}
    for name, weight in found.fp8.items():
        own = names.tensor(name)
        if own is None or name in names.begins:
            continue
        other = filled.setdefault(id(own), name)
        if other != name:
            raise FormatError(weight.path, f"the model ties it to {other}", name)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, object]]:
    """Yields parameters and buffers with their names and the source of their values: the layer of a
    4-bit weight, the tensor itself, or another source in words."""
    adapters: tuple[str, ...] = ()
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        # PEFT's layers: the attributes of an adapter.
        names = (
            getattr(module, "adapter_layer_names", ()),
            getattr(module, "other_param_names", ()),
        )
        adapters += tuple(f"{prefix}{name}." for name in itertools.chain(*names))
        for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
            if tensor is None:
                continue
            source: object = tensor
            if f"{prefix}{name}.".startswith(adapters):
                source = "an adapter"
            elif isinstance(module, QuantizedModule) and name != "bias":
                source = module
            elif name in module._non_persistent_buffers_set:
                source = "a buffer that is not persistent"
            yield f"{prefix}{name}", tensor, source


def _give_memory(model: nn.Module, device: torch.device) -> None:
    """Allocates tensors on meta. A parameter in several places stays one."""
    first: dict[int, nn.Parameter | None] = {}
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    model._apply(lambda each: torch.empty_like(each, device=device) if each.is_meta else each)
    for module, name, before in places:
        module._parameters[name] = first.setdefault(id(before), module._parameters[name])
