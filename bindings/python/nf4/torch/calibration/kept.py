"""The decoder layers that an unfinished calibration has quantized, in a folder beside the output.
Imports safetensors' part for torch."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from nf4._costs import replacing
from nf4.checkpoint.errors import OutputRefused
from nf4.checkpoint.steps import AnyQuantized
from nf4.int4 import Int4Tensor
from nf4.tensor import QuantizedTensor

_KINDS = {kind.__name__: kind for kind in (QuantizedTensor, Int4Tensor)}


class Kept:
    """A file for each decoder layer, counted from 0, with the 4-bit weights of the layer by their
    tensors' names. Files are written in the order of the layers, each whole or not at all.

    path     the folder, which is made. Another process that uses it is an OutputRefused
    inputs   a digest of what the weights follow from. Files of other inputs, and those that are not
             whole, are removed with all that come after them
    device   where weights are loaded
    """

    def __init__(self, path: str, inputs: str, device: torch.device):
        self.path, self._inputs, self._device = path, inputs, device
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = os.open(path, flags)
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self) -> None:
        path = self.path
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputRefused(f"{path}: another calibration for this output is running") from None
        except OSError:  # a file system without locks
            pass
        self.is_of_other_inputs = self._inputs_of(0) not in (None, self._inputs)
        self.count = 0
        while self._inputs_of(self.count) == self._inputs:
            self.count += 1
        counted = {os.path.basename(self._path(layer)) for layer in range(self.count)}
        for name in set(os.listdir(path)) - counted:
            os.unlink(os.path.join(path, name))

    def load(self, layer: int) -> dict[str, AnyQuantized] | None:
        """The weights of a decoder layer; None if it is not kept."""
        return self._read(layer) if layer < self.count else None

    def save(self, layer: int, weights: dict[str, AnyQuantized]) -> None:
        tensors, others = {}, {}
        for name, weight in weights.items():
            fields = {each.name: getattr(weight, each.name) for each in dataclasses.fields(weight)}
            parts = {key: part for key, part in fields.items() if isinstance(part, Tensor)}
            tensors |= {f"{key}:{name}": part.contiguous() for key, part in parts.items()}
            rest = {key: value for key, value in fields.items() if key not in parts}
            others[name] = {"kind": type(weight).__name__, "fields": rest}
        metadata = {"inputs": self._inputs, "weights": json.dumps(others)}
        with replacing(Path(self._path(layer))) as file:
            file.write(safetensors.torch.save(tensors, metadata))
        self.count = layer + 1

    def close(self) -> None:
        """Lets other processes use the folder, which goes if it is empty."""
        if self._lock >= 0:
            with suppress(OSError):
                os.rmdir(self.path)
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        shutil.rmtree(self.path)
        self.close()

    def _path(self, layer: int) -> str:
        return os.path.join(self.path, f"{layer}.safetensors")

    def _inputs_of(self, layer: int) -> str | None:
        """The inputs of a file; None if there is none, or it is not whole."""
        try:
            with safetensors.safe_open(self._path(layer), framework="pt") as file:
                return (file.metadata() or {}).get("inputs")
        except (FileNotFoundError, safetensors.SafetensorError):
            return None

    def _read(self, layer: int) -> dict[str, AnyQuantized]:
        path, device = self._path(layer), str(self._device)
        with safetensors.safe_open(path, framework="pt", device=device) as file:
            weights = json.loads(file.metadata()["weights"])
            parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for key, part in parts.items():
            field, _, name = key.partition(":")
            weights[name]["fields"][field] = part
        return {name: _KINDS[each["kind"]](**each["fields"]) for name, each in weights.items()}
