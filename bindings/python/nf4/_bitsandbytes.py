"""What bitsandbytes calls when it is imported, by the entry point bitsandbytes.backends of this
package. An exception here would keep it from being imported at all, so there is none: what keeps
libnf4 from serving it is a warning."""

from __future__ import annotations

import os
import warnings

SWITCH = "NF4_BITSANDBYTES"
OLDEST = "0.50"  # which has the operators that are served


def switched_off() -> bool:
    """Does the environment say that bitsandbytes is to run on its own kernels?"""
    return os.environ.get(SWITCH, "").strip().lower() in ("0", "false", "off", "no")


def activate() -> None:
    """Puts libnf4's kernels behind bitsandbytes' operators, unless that is switched off."""
    if switched_off():
        return
    try:
        # Not before it is asked for: this imports torch.
        from nf4.torch.bitsandbytes import register

        register()
    except Exception as error:  # such as of torch, or of the library, that is missing or too old
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        warnings.warn(
            f"libnf4 does not serve bitsandbytes, which runs on its own kernels: {kind}{error}; "
            f"{SWITCH}=0 says that it is not to",
            stacklevel=2,
        )
