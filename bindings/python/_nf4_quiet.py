"""The entry point torch.backends: torch calls `hold_back` when it is imported.

On CPUs with AVX512-BF16 bitsandbytes warns at its import, before it calls libnf4, that it found no
kernel for gemm_4bit_forward: "Failed to load CPU gemm_4bit_forward from kernels-community". Where
libnf4 serves that operator, the line means nothing. So it is held back until that is known.

A module of its own, as every import of torch loads it: it must be small and must not fail.
"""

from __future__ import annotations

import logging
import os

_LOGGER = logging.getLogger("bitsandbytes.backends.cpu.ops")
_LINE = "Failed to load CPU gemm_4bit_forward"
SWITCH = "NF4_BITSANDBYTES"

_held: list[logging.LogRecord] = []


def switched_off() -> bool:
    """Whether the environment asks for bitsandbytes' own kernels."""
    return os.environ.get(SWITCH, "").strip().lower() in ("0", "false", "off", "no")


def _passes(record: logging.LogRecord) -> bool:
    if not str(record.msg).startswith(_LINE):
        return True
    _held.append(record)
    return False


def hold_back() -> None:
    """From here on, unless libnf4 is switched off."""
    if not switched_off():
        _LOGGER.addFilter(_passes)


def release(served: bool) -> None:
    """Ends that. served: the line is dropped; else it is logged now."""
    _LOGGER.removeFilter(_passes)
    while _held:
        record = _held.pop()
        if not served:
            _LOGGER.handle(record)
