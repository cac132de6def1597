"""What the names in a checkpoint do not show, for each model_type. Generated: see
tools/check_architectures.py.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Known:
    """dense: patterns (rules.matches) of modules that transformers does not replace by 4-bit
    layers, or not by one with this weight. skip: entries of llm_int8_skip_modules for modules
    that are replaced and have no weight of their own in the file."""

    dense: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()


KNOWN: dict[str, Known] = {}
