"""What include/nf4/nf4.h declares, read from its text."""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Header:
    """Names as they stand in the header. `fields` maps a struct to its members in order; the last
    four map a name to its whole declaration, in one line."""

    includes: list[str]
    functions: set[str]
    constants: set[str]
    version: str
    fields: dict[str, list[str]]
    prototypes: dict[str, str]
    values: dict[str, str]
    typedefs: dict[str, str]
    members: dict[str, list[str]]


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def read_header(path: Path) -> Header:
    text = without_comments(path.read_text())
    values = dict(re.findall(r"^#define (NF4_\w+) +(-?\d+)\s*$", text, flags=re.MULTILINE))
    version = ".".join(values.pop(f"NF4_VERSION_{part}") for part in ("MAJOR", "MINOR", "PATCH"))
    prototypes = {
        name: in_one_line(before + name + after)
        for before, name, after in re.findall(
            r"\bNF4_API\b([^;(]*?\b)(nf4_\w+)(\s*\([^;]*\));", text
        )
    }
    members = {
        name: [in_one_line(each) for each in body.split(";") if each.strip()]
        for name, body in re.findall(r"typedef struct (nf4_\w+) \{(.*?)\}", text, re.DOTALL)
    }
    return Header(
        includes=re.findall(r'^#include [<"](.*)[>"]', text, flags=re.MULTILINE),
        functions=set(prototypes),
        constants=set(values),
        version=version,
        fields={
            name: [re.findall(r"\w+", each.split("[")[0])[-1] for each in declared]
            for name, declared in members.items()
        },
        prototypes=prototypes,
        values=values,
        typedefs={
            each.split()[-1]: in_one_line(each)
            for each in re.findall(r"^typedef ([^{};]+);", text, flags=re.MULTILINE)
        },
        members=members,
    )
