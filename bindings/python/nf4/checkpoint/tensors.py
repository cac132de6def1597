"""load and save: read and write a checkpoint as tensors by name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from nf4 import _torch
from nf4._prepared import prepare
from nf4.checkpoint.bnb import Plan, State
from nf4.checkpoint.dtypes import NF4_TO_FILE, NUMPY
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.header import TensorInfo, TensorSpec
from nf4.checkpoint.int4 import Int4State, Int4Weight
from nf4.checkpoint.int4_layouts import LAYOUTS, SYMMETRIC_ZERO
from nf4.checkpoint.int4_plan import Int4Plan
from nf4.checkpoint.kinds import require_loadable, survey
from nf4.checkpoint.model_files import write_json
from nf4.checkpoint.quantization import says_quantization
from nf4.checkpoint.quantize_plan import QuantizeOptions, config_of
from nf4.checkpoint.rules import Rules, model_types
from nf4.checkpoint.source import CONFIG_NAME, SINGLE_NAME, Checkpoint
from nf4.checkpoint.transaction import DirectoryTarget, FileTarget
from nf4.checkpoint.writer import SafetensorsWriter
from nf4.errors import InvalidArgument, kind_of, shown
from nf4.int4 import Int4Tensor
from nf4.tensor import QuantizedTensor
from nf4.typing import ArrayLike
from nf4.weight import Weight

_FILE_DTYPES = {dtype: name for name, dtype in NUMPY.items()}
# torch's dtypes that numpy itself lacks, viewed as integers of their size.
_VIEWED = {"bfloat16": "bfloat16", "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2"}


def load(path: str | os.PathLike[str]) -> dict[str, Weight[np.ndarray] | np.ndarray]:
    """Reads the tensors of a checkpoint into host memory, by name. A 4-bit weight has the name of
    the dense one ("model.layers.0.mlp.up_proj.weight") and is a QuantizedTensor or an Int4Tensor.
    All other tensors are arrays. A weight in FP8 beside 4-bit ones is dequantized.

    path  a safetensors file, a directory with config.json and safetensors files, or their index.
          The weights are dense, or of bitsandbytes (NF4, FP4), GPTQ, AWQ, AutoRound,
          compressed-tensors (4 bits), ModelOpt or gpt-oss

    Raises nf4.checkpoint.FormatError, which names the file and the tensor, if the checkpoint is not
    valid in its format, and OSError. nf4.checkpoint.Checkpoint reads tensors one by one.
    """
    with Checkpoint(path) as checkpoint:
        found = survey(checkpoint)
        require_loadable(checkpoint, found)
        tensors: dict[str, Any] = {n: w.load(checkpoint) for n, w in found.weights.items()}
        for name, info in found.dense.items():
            file = checkpoint.owner[name]
            if info.dtype not in NUMPY:
                raise FormatError(file.path, f"numpy has no {info.dtype}", name)
            tensors[name] = file.array(info)
        for name, weight in found.fp8.items():
            tensors[name] = weight.dense(checkpoint, weight.dtype)
        checkpoint.check_unchanged()
    return tensors


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Weight[Any] | ArrayLike],
    *,
    config: Mapping[str, object] | None = None,
    replace: bool = False,
) -> None:
    """Writes tensors, such as those that `load` returns, as a checkpoint. It appears whole or not
    at all.

    path     a file if it ends with ".safetensors"; otherwise a directory, which gets
             model.safetensors and config.json
    tensors  weights, arrays and tensors by name; they may be on a GPU. Weights keep their layout,
             and are either all integers or none is. An Int4Tensor's name ends with ".weight"
    config   the model's config, for config.json of a directory; a single file has none. If it has
             no quantization_config, one is added: of the integers' layout, of "bitsandbytes", or of
             "nf4" if any weight has three dimensions or is in MXFP4 or NVFP4, which bitsandbytes
             does not load
    replace  replace an existing file, or a directory that holds a checkpoint

    Raises InvalidArgument for a tensor that no checkpoint can hold, such as a weight that `reorder`
    made or one with a codebook of its own; for a tensor that would be read differently, such as
    GPTQ v2 in a file without config.json; for names that clash; and for a config that is not JSON.
    Raises nf4.checkpoint.OutputRefused if the destination cannot be replaced, and OSError.
    """
    items = _items(tensors)
    is_file = os.fspath(path).endswith(".safetensors")
    if is_file and config is not None:
        raise InvalidArgument("config is given, but a file has none; expected a directory as path")
    if config is not None:
        _require_json(config)
    if is_file:
        target: FileTarget | DirectoryTarget = FileTarget.check(path, replace=replace)
    else:
        target = DirectoryTarget.check(path, replace=replace)
    problems: list[str] = []
    with _staged(target, problems) as (staged, file):
        with SafetensorsWriter(file, [spec for each in items for spec in each.specs()],
                               {"format": "pt"}) as writer:  # fmt: skip
            for each in items:
                for name, data in each.data().items():
                    writer.write(name, data)
        if not is_file:
            written = _config(items, {} if config is None else config)
            write_json(os.path.join(staged, CONFIG_NAME), written, file)
        _require_readable(staged, items)
    for problem in problems:
        warnings.warn(problem, stacklevel=2)


@contextlib.contextmanager
def _staged(target: FileTarget | DirectoryTarget, problems: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the paths to write to: the whole output, and the file of the tensors."""
    if isinstance(target, FileTarget):
        with target.staged(problems) as path:
            yield path, path
    else:
        with target.staged(problems, like=str(Path(target.path).parent)) as path:
            yield path, os.path.join(path, SINGLE_NAME)


