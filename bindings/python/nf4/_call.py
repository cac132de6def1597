"""What calls have in common: the stream and the scratch."""

from __future__ import annotations

from typing import Any

import numpy as np

from nf4 import _convert, _memory, _torch
from nf4._memory import Buffer
from nf4.errors import InvalidArgument, shown

_WORKSPACE_ALIGNMENT = 16


def launch_stream(stream: Any, threads: int, torch: _torch.Device | None) -> int:
    """The stream of a call on device memory, where threads mean nothing."""
    if threads != 0:
        raise InvalidArgument(f"threads is {threads}; expected 0 for device memory")
    if stream is None and torch is not None:
        return torch.current_stream()
    return _convert.stream_address(stream)


def require_no_stream(stream: Any) -> None:
    """For a call on host memory, where a stream means nothing."""
    if stream is not None:
        raise InvalidArgument(f"stream is {shown(stream)}; expected None for host memory")


def workspace(
    value: Any, needed: int, on_device: bool, torch: _torch.Device | None, stream: Any
) -> tuple[list[Buffer], int]:
    """The scratch of a call as a list of at most one buffer, and its size in bytes. What is
    made here may go back to torch before the work is done: to the stream that it is done on."""
    if value is None:
        if needed == 0:
            return [], 0
        if torch is not None:
            return [_memory.buffer("workspace", torch.empty(needed, "uint8", stream))], needed
        if on_device:
            raise InvalidArgument(f"workspace is None; expected {needed} bytes of device memory")
        made = _memory.aligned_array((needed,), np.dtype(np.uint8), _WORKSPACE_ALIGNMENT)
        return [_memory.buffer("workspace", made)], needed
    scratch = _memory.buffer("workspace", value)
    if scratch.elements is None:
        return [scratch], needed
    scratch.expect("uint8", scratch.elements, written=True)
    if scratch.elements < needed:
        raise InvalidArgument(f"workspace has {scratch.elements} bytes; expected {needed} or more")
    return [scratch], scratch.elements
