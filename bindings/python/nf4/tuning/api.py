"""nf4.tune and nf4.tuning.reset."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, overload

from nf4 import _costs
from nf4._load import library
from nf4.errors import Error, NoDevice
from nf4.info import Device, device_info
from nf4.tuning.result import Tuning


def _usable(device: int) -> Device:
    gpu = device_info(device)
    if not gpu.usable:
        raise NoDevice(f"device {device}: {gpu.reason}")
    return gpu


def _require_free(device: int) -> Device:
    """Returns a GPU that can be timed now."""
    gpu = _usable(device)
    try:
        import torch
    except ImportError as error:
        raise Error(f"PyTorch's dense products are timed, too: {error}") from error
    if not torch.cuda.is_available():
        raise NoDevice("this PyTorch finds no GPU")
    if torch.cuda.is_current_stream_capturing():
        raise Error("nothing can be timed while a CUDA graph is captured")
    return gpu


@overload
def tune(
    device: int = 0,
    *,
    at_first_use: Literal[False] = False,
    advance: Callable[[str], None] | None = None,
) -> Tuning: ...


@overload
def tune(
    device: int = 0, *, at_first_use: bool, advance: Callable[[str], None] | None = None
) -> Tuning | None: ...


def tune(
    device: int = 0,
    *,
    at_first_use: bool = False,
    advance: Callable[[str], None] | None = None,
) -> Tuning | None:
    """Measures how long libnf4's kernels and a dense product of PyTorch take on a GPU, and stores
    costs, by which the library chooses kernels from then on. This takes less than half a minute on
    an H200 and longer on slower GPUs. It needs 2 GB of the GPU's memory, and nothing else should
    use the GPU. Other programs read the costs when they start. In this program, choices that were
    made before may stay. Another kernel may sum in another order, which can change the last bits
    of results.

    device        the index of a GPU
    at_first_use  does nothing and returns None if costs of the GPU are stored and used already.
                  A program that calls this before its first product thus measures once on each
                  machine, and again at each start for as long as nothing was stored
    advance       called with a name at each of nf4.tuning.api.steps() steps

    Nothing is stored if times vary too much, for example because another program uses the GPU, or
    if `reset` removes the file as it is written; `reason` of the result says so.

    Raises nf4.Error without PyTorch, during the capture of a CUDA graph and if the GPU has too
    little memory, NoDevice without a usable GPU, and OSError if the file cannot be written.
    """
    gpu = _usable(device)
    if at_first_use and _is_tuned(gpu):
        return None
    _require_free(device)
    tuning = _module("tune")
    # A folder that cannot be written to is found before the measurement.
    _costs.path_of(_costs.gpu_line(gpu)).parent.mkdir(parents=True, exist_ok=True)
    found = _measured(tuning.measure, gpu, advance)
    reason = _refusal(found, tuning.WIDEST_SPREAD)
    if reason:
        return dataclasses.replace(found, reason=reason)
    try:
        path = _costs.store(found.costs)
    except FileNotFoundError:
        reason = "another program, such as `nf4 tune --reset`, removed the file as it was written"
        return dataclasses.replace(found, reason=reason)
    _costs.load(library())
    return dataclasses.replace(found, path=path)


def _is_tuned(gpu: Device) -> bool:
    line = _costs.gpu_line(gpu)
    return any(file.gpu_line == line for file in _costs.load(library()) if not file.reason)


def report(device: int = 0, *, advance: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Measures a report of a GPU (nf4.tuning.report). It stores no costs.

    device   the index of a GPU
    advance  is called with a name at each of report_steps() steps

    Raises nf4.Error and NoDevice as nf4.tune does.
    """
    gpu = _require_free(device)
    return _measured(_module("bench").measure, gpu, advance)


def write_report(
    path: Path, device: int = 0, *, advance: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Measures a report, writes it to a file, whole or not at all, and returns it. A file that is
    there is replaced. Raises what `report` raises, and OSError."""
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "it is not a regular file", str(path))
    # A folder that cannot be written to is found before the measurement.
    with _costs.replacing(path) as file:
        document = report(device, advance=advance)
        text = json.dumps(document, separators=(",", ":"), allow_nan=False)
        file.write(f"{text}\n".encode())
    return document


def _measured(measure: Any, gpu: Device, advance: Callable[[str], None] | None) -> Any:
    import torch

    try:
        return measure(gpu, advance or (lambda name: None))
    except torch.cuda.OutOfMemoryError as error:
        raise Error(f"the GPU has too little free memory: {str(error).splitlines()[0]}") from error


def _module(name: str) -> Any:
    """Returns a module that imports PyTorch."""
    if name == "bench":
        from nf4.tuning import bench as module
    else:
        from nf4.tuning import tune as module
    return module


def steps() -> int:
    """Returns how often nf4.tune calls `advance`. It imports PyTorch."""
    return _module("tune").steps()


def report_steps() -> int:
    """Returns how often `report` calls `advance`. It imports PyTorch."""
    return _module("bench").steps()


def _refusal(found: Tuning, widest: float) -> str:
    """Says why nothing is stored, or ""."""
    if found.spread > widest:
        return (
            f"the same work took up to {found.spread:.2f} times as long again; is another program "
            f"using the GPU?"
        )
    if not found.products:
        return "the library's own rules are as fast"
    return ""


def reset() -> list[Path]:
    """Removes the costs of all GPUs, and the files of programs that were killed while they stored
    costs, or are storing costs now: those store none. Returns the files that there were. Raises
    OSError."""
    removed = [*_costs.paths(), *_costs.unfinished()]
    for path in removed:
        path.unlink(missing_ok=True)
    _costs.load(library())
    return removed