@dataclasses.dataclass(frozen=True)
class _Item:
    """A tensor or weight to write, in host memory. plan: for a weight."""

    name: str
    value: Any
    plan: Plan | Int4Plan | None = None

    def info(self) -> TensorInfo:
        (spec,) = self.specs()
        return TensorInfo(spec.name, spec.dtype, spec.shape, 0, spec.nbytes)

    def specs(self) -> list[TensorSpec]:
        if self.plan is not None:
            return self.plan.specs()
        dtype = _FILE_DTYPES.get(self.value.dtype)
        if dtype is None:
            raise InvalidArgument(f"{self.name} is of {self.value.dtype}, which safetensors lacks")
        return [TensorSpec(self.name, dtype, self.value.shape)]

    def data(self) -> dict[str, Any]:
        if self.plan is None:
            return {self.name: self.value}
        if isinstance(self.plan, Plan):
            return self.plan.parts(self.value)
        parts = ("packed", "scales", "zeros", "g_idx")
        return self.plan.tensors({part: getattr(self.value, part) for part in parts})


def _items(tensors: Mapping[str, Any]) -> list[_Item]:
    for name in tensors:
        if not isinstance(name, str):
            raise InvalidArgument(f"tensors has the key {shown(name)}; expected names, as str")
        if any("\ud800" <= each <= "\udfff" for each in name):
            raise InvalidArgument(f"tensors has {name!a}, half of a surrogate pair; expected UTF-8")
    items = [_item(name, value) for name, value in tensors.items()]
    owners: dict[str, str] = {}
    for each in items:
        for stored in (spec.name for spec in each.specs()):
            if stored == "__metadata__":
                raise InvalidArgument(f"tensors has {stored!r}, which safetensors reserves")
            if stored in owners:
                raise InvalidArgument(
                    f"{owners[stored]} and {each.name} would both be stored as {stored!r}; "
                    f"expected names that no other weight's parts have"
                )
            owners[stored] = each.name
    return items


def _item(name: str, value: Any) -> _Item:
    if not isinstance(value, Weight):
        return _Item(name, _host(name, value))
    parts = {
        part.name: _host(f"{part.name} of {name}", getattr(value, part.name))
        for part in value.parts()
    }
    weight = dataclasses.replace(value, **parts)
    try:
        prepare(weight)  # raises if a part has the wrong size or type
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from None
    if isinstance(weight, QuantizedTensor):
        if weight.codebook is not None:
            raise InvalidArgument(
                f"{name} has a codebook of its own; expected the codebook of {weight.format}: "
                f"bitsandbytes uses no other, even if a file has one"
            )
        plan = State(weight.format, weight.blocksize, weight.dtype, weight.shape,
                     weight.nested_blocksize, scale_rule=weight.scale_rule)  # fmt: skip
        return _Item(name, weight, Plan(name, plan))
    return _int4_item(name, weight)


