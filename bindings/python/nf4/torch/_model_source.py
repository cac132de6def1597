"""A checkpoint as transformers gets it: its class, its configuration and its tensors, all of which
were checked. transformers' own from_pretrained(folder) reads more: adapters, other weights, Python
files and pickles in the folder."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nf4.checkpoint import Checkpoint, FormatError
from nf4.checkpoint.errors import printable
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.jsonio import MAX_CONFIG_BYTES, read_object
from nf4.checkpoint.quantization import config_path
from nf4.checkpoint.reader import SafetensorsFile
from nf4.errors import InvalidArgument
from nf4.torch._checks import require_transformers
from nf4.torch.distributed._reading import dtype_of, read_part

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_ADAPTER = "adapter_config.json"
_GENERATION = "generation_config.json"


def require_folder(path: str | os.PathLike[str]) -> None:
    """Requires a transformers in which models can be looked up, and `path` to be a folder without a
    PEFT adapter, alone or beside a model, because transformers would apply it. Raises ImportError,
    InvalidArgument and FormatError."""
    require_transformers()
    if not os.path.isdir(path):
        raise InvalidArgument(
            f"path is {os.fspath(path)!r}; expected a local directory with config.json"
        )
    adapter = os.path.join(path, _ADAPTER)
    if os.path.lexists(adapter):
        raise FormatError(
            adapter,
            "this is an adapter of PEFT, which is not applied: put it in a folder of its own, load "
            "the base model, and call peft.PeftModel.from_pretrained(model, folder)",
        )


def class_and_config(checkpoint: Checkpoint) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """Returns transformers' class of a model and its configuration without the quantization, from
    the accepted fields of config.json (checkpoint/model_config.py). Raises FormatError if it
    cannot."""
    from nf4.checkpoint.meta_model import model_class
    from nf4.checkpoint.model_config import model_config

    try:
        kind = model_class(checkpoint.config)
        config = model_config(kind, checkpoint.config)
    except Exception as error:  # configuration classes raise errors of any type
        reason = f"transformers cannot build the model: {' '.join(str(error).split())}"
        raise FormatError(config_path(checkpoint), reason) from None
    config.name_or_path = checkpoint.directory
    return kind, config


def set_generation(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Sets the model's generation_config from generation_config.json, or from config.json for older
    models without that file. Warns of one that cannot be used."""
    from transformers import GenerationConfig

    if not model.can_generate() or checkpoint.directory is None:
        return
    path = os.path.join(checkpoint.directory, _GENERATION)
    try:
        if os.path.lexists(path):
            found = read_object(path, "the configuration", limit=MAX_CONFIG_BYTES, constants=True)
            model.generation_config = GenerationConfig.from_dict(found)
        else:
            model.generation_config = GenerationConfig.from_model_config(dict(checkpoint.config))
    except (AttributeError, OSError, RecursionError, TypeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(printable(f"{path} is not used: {reason}"), stacklevel=4)


class _Stored:
    """A tensor of the checked file. It is read when transformers asks for its elements, like a
    slice of safetensors."""

    def __init__(self, file: SafetensorsFile, info: TensorInfo):
        self._file, self._info = file, info

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self._file, self._info)

    def is_floating_point(self) -> bool:
        """Tells if a model can have this dtype."""
        return self._info.dtype in ("F64", "F32", "F16", "BF16")

    def __getitem__(self, index: Any) -> Tensor:
        return read_part(self._file, self._info, None)[index]


def stored_tensors(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the tensors as from_pretrained takes a state_dict."""
    return {info.name: _Stored(file, info) for file, info in checkpoint.tensors()}
