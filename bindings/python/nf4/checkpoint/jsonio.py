"""JSON as files hold it, read without Python's leniencies."""

from __future__ import annotations

import json
import os
from typing import Any

from nf4.checkpoint.errors import FormatError, naming

MAX_JSON_BYTES = 100_000_000


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"duplicate key {twice!r}")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse_object(data: bytes, path: str, what: str, tensor: str | None = None) -> dict[str, Any]:
    """`data` as a JSON object; FormatError naming `what` for anything else, duplicate keys,
    NaN, a byte order mark, bad UTF-8 and endless nesting included."""
    try:
        text = data.decode("utf-8")
        if text.startswith("\ufeff"):
            raise ValueError("it starts with a byte order mark")
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except RecursionError:
        raise FormatError(path, f"{what} is nested too deeply", tensor) from None
    except UnicodeDecodeError as error:
        raise FormatError(path, f"{what} is not UTF-8 ({error.reason})", tensor) from None
    except ValueError as error:
        raise FormatError(path, f"{what} is not valid JSON: {error}", tensor) from None
    if not isinstance(value, dict):
        raise FormatError(path, f"{what} is not a JSON object", tensor)
    return value


def read_object(path: str, what: str) -> dict[str, Any]:
    """The JSON object in a file of at most 100 MB. OSError if it cannot be read."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file, naming(path):
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise FormatError(path, f"{what} is larger than {MAX_JSON_BYTES} bytes")
    return parse_object(data, path, what)


def is_count(value: object) -> bool:
    """A non-negative integer that fits 63 bits (True and 1.0 are none)."""
    return type(value) is int and 0 <= value < 2**63
