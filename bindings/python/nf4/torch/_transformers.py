"""Registers libnf4's experts and its quantizer with transformers, as soon as transformers' own
registries are loaded, before or after nf4.torch. Nothing is imported before.
"""

from __future__ import annotations

import importlib
import sys
import warnings

from nf4.torch._import_watch import ImportWatch
from nf4.torch.experts import IMPLEMENTATION, MOE, experts_forward

_QUANTIZERS = "transformers.quantizers.auto"


def _loaded(name: str) -> None:
    """Never raises, because the error would reach whoever imports transformers."""
    try:
        if name == MOE:
            sys.modules[name].ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
        else:
            importlib.import_module("nf4.torch._nf4_quantizer")
    except Exception as error:
        warnings.warn(f"libnf4 does not serve transformers' experts: {error!r}", stacklevel=2)


_watch = ImportWatch((MOE, _QUANTIZERS), _loaded)


def register() -> None:
    """Registers now, or as soon as transformers is loaded. A second call changes nothing."""
    _watch.start()
