"""Each header of lib/ compiles alone, with nothing included before it."""

import argparse
import platform
import re
import subprocess
import tempfile
from pathlib import Path

from compilers import complaint
from tap import Tap

FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]
# A header of vector kernels compiles with their flags; the compilers' own warn of themselves.
VECTORS = "<immintrin.h>"
VECTOR_FLAGS = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-Wno-uninitialized"]
VECTOR_FLAGS += ["-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"](.*)[>"]', re.MULTILINE)


def needs_cuda(header: Path, lib: Path, seen: set[Path] | None = None) -> bool:
    """Whether the header or one that it includes is CUDA's."""
    seen = set() if seen is None else seen
    if header.suffix == ".cuh":
        return True
    seen.add(header)
    targets = INCLUDE.findall(header.read_text())
    if any(target.startswith("cuda") and not (lib / target).exists() for target in targets):
        return True
    inner = {lib / target for target in targets} - seen
    return any(needs_cuda(path, lib, seen) for path in inner if path.exists())


def nvcc_complaint(nvcc: str, flags: list[str], source: str) -> str | None:
    """As `complaint`, with nvcc, which reads no standard input."""
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder) / "unit.cu"
        unit.write_text(source)
        command = [nvcc, "-std=c++17", "-arch=sm_75", *flags, "-c", str(unit), "-o", f"{unit}.o"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if run.returncode == 0 else run.stderr + run.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--generated", type=Path, required=True, help="lib/ of the build folder")
    parser.add_argument("--cxx", required=True)
    parser.add_argument("--nvcc", default="", help="the CUDA compiler, where the build has one")
    options = parser.parse_args()

    tap = Tap()
    lib = options.root / "lib"
    includes = [f"-I{path}" for path in (lib, options.root / "include", options.generated)]
    includes.append(f"-I{options.generated / 'cuda'}")
    for header in sorted(path for path in lib.rglob("*") if path.suffix in {".hpp", ".cuh"}):
        name = str(header.relative_to(lib))
        source = f'#include "{name}"\n'
        vectors = VECTORS in header.read_text()
        if vectors and platform.machine() != "x86_64":
            tap.skip(name, "has instructions of x86")
        elif not needs_cuda(header, lib):
            flags = ["-xc++", "-fsyntax-only", *FLAGS, *(VECTOR_FLAGS * vectors), *includes]
            tap.check(name, complaint(options.cxx, flags, source))
        elif options.nvcc:
            tap.check(name, nvcc_complaint(options.nvcc, includes, source))
        else:
            tap.skip(name, "needs nvcc, and this build has no CUDA")
    tap.finish()


if __name__ == "__main__":
    main()
