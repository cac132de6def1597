"""What the linker and the compiler put around a shared library's code (SECURITY.md).

    hardening.py [--fortified] LIBRARY...

--fortified: an optimized library, which has to call the C library's checked functions.
"""

import argparse
import re
import subprocess
from pathlib import Path

from tap import Tap


def readelf(option: str, path: Path) -> str:
    command = ["readelf", option, "-W", path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def check(tap: Tap, path: Path, fortified: bool) -> None:
    segments, dynamic = readelf("-l", path), readelf("-d", path)
    undefined = set(re.findall(r"\bUND (\w+)", readelf("--dyn-syms", path)))

    def demand(name: str, holds: object, found: str) -> None:
        tap.check(f"{path.name}: {name}", None if holds else f"{path}\n{found}")

    stack = re.findall(r"GNU_STACK .* (R\w*) +0x", segments)
    demand("the stack is not executable", stack == ["RW"], segments)
    both = re.findall(r"^ +LOAD .* (RWE) +0x", segments, re.MULTILINE)
    demand("no segment is writable and executable", not both, segments)
    demand("relocations are read-only after loading", "GNU_RELRO" in segments, segments)
    demand("all symbols are bound at loading", re.search(r"FLAGS.*\bNOW\b", dynamic), dynamic)
    demand("code is not relocated", "TEXTREL" not in dynamic, dynamic)
    paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic)
    demand("names no folder to search for libraries", not paths, dynamic)
    named = re.findall(r"\(NEEDED\).*\[(.*/.*)\]", dynamic)
    demand("needs no library by its path", not named, dynamic)
    demand("has a stack protector", "__stack_chk_fail" in undefined, f"{sorted(undefined)}")
    if fortified:
        checked = [each for each in undefined if re.fullmatch(r"__\w+_chk", each)]
        demand("calls checked functions", checked, f"{sorted(undefined)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fortified", action="store_true")
    parser.add_argument("libraries", type=Path, nargs="+", metavar="LIBRARY")
    options = parser.parse_args()
    tap = Tap()
    for path in options.libraries:
        check(tap, path, options.fortified)
    tap.finish()


if __name__ == "__main__":
    main()
