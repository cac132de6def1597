"""The entry point bitsandbytes.backends: bitsandbytes calls `activate` when it is imported.

An exception here would break the import of bitsandbytes. So there is none: where libnf4 cannot
serve it, a warning says why.
"""

from __future__ import annotations

import os
import warnings

SWITCH = "NF4_BITSANDBYTES"


def switched_off() -> bool:
    """Whether the environment asks for bitsandbytes' own kernels."""
    return os.environ.get(SWITCH, "").strip().lower() in ("0", "false", "off", "no")


def activate() -> None:
    """Registers libnf4's kernels behind bitsandbytes' operators, unless that is switched off."""
    if switched_off():
        return
    try:
        # Imported here and not above, as it imports torch.
        from nf4.torch.bitsandbytes import register

        register()
    except Exception as error:  # such as torch or the library that is missing or too old
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        warnings.warn(
            f"libnf4 does not serve bitsandbytes, which runs on its own kernels: {kind}{error}; "
            f"{SWITCH}=0 turns this off",
            stacklevel=2,
        )
