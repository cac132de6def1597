"""The entry point bitsandbytes.backends: bitsandbytes calls `activate` when it is imported.

An exception here would break the import of bitsandbytes. So there is none: where libnf4 cannot
serve it, a warning says why.
"""

from __future__ import annotations

import warnings

from _nf4_quiet import SWITCH, release, switched_off


def activate() -> None:
    """Registers libnf4's kernels behind bitsandbytes' operators, unless that is switched off."""
    if switched_off():
        return
    try:
        # Imported here and not above, as it imports torch.
        from nf4.torch.bitsandbytes import register

        register()
    except Exception as error:  # such as torch or the library that is missing or too old
        release(served=False)
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        warnings.warn(
            f"libnf4 does not serve bitsandbytes, which runs on its own kernels: {kind}{error}; "
            f"{SWITCH}=0 turns this off",
            stacklevel=2,
        )
