"""What worked with an earlier version works with this library: for each header in tests/abi/vX.Y
its declarations stand in today's nf4.h, structs grew at their ends alone, the functions kept the
symbol version that they came with, and its program, linked with a library of that day, runs on
this one (docs/abi.md)."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from nf4_header import Header, read_header
from tap import Tap

HERE = Path(__file__).resolve().parent
# An exit status of abidiff: a change, which a struct that grew is, too. Its others are errors, or
# changes that it knows to break programs.
ABIDIFF_CHANGE = 4


def changed(old: dict[str, str], new: dict[str, str]) -> str:
    """The declarations that are gone or not what they were, a line each."""
    return "\n".join(
        f"was: {each}\nis:  {new.get(name, 'gone')}"
        for name, each in old.items()
        if new.get(name) != each
    )


def moved(old: Header, new: Header) -> str:
    """The structs whose fields of then are not the first ones today."""
    return "\n".join(
        f"{name}: {was} are not the first of {new.members.get(name)}"
        for name, was in old.members.items()
        if new.members.get(name, [])[: len(was)] != was
    )


def came_with(headers: list[tuple[str, Header]]) -> dict[str, str]:
    """The symbol version of each function: that of the first header with it."""
    nodes: dict[str, str] = {}
    for version, header in headers:
        for name in header.functions:
            nodes.setdefault(name, f"NF4_{version}")
    return nodes


def exported(library: Path) -> dict[str, str]:
    """The symbol version of each function that the library exports."""
    command = ["nm", "-D", "--defined-only", "--with-symbol-versions", library]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(re.findall(r" T (\w+)@@(\S+)$", text, re.MULTILINE))


def version_script(nodes: dict[str, str]) -> str:
    """The linker's, for functions of these symbol versions."""
    lines = []
    for version in sorted(set(nodes.values())):
        names = "".join(f" {name};" for name, its in nodes.items() if its == version)
        lines.append(f"{version} {{ global:{names} }};\n")
    return "".join(lines)


class Builder:
    """A folder to compile in."""

    def __init__(self, cc: str, folder: Path) -> None:
        self._cc, self.folder = shlex.split(cc), folder

    def _compile(self, output: Path, *arguments: str | Path) -> None:
        command = [*self._cc, "-std=c99", "-Wall", "-Wextra", "-Werror", *arguments, "-o", output]
        subprocess.run(command, check=True)

    def stub(self, name: str, include: Path, nodes: dict[str, str]) -> Path:
        """A library with the functions of a header and nothing in them, as the linker and abidiff
        see that of its version."""
        folder = self.folder / name
        folder.mkdir()
        prototypes = read_header(include / "nf4" / "nf4.h").prototypes
        source, script = folder / "stub.c", folder / "stub.map"
        bodies = [f"{each} {{ __builtin_trap(); }}" for each in prototypes.values()]
        source.write_text("\n".join(["#include <nf4/nf4.h>", *bodies, ""]))
        script.write_text(version_script({each: nodes[each] for each in prototypes}))
        library = folder / "libnf4.so.0"
        link = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}", f"-Wl,--version-script={script}"]
        self._compile(library, "-g", "-Wno-unused-parameter", f"-I{include}", *link, source)
        return library

    def program(self, include: Path, stub: Path) -> Path:
        output = stub.parent / "program"
        self._compile(output, f"-I{include}", include / "program.c", stub)
        return output


def run(program: Path, library: Path, folder: Path) -> tuple[int, str | None]:
    """Runs a program on a library, all its symbols bound at the start: how many checks it made, and
    what is wrong."""
    (folder / "today").mkdir(exist_ok=True)
    link = folder / "today" / "libnf4.so.0"
    if not link.exists():
        link.symlink_to(library.resolve())
    environment = os.environ | {"LD_LIBRARY_PATH": str(link.parent), "LD_BIND_NOW": "1"}
    done = subprocess.run([program], env=environment, capture_output=True, text=True)
    checks = re.findall(r"^(\d+) checks, 0 failed$", done.stdout, re.MULTILINE)
    wrong = done.returncode or done.stderr or not checks
    return int(checks[0]) if checks else 0, f"{done}" if wrong else None


def leave_count(checks: int) -> None:
    path = os.environ.get("NF4_PROOFS")
    if path:
        with open(path, "a") as file:
            file.write(f"abi-frozen {checks}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--header", type=Path, required=True)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--cc", required=True)
    options = parser.parse_args()

    tap = Tap()
    today = read_header(options.header)
    current = today.version.rpartition(".")[0]
    folders = {
        each.name[1:]: each
        for each in sorted(
            HERE.glob("v*.*"), key=lambda each: [*map(int, each.name[1:].split("."))]
        )
    }
    headers = {version: read_header(each / "nf4" / "nf4.h") for version, each in folders.items()}
    tap.check("there is a frozen header", None if headers else "tests/abi/v* has none")
    nodes = came_with([*headers.items(), (current, today)])
    tap.same_set(
        "functions have the versions that they came with",
        {f"{name}@{version}" for name, version in exported(options.library).items()},
        {f"{name}@{version}" for name, version in nodes.items()},
    )
    total = 0
    with tempfile.TemporaryDirectory() as temporary:
        builder = Builder(options.cc, Path(temporary))
        stub = builder.stub("today's", options.header.parents[1], nodes)
        for version, header in headers.items():
            tap.check(f"functions of {version}", changed(header.prototypes, today.prototypes))
            tap.check(f"constants of {version}", changed(header.values, today.values))
            tap.check(f"types of {version}", changed(header.typedefs, today.typedefs))
            tap.check(f"structs of {version} grew at the end", moved(header, today))
            text = (folders[version] / "program.c").read_text()
            called = set(re.findall(r"\b(nf4_\w+)\(", text))
            tap.same_set(
                f"the program of {version} calls all", called & header.functions, header.functions
            )
            old = builder.stub(version, folders[version], nodes)
            checks, wrong = run(
                builder.program(folders[version], old), options.library, Path(temporary)
            )
            total += checks
            tap.check(f"the program of {version} runs on this library", wrong)
            name = f"abidiff with {version}"
            if not shutil.which("abidiff"):
                tap.skip(name, "no abidiff (apt install abigail-tools)")
                continue
            done = subprocess.run(
                ["abidiff", "--no-added-syms", old, stub], capture_output=True, text=True
            )
            grew = any(
                len(today.members.get(each, [])) > len(was) for each, was in header.members.items()
            )
            bad = done.returncode & ~ABIDIFF_CHANGE if grew else done.returncode
            tap.check(name, done.stdout + done.stderr if bad else None)
    if not tap.failed:
        leave_count(total)
    tap.finish()


if __name__ == "__main__":
    main()
