#!/usr/bin/env python3
"""Compares the machine code (SASS) of every kernel of two builds: where it is the same, there is
nothing to time.

    python tools/sass.py BEFORE AFTER [--arch 90,90a] [--rename OLD=NEW ...] [--diff KERNEL]

BEFORE and AFTER are libnf4.so, static archives or object files. Names and labels are
stripped from the SASS and offsets of kernel parameters, c[0x0][...], are masked, so that a renamed
kernel with reordered arguments is still the same code. Printed, for each architecture:

    identical    the same SASS, registers, stack and shared memory; by which kernels were renamed
    immediates   the same but for constants in instructions: offsets in parameters or shared memory
    changed      registers, stack, shared memory and instructions before -> after. "local" counts
                 STL and LDL: spills, or arrays in local memory. Of stack, too
    only before, only after

Kernels are matched by identical SASS, then by name, then by name after each --rename (a regular
expression on demangled names, OLD=NEW), then to the nearest by counts of instructions. Constant
data and the encoding's scheduling bits are not compared. Exit status: 0 if all are identical, 1 if
not, 2 for errors.

A typical check of a refactoring, on a build with -Dgpu_archs=90:
    python tools/sass.py BEFORE build/lib/libnf4.so --rename matmul_few=matmul_skinny
    python tools/sass.py BEFORE AFTER --diff 'matmul_skinny<.*8'     what has changed, as a diff

It needs cuobjdump and nvdisasm, and takes 5 to 30 s for two builds. `./dev sass BEFORE AFTER ...`
installs them; c++filt makes the names readable.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import difflib
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

_FUNCTION = re.compile(r"^\.text\.(\S+):$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^ +/\*[0-9a-f]{4,}\*/ +(.*?) *;? *$")
_OPERATION = re.compile(r"(?:@!?U?P\w+ +)?([A-Z][\w.]*)(?= |$)")
_LABEL = re.compile(r"\.L_x_\d+")
_PARAMETER = re.compile(r"(c\[0x0\]\[[^\]]*?)0x[0-9a-f]+\]")
_SYMBOL = re.compile(r"(?<![\w$.])[$.]*(?:_Z|__|nv\.)[\w$.]*")
_IMMEDIATE = re.compile(r"(?<![\w.])-?0x[0-9a-f]+\b")
_RESOURCES = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")
NEAREST = 0.5  # kernels that share fewer of their instructions are two


class Failure(Exception):
    """A tool is missing or could not read a file."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """name: demangled, without arguments. code: masked instructions, labels among them."""

    name: str
    code: tuple[str, ...]
    registers: int = 0
    stack: int = 0
    shared: int = 0

    @property
    def resources(self) -> tuple[int, int, int]:
        return self.registers, self.stack, self.shared

    @functools.cached_property
    def counts(self) -> collections.Counter[str]:
        """How often each operation occurs."""
        found = (_OPERATION.match(line) for line in self.code)
        return collections.Counter(match[1] for match in found if match)

    @property
    def instructions(self) -> int:
        return self.counts.total()

    @property
    def local(self) -> int:
        """Loads and stores of local memory."""
        return sum(n for name, n in self.counts.items() if name.startswith(("LDL", "STL")))


def parse_sass(text: str) -> dict[str, tuple[str, ...]]:
    """The masked code of each function of what `nvdisasm -c` prints, by mangled name."""
    pieces = _FUNCTION.split(text)
    return {name: mask(body) for name, body in zip(pieces[1::2], pieces[2::2], strict=True)}


def mask(body: str) -> tuple[str, ...]:
    """Instructions and labels, without addresses, names and offsets of parameters. Labels are
    numbered anew, in the order in which they are met."""
    numbers: dict[str, str] = {}

    def label(match: re.Match[str]) -> str:
        return numbers.setdefault(match[0], f"L{len(numbers)}")

    code = []
    for line in body.splitlines():
        if line.startswith((".section", "\t.section", "//----")):
            break
        found = _INSTRUCTION.match(line)
        if found:
            text = _PARAMETER.sub(r"\1*]", _LABEL.sub(label, found[1]))
            code.append(_SYMBOL.sub("*", text))
        elif _LABEL.match(line):
            code.append(_LABEL.sub(label, line.strip()))
    return tuple(code)


def parse_resources(text: str) -> dict[str, tuple[int, int, int]]:
    """Registers, stack and static shared memory of each function of `cuobjdump -res-usage`."""
    return {name: tuple(map(int, numbers)) for name, *numbers in _RESOURCES.findall(text)}


def short_name(demangled: str) -> str:
    """Without our namespaces, return type and arguments."""
    name = re.sub(r"\(anonymous namespace\)::|\bnf4::(?:cuda::)?", "", demangled)
    name = re.sub(r"\((?:bool|int|unsigned int|char)\)(?=[\w-])", "", name).removeprefix("void ")
    depth = 0
    for at, character in enumerate(name):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0 and at:
            return name[:at]
    return name


# ---- Matching ---------------------------------------------------------------------------


Pair = tuple[Kernel, Kernel]


def similarity(a: Kernel, b: Kernel) -> float:
    """The share of instructions that both have, 0 to 1."""
    both = (a.counts & b.counts).total()
    return 2 * both / max(1, a.instructions + b.instructions)


def match(
    before: Iterable[Kernel], after: Iterable[Kernel], renames: Iterable[tuple[str, str]] = ()
) -> tuple[list[Pair], list[Kernel], list[Kernel]]:
    """Pairs, and those that are in one build only."""
    left, right = list(before), list(after)
    pairs: list[Pair] = []

    def renamed(kernel: Kernel) -> str:
        name = kernel.name
        for old, new in renames:
            name = re.sub(old, new, name)
        return name

    def take(key_before, key_after) -> None:
        """Pairs the kernels whose keys are equal, in the order of their names."""
        groups = collections.defaultdict(list)
        for kernel in sorted(right, key=lambda each: each.name):
            groups[key_after(kernel)].append(kernel)
        for kernel in sorted(left, key=lambda each: each.name):
            found = groups[key_before(kernel)]
            if found:
                pairs.append((kernel, found.pop(0)))
                left.remove(pairs[-1][0])
                right.remove(pairs[-1][1])

    def code(kernel: Kernel) -> tuple:
        return kernel.code, kernel.resources

    take(lambda k: (k.name, code(k)), lambda k: (k.name, code(k)))
    take(lambda k: (renamed(k), code(k)), lambda k: (k.name, code(k)))
    # A kernel that only one build has is no other name of one that both have.
    names_before, names_after = {renamed(k) for k in left}, {k.name for k in right}
    take(
        lambda k: (renamed(k) in names_after, code(k)), lambda k: (k.name in names_before, code(k))
    )
    take(lambda k: k.name, lambda k: k.name)
    take(renamed, lambda k: k.name)
    near = [(similarity(a, b), i, j) for i, a in enumerate(left) for j, b in enumerate(right)]
    lefts, rights = dict(enumerate(left)), dict(enumerate(right))
    for score, i, j in sorted(near, key=lambda each: (-each[0], each[1:])):
        if score >= NEAREST and i in lefts and j in rights:
            pairs.append((lefts.pop(i), rights.pop(j)))
    return pairs, list(lefts.values()), list(rights.values())


def kind(pair: Pair) -> str:
    a, b = pair
    if a.resources != b.resources:
        return "changed"
    if a.code == b.code:
        return "identical"
    alike = len(a.code) == len(b.code) and all(
        _IMMEDIATE.sub("*", x) == _IMMEDIATE.sub("*", y)
        for x, y in zip(a.code, b.code, strict=True)
    )
    return "immediates" if alike else "changed"


# ---- What is printed --------------------------------------------------------------------


def _arrow(a: int, b: int) -> str:
    return f"{a}" if a == b else f"{a} -> {b}"


def _both_names(pair: Pair) -> str:
    a, b = pair
    return a.name if a.name == b.name else f"{a.name} -> {b.name}"


def report(
    arch: str, pairs: list[Pair], only_before: list[Kernel], only_after: list[Kernel]
) -> tuple[str, bool]:
    """The text for one architecture, and whether all of it is identical."""
    kinds: dict[str, list[Pair]] = {"identical": [], "immediates": [], "changed": []}
    for pair in sorted(pairs, key=lambda each: each[0].name):
        kinds[kind(pair)].append(pair)
    renamed = sum(a.name != b.name for a, b in kinds["identical"])
    lines = [
        f"sm_{arch}: {len(pairs) + len(only_before)} kernels -> {len(pairs) + len(only_after)}: "
        f"{len(kinds['identical'])} identical ({renamed} of other name), "
        f"{len(kinds['immediates'])} differ in immediates, {len(kinds['changed'])} changed, "
        f"{len(only_before)} only before, {len(only_after)} only after"
    ]
    lines += [f"  immediates  {_both_names(pair)}" for pair in kinds["immediates"]]
    for a, b in kinds["changed"]:
        lines.append(f"  changed     {_both_names((a, b))}")
        lines.append(
            f"              registers {_arrow(a.registers, b.registers)}, "
            f"stack {_arrow(a.stack, b.stack)}, local {_arrow(a.local, b.local)}, "
            f"shared {_arrow(a.shared, b.shared)}, "
            f"instructions {_arrow(a.instructions, b.instructions)}"
        )
    lines += [f"  only before {each.name}" for each in sorted_names(only_before)]
    lines += [f"  only after  {each.name}" for each in sorted_names(only_after)]
    return "\n".join(lines), len(lines) == 1


def sorted_names(kernels: Iterable[Kernel]) -> list[Kernel]:
    return sorted(kernels, key=lambda each: each.name)


def renames_text(pairs: Iterable[Pair]) -> str:
    return "\n".join(f"  renamed     {_both_names(p)}" for p in pairs if p[0].name != p[1].name)


def differences(pairs: Iterable[Pair], pattern: str) -> str:
    """A diff of each kernel that has changed and either name of which has the pattern."""
    parts = []
    for a, b in pairs:
        wanted = re.search(pattern, a.name) or re.search(pattern, b.name)
        if wanted and a.code != b.code:
            parts += difflib.unified_diff(a.code, b.code, a.name, b.name, lineterm="", n=2)
    return "\n".join(parts)


# ---- The tools --------------------------------------------------------------------------


def tool(name: str, *arguments: str | Path, folder: Path | None = None) -> str:
    """What a program of the CUDA toolkit prints: of PATH, else of the wheels."""
    path = os.environ.get("PATH", os.defpath)
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cu13")
    for wheel in spec.submodule_search_locations or [] if spec else []:
        path += os.pathsep + str(Path(wheel) / "bin")
    program = shutil.which(name, path=path)
    if program is None:
        raise Failure(f"there is no {name} on PATH; ./dev sass installs it")
    command = [program, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise Failure(f"{name} {' '.join(command[1:])}: {done.stderr.strip()}")
    return done.stdout


def demangled(names: list[str]) -> dict[str, str]:
    if not names or shutil.which("c++filt") is None:
        return {name: name for name in names}
    done = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return dict(zip(names, map(short_name, done.stdout.splitlines()), strict=True))


def kernels(cubin: Path) -> list[Kernel]:
    resources = parse_resources(tool("cuobjdump", "-res-usage", cubin))
    code = parse_sass(tool("nvdisasm", "-c", cubin))
    names = demangled(list(code))
    return [
        Kernel(names[name], body, *resources.get(name, (0, 0, 0))) for name, body in code.items()
    ]


def cubins(path: Path, folder: Path, archs: Iterable[str]) -> dict[str, list[Path]]:
    """The machine code in a library, by architecture."""
    folder.mkdir()
    tool("cuobjdump", "-xelf", "all", path.resolve(), folder=folder)
    return {arch: sorted(folder.glob(f"*.sm_{arch}.cubin")) for arch in archs}


def loaded(paths: Iterable[Path], archs: Iterable[str]) -> list[dict[str, list[Kernel]]]:
    """The kernels of each library, by architecture."""
    found = []
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(4) as pool:
        for index, path in enumerate(paths):
            of_arch = cubins(path, Path(name) / str(index), archs)
            found.append({
                arch: [kernel for each in pool.map(kernels, files) for kernel in each]
                for arch, files in of_arch.items()
            })  # fmt: skip
    return found


def compare(arguments: argparse.Namespace, renames: list[tuple[str, str]]) -> bool:
    """Prints what is asked for. Is all of it identical?"""
    paths, archs = (arguments.before, arguments.after), arguments.arch.split(",")
    before, after = loaded(paths, archs)
    same = True
    for arch in archs:
        if not before[arch] and not after[arch]:
            print(f"sm_{arch}: neither build has code for it")
            continue
        pairs, only_before, only_after = match(before[arch], after[arch], renames)
        text, identical = report(arch, pairs, only_before, only_after)
        same = same and identical
        print(text if arguments.diff is None else differences(pairs, arguments.diff))
        if arguments.renames:
            print(renames_text(pairs))
    if arguments.diff is None:
        sizes = [path.stat().st_size for path in paths]
        print(f"bytes of the file: {_arrow(*sizes)} ({sizes[1] / sizes[0] - 1:+.1%})")
    return same


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--arch", default="90,90a", help="such as 75,90a; 90,90a by default")
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW")
    parser.add_argument("--renames", action="store_true", help="list the identical of other name")
    parser.add_argument("--diff", metavar="KERNEL", help="a diff of kernels with this pattern")
    arguments = parser.parse_args()
    for path in (arguments.before, arguments.after):
        if not path.is_file():
            parser.error(f"there is no file {path}")
    renames = []
    for each in arguments.rename:
        old, equals, new = each.partition("=")
        if not equals:
            parser.error(f"--rename {each}: expected OLD=NEW")
        renames.append((old, new))
    try:
        return 0 if compare(arguments, renames) else 1
    except Failure as failure:
        print(f"sass: {failure}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
