"""Parses JSON files strictly (unlike Python's json) and within bounds."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from nf4.checkpoint.errors import FormatError, naming
from nf4.checkpoint.files import open_regular

MAX_JSON_BYTES = 100_000_000
MAX_CONFIG_BYTES = 16_000_000
# Each value needs a comma or a bracket of its own, so this bounds the memory of parsing to about
# 1 GB. A header of 500,000 tensors has 3.5 million commas.
MAX_MARKS = 4_000_000


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"duplicate key {twice!r}")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is beyond every float")
    return value


def check_marks(data: bytes, path: str, what: str, tensor: str | None = None) -> None:
    """Raises FormatError for JSON of too many values, before it is parsed."""
    for mark in (b",", b"[", b"{"):
        if data.count(mark) > MAX_MARKS:
            raise FormatError(path, f"{what} has more than {MAX_MARKS} {mark.decode()!r}", tensor)


def parse_value(
    data: bytes, path: str, what: str, tensor: str | None = None, *, constants: bool = False
) -> Any:
    """Parses JSON. Raises FormatError, naming `what`, for anything else, and for duplicate keys, a
    byte order mark, invalid UTF-8 and too deep nesting. constants: accept NaN and infinities, which
    Python writes and JSON lacks."""
    check_marks(data, path, what, tensor)
    strict = {} if constants else {"parse_constant": _no_constant, "parse_float": _finite}
    try:
        text = data.decode("utf-8")
        if text.startswith("\ufeff"):
            raise ValueError("it starts with a byte order mark")
        return json.loads(text, object_pairs_hook=_no_duplicates, **strict)
    except RecursionError:
        raise FormatError(path, f"{what} is nested too deeply", tensor) from None
    except UnicodeDecodeError as error:
        raise FormatError(path, f"{what} is not UTF-8 ({error.reason})", tensor) from None
    except ValueError as error:
        raise FormatError(path, f"{what} is not valid JSON: {error}", tensor) from None


def parse_object(
    data: bytes, path: str, what: str, tensor: str | None = None, *, constants: bool = False
) -> dict[str, Any]:
    """Like parse_value, but also raises FormatError for a value that is not an object."""
    value = parse_value(data, path, what, tensor, constants=constants)
    if not isinstance(value, dict):
        raise FormatError(path, f"{what} is not a JSON object", tensor)
    return value


def read_bytes(path: str, what: str, limit: int = MAX_JSON_BYTES) -> bytes:
    """Returns the bytes of a regular file. Raises FormatError for any other kind of file or more
    than `limit` bytes, OSError if it cannot be read."""
    fd, _ = open_regular(path)
    with os.fdopen(fd, "rb") as file, naming(path):
        data = file.read(limit + 1)
    if len(data) > limit:
        raise FormatError(path, f"{what} is larger than {limit} bytes")
    return data


def read_object(
    path: str, what: str, *, limit: int = MAX_JSON_BYTES, constants: bool = False
) -> dict[str, Any]:
    """Returns the JSON object in a file of at most `limit` bytes. Raises what read_bytes and
    parse_object raise."""
    return parse_object(read_bytes(path, what, limit), path, what, constants=constants)


def is_count(value: object) -> bool:
    """Tells if `value` is a non-negative int of at most 63 bits; True and 1.0 are not."""
    return type(value) is int and 0 <= value < 2**63
