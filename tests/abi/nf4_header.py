"""What include/nf4/nf4.h declares, read from its text."""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Header:
    """Names as they stand in the header; `fields` maps a struct to its members in order."""

    includes: list[str]
    functions: set[str]
    constants: set[str]
    version: str
    fields: dict[str, list[str]]


def read_header(path: Path) -> Header:
    text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    constants = dict(re.findall(r"^#define (NF4_\w+) +(-?\d+)\s*$", text, flags=re.MULTILINE))
    version = ".".join(constants.pop(f"NF4_VERSION_{part}") for part in ("MAJOR", "MINOR", "PATCH"))
    return Header(
        includes=re.findall(r'^#include [<"](.*)[>"]', text, flags=re.MULTILINE),
        functions=set(re.findall(r"\bNF4_API\b[^;(]*?\b(nf4_\w+)\s*\(", text)),
        constants=set(constants),
        version=version,
        fields={
            name: re.findall(r"(\w+)(?:\[\d+\])?;", body)
            for name, body in re.findall(r"typedef struct (nf4_\w+) \{(.*?)\}", text, re.DOTALL)
        },
    )
