"""Checks values of config.json. A wrong one is a ValueError that names its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def names_of(value: object, key: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{key} is not a list of names")
    return tuple(value)


def object_of(value: object, key: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{key} is not an object")
    return value