def _int4_item(name: str, weight: Int4Tensor) -> _Item:
    layout, (rows, cols) = LAYOUTS[weight.layout], weight.shape
    if weight.permutation is not None:
        raise InvalidArgument(f"{name} is reordered; expected the weight before nf4.reorder")
    if weight.g_idx is not None and "g_idx" not in layout.names:
        raise InvalidArgument(f"{name} has a g_idx, which {weight.layout} does not support")
    if not name.endswith(".weight"):
        raise InvalidArgument(f'tensors has integers as {name!r}; expected a name with ".weight"')
    size = weight.group_size
    groups = 1 if size == -1 else cols // size
    zeros = np.full((groups, rows), SYMMETRIC_ZERO, np.uint8)
    if weight.zeros is None and not layout.by_row:
        weight = dataclasses.replace(weight, zeros=layout.stored_zeros(zeros))
    symmetric = weight.zeros is None
    if not symmetric and not layout.by_row:
        symmetric = bool((layout.zeros(weight.zeros, rows) == SYMMETRIC_ZERO).all())
    scales, act_order = NF4_TO_FILE[weight.dtype], weight.g_idx is not None
    return _Item(
        name, weight, Int4Plan(name, layout, (rows, cols), size, scales, symmetric, act_order)
    )


def _host(name: str, value: Any) -> np.ndarray:
    """Returns a contiguous array of the same dtype."""
    if _torch.is_tensor(value):
        return _of_torch(name, value)
    if not isinstance(value, np.ndarray):
        try:
            value = np.from_dlpack(value)
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
            raise InvalidArgument(
                f"{name} is {kind_of(value)}; expected an array, a tensor or a weight"
            ) from None
    return np.ascontiguousarray(value).reshape(value.shape)


def _of_torch(name: str, tensor: Any) -> np.ndarray:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_meta:
        raise InvalidArgument(f"{name} is on meta; expected a tensor with memory")
    if tensor.layout is not _torch_module().strided:
        raise InvalidArgument(f"{name} is of layout {tensor.layout}; expected torch.strided")
    tensor = tensor.detach().cpu()  # a failure of the GPU is not the argument's
    try:
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        if dtype not in _VIEWED:
            return tensor.numpy()
        integers = tensor.view(getattr(_torch_module(), f"int{8 * tensor.itemsize}"))
        return integers.numpy().view(getattr(ml_dtypes, _VIEWED[dtype]))
    except (RuntimeError, TypeError) as error:
        why = str(error).splitlines()[0]
        raise InvalidArgument(f"{name}, of {dtype}, cannot become an array: {why}") from None


def _torch_module() -> Any:
    import torch  # the tensor is torch's

    return torch


def _require_json(config: Mapping[str, object]) -> None:
    if not isinstance(config, Mapping):
        raise InvalidArgument(f"config is {kind_of(config)}; expected a dict")
    try:
        json.dumps(dict(config))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"config cannot be written as JSON: {error}") from None


def _config(items: list[_Item], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json with the quantization_config."""
    plans = [each.plan for each in items if each.plan is not None]
    if not plans or says_quantization(config):
        return dict(config)
    if len({type(plan) for plan in plans}) > 1:
        raise InvalidArgument("tensors has weights of integers and others; expected one kind")
    first = plans[0]
    if isinstance(first, Plan):
        options = QuantizeOptions(nested=first.state.nested)  # config_of takes the plans' format
    else:
        options = QuantizeOptions("int4")
        if len({plan.layout.name for plan in plans if isinstance(plan, Int4Plan)}) > 1:
            raise InvalidArgument("tensors has integers of several layouts; expected one")
    dense = [each.info() for each in items if each.plan is None]
    rules = Rules(model_types(config))
    try:
        made = config_of(plans, dense, rules, options, config)
    except FormatError as error:
        raise InvalidArgument(f"{error.tensor} {error.reason}") from None
    return {**config, "quantization_config": made}


def _require_readable(path: str, items: list[_Item]) -> None:
    """Requires the written tensors to read back as the given ones."""
    with Checkpoint(path) as checkpoint:
        found = survey(checkpoint)
        for fault in found.faults:
            raise InvalidArgument(f"{fault.tensor} would not be read: {fault.reason}")
        for each in items:
            read = found.weights.get(each.name)
            if (read is None) != (each.plan is None):
                raise InvalidArgument(f"{each.name} would be read as another kind of tensor")
            if isinstance(each.plan, Int4Plan) and not _is_same(each.plan, read):
                raise InvalidArgument(
                    f"{each.name} would be read in another layout or group size; expected a "
                    f"directory as path, whose config.json states them"
                )


def _is_same(plan: Int4Plan, read: Any) -> bool:
    state: Int4State | None = read.state if isinstance(read, Int4Weight) else None
    return (
        state is not None and state.layout.name == plan.layout.name and state.groups == plan.groups
    )
