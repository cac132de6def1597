#!/usr/bin/env python3
"""Checks that each kernel of a build fits on a multiprocessor. It needs no GPU.

    python tools/kernel_table.py LIBRARY [--write | --accept | --same-as BEFORE]

It checks the registers of a CTA, static shared memory and launch bounds of every architecture in
the library. In a library that has every architecture, as it has for use, stack frames must be in
tests/gpu/kernels.json, and be no larger than there. They are spills or arrays in local memory.

    --write    then makes that table anew, which says that it is of this code
    --accept   the same, with the stack frames that there are
    --same-as  keeps the table and says that it is of this code, after a change that alters no
               kernel: BEFORE is a build of the table's code, and LIBRARY one of this code, both
               with the same options; every kernel of one has the resources that it has in the
               other, or fewer. tools/sass.py compares the instructions

Dynamic shared memory is the host's choice, which tests/standin_cuda checks on GPUs of each kind.
Exit status: 0 if all fits, 1 if not, 2 for errors. It needs cuobjdump; `./dev test` and
`./dev gpu --build` install it and run this.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import json
import math
import re
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "gpu")]

import sass  # noqa: E402
from sources import source_hash  # noqa: E402

TABLE = ROOT / "tests" / "gpu" / "kernels.json"
# These files decide what the compiler makes of a kernel.
SOURCES = (
    "lib/core/**/*.hpp",
    "lib/cuda/**/*.cu",
    "lib/cuda/**/*.cuh",
    "lib/cuda/**/*.hpp",
    "lib/cuda/meson.build",
)
# The limits of each GPU from compute capability 7.5 on (CUDA C++ Programming Guide, technical
# specifications per compute capability): registers, which warps get in units of 256, threads, and
# the shared memory of a kernel that asks for no more. CUDA reserves 1 KiB beside it from 8.0 on,
# which counts here, too.
REGISTERS, REGISTER_UNIT, THREADS, STATIC_SHARED, RESERVED = 65536, 256, 1024, 48 << 10, 1 << 10
_ENTRY = re.compile(
    r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:\d+ [^\n]*CONSTANT\[0\]"
)
# A record in a section .nv.info.KERNEL has a format, which says if it has a size, and a number. The
# number below is the one of launch bounds, as `cuobjdump -elf` names them (EIFMT_SVAL,
# EIATTR_MAX_THREADS).
_INFO, _SIZED, _MAX_THREADS = ".nv.info.", 4, 5


@dataclass(frozen=True)
class Kernel:
    """`name` is demangled, without arguments. `threads` is that of its launch bounds; 0 if it has
    none. `stack` and `shared` are in bytes."""

    arch: str
    name: str
    threads: int
    registers: int
    stack: int
    shared: int

    @property
    def cta_registers(self) -> int:
        of_warp = -(-self.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
        return of_warp * -(-self.threads // 32)

    def problem(self) -> str | None:
        """Says in words why no GPU of the architecture runs it."""
        if not 0 < self.threads <= THREADS:
            return f"launch bounds of {self.threads} threads; expected 1 to {THREADS}"
        if self.cta_registers > REGISTERS:
            return f"{self.registers} registers of {self.threads} threads; {REGISTERS} at most"
        if self.shared > STATIC_SHARED + RESERVED:
            return f"{self.shared} bytes of static shared memory; {STATIC_SHARED} at most"
        return None


def sections(elf: bytes) -> dict[str, bytes]:
    """Returns the sections of a file in ELF64, by name."""
    (table,), (size, count, names) = (
        struct.unpack_from(form, elf, at) for form, at in (("<Q", 0x28), ("<3H", 0x3A))
    )
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]

    def name(at: int) -> str:
        begin = headers[names][4] + at
        return elf[begin : elf.index(b"\0", begin)].decode()

    return {name(at): elf[offset : offset + n] for at, _, _, _, offset, n in headers}


def launch_bounds(cubin: bytes) -> dict[str, int]:
    """Returns the threads of a CTA by kernel."""
    found = {}
    for section, records in sections(cubin).items():
        at = 0
        while section.startswith(_INFO) and at < len(records):
            form, attribute, size = struct.unpack_from("<BBH", records, at)
            if (form, attribute) == (_SIZED, _MAX_THREADS):
                found[section.removeprefix(_INFO)] = math.prod(
                    struct.unpack_from("<3I", records, at + 4)
                )
            at += 4 + (size if form == _SIZED else 0)
    return found


def parse(arch: str, resources: str, threads: Mapping[str, int]) -> list[Kernel]:
    """Reads the kernels that `cuobjdump -res-usage` prints of a cubin, with their launch bounds."""
    entries = _ENTRY.findall(resources)
    names = sass.demangled([name for name, *_ in entries])
    return [
        Kernel(arch, names[name], threads.get(name, 0), *map(int, numbers))
        for name, *numbers in entries
    ]


def kernels_of(library: Path) -> list[Kernel]:
    """Returns the kernels of all machine code in the library. Raises sass.Failure."""
    if shutil.which("c++filt") is None:
        raise sass.Failure("there is no c++filt on PATH, which names kernels")
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(4) as pool:
        sass.tool("cuobjdump", "-xelf", "all", library.resolve(), folder=Path(folder))
        cubins = sorted(Path(folder).glob("*.cubin"))

        def of(cubin: Path) -> list[Kernel]:
            arch = re.search(r"\.sm_(\w+)\.cubin$", cubin.name)[1]
            resources = sass.tool("cuobjdump", "-res-usage", cubin)
            return parse(arch, resources, launch_bounds(cubin.read_bytes()))

        found = [kernel for each in pool.map(of, cubins) for kernel in each]
    if not found:
        raise sass.Failure(f"{library} has no machine code of kernels")
    return found


def architectures(text: str) -> set[str]:
    """Returns those that lib/cuda/meson.build compiles, exact ones with their letter."""
    listed = re.findall(r"'archs': \[([^\]]+)\]", text)
    exact = re.findall(r"'beside': '(\d+)'", text)
    return {*re.findall(r"\d+", " ".join(listed)), *(f"{arch}a" for arch in exact)}


def build_info(library: Path) -> dict[str, str]:
    loaded = ctypes.CDLL(str(library.resolve()))
    loaded.nf4_build_info.restype = ctypes.c_char_p
    lines = loaded.nf4_build_info().decode().splitlines()
    return dict(line.split(": ", 1) for line in lines)


# ---- The table --------------------------------------------------------------------------


def stacks(kernels: Iterable[Kernel]) -> dict[str, dict[str, int]]:
    """Returns the bytes of each stack frame, by architecture and kernel."""
    found: dict[str, dict[str, int]] = {}
    for each in kernels:
        if each.stack:
            of_arch = found.setdefault(each.arch, {})
            of_arch[each.name] = max(each.stack, of_arch.get(each.name, 0))
    return {arch: dict(sorted(found[arch].items())) for arch in sorted(found)}


Stacks = Mapping[str, Mapping[str, int]]  # bytes by architecture and kernel


def over(found: Stacks, allowed: Stacks) -> list[str]:
    """Lists the stack frames that are not in the table, or larger than there, a line each."""
    return [
        f"sm_{arch} {name}: a stack frame of {size} bytes; {allowed.get(arch, {}).get(name, 0)} in "
        f"the table"
        for arch, of_arch in found.items()
        for name, size in of_arch.items()
        if size > allowed.get(arch, {}).get(name, 0)
    ]


def table_of(kernels: list[Kernel], compiler: str) -> dict:
    by_arch: dict[str, list[Kernel]] = {}
    for each in kernels:
        by_arch.setdefault(each.arch, []).append(each)
    return {
        "sources": source_hash(ROOT, SOURCES),
        "compiler": compiler,
        "architectures": {
            arch: {
                "kernels": len(by_arch[arch]),
                "registers": max(each.registers for each in by_arch[arch]),
                "shared": max(each.shared for each in by_arch[arch]),
            }
            for arch in sorted(by_arch)
        },
        "stack": stacks(kernels),
    }


def missing(kernels: Iterable[Kernel]) -> set[str]:
    """Returns the architectures of which there is no code."""
    known = architectures((ROOT / "lib" / "cuda" / "meson.build").read_text())
    return known - {each.arch for each in kernels}


def complaints(kernels: list[Kernel], table: Path | None) -> list[str]:
    """Lists the kernels that do not fit. In a library with every architecture a kernel also fits
    only with a stack frame that the table has, if a table is given."""
    found = [f"sm_{each.arch} {each.name}: {why}" for each in kernels if (why := each.problem())]
    if table is not None and not missing(kernels):
        allowed = json.loads(table.read_text())["stack"] if table.exists() else {}
        found += over(stacks(kernels), allowed)
    return found


def require_whole(kernels: list[Kernel], library: Path) -> None:
    """Raises sass.Failure for a library without every architecture."""
    if archs := missing(kernels):
        raise sass.Failure(f"{library} has no code for {', '.join(sorted(archs))}")


def write(kernels: list[Kernel], library: Path, table: Path) -> None:
    require_whole(kernels, library)
    made = table_of(kernels, build_info(library)["cuda"])
    table.write_text(json.dumps(made, indent=1) + "\n")


def grown(before: Iterable[Kernel], after: Iterable[Kernel]) -> list[str]:
    """Lists the kernels that only one of two builds has, or that take more than before."""
    was = {(each.arch, each.name): each for each in before}
    now = {(each.arch, each.name): each for each in after}
    found = [f"sm_{arch} {name}: in one build alone" for arch, name in sorted(was.keys() ^ now)]
    for key in sorted(was.keys() & now):
        more = [
            f"{field} {getattr(was[key], field)} -> {getattr(now[key], field)}"
            for field in ("threads", "registers", "stack", "shared")
            if getattr(now[key], field) > getattr(was[key], field)
        ]
        found += [f"sm_{key[0]} {key[1]}: {', '.join(more)}"] if more else []
    return found


def keep(table: Path) -> None:
    """Says that the table is of this code."""
    kept = json.loads(table.read_text()) | {"sources": source_hash(ROOT, SOURCES)}
    table.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="make the table anew, if all fits")
    action.add_argument(
        "--accept", action="store_true", help="make the table anew, with any stack frames"
    )
    action.add_argument(
        "--same-as", type=Path, metavar="BEFORE", help="keep the table, if no kernel takes more"
    )
    arguments = parser.parse_args()
    try:
        kernels = kernels_of(arguments.library)
        wrong = complaints(kernels, None if arguments.accept else TABLE)
        if arguments.same_as:
            before = kernels_of(arguments.same_as)
            require_whole(before, arguments.same_as)
            require_whole(kernels, arguments.library)
            wrong += grown(before, kernels)
            if not wrong:
                keep(TABLE)
        if (arguments.write or arguments.accept) and not wrong:
            write(kernels, arguments.library, TABLE)
    except sass.Failure as failure:
        print(f"kernels: {failure}", file=sys.stderr)
        return 2
    print("\n".join([*wrong, f"{len(kernels)} kernels, {len(wrong)} that do not fit"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
