"""Each header of lib/ compiles alone, with nothing included before it."""

import argparse
import concurrent.futures
import functools
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from compilers import complaint
from tap import Tap

FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]
# A header of vector kernels compiles with their flags; the compilers' own warn of themselves.
VECTORS = "<immintrin.h>"
ARM_VECTORS = "<arm_neon.h>"
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


def read_by_kernels(lib: Path) -> set[Path]:
    """What sources of kernels include, and what that includes."""
    found: set[Path] = set()
    todo = [path for path in lib.rglob("*") if path.suffix in {".cu", ".cuh"}]
    while todo:
        path = todo.pop()
        if path not in found and path.exists():
            found.add(path)
            todo += [lib / target for target in INCLUDE.findall(path.read_text())]
    return found


def nvcc_complaint(nvcc: str, flags: list[str], unit_name: str, source: str) -> str | None:
    """As `complaint`, with nvcc, which reads no standard input."""
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder) / unit_name
        unit.write_text(source)
        command = [nvcc, "-std=c++17", *flags, str(unit), "-o", f"{unit}.out"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if run.returncode == 0 else run.stderr + run.stdout


def cuda_complaint(
    header: Path, nvcc: str, includes: list[str], source: str, of_kernels: bool
) -> str | None:
    """To PTX, where __CUDA_ARCH__ is defined, if kernels are compiled with it; a .hpp, which .cpp
    files include, by the host's compiler, too. A .cuh is read without __CUDA_ARCH__ where a .hpp
    includes it alone: nvcc's own pass for the host would take as long again as that to PTX."""
    on_device = ["-arch=sm_75", "-ptx", *includes]
    on_host = ["-Xcompiler=-fsyntax-only", "-c", *includes]
    wrong = nvcc_complaint(nvcc, on_device, "unit.cu", source) if of_kernels else None
    if wrong is None and header.suffix == ".hpp":
        wrong = nvcc_complaint(nvcc, on_host, "unit.cpp", source)
    return wrong


def check_of(
    header: Path, lib: Path, cxx: str, nvcc: str, includes: list[str], of_kernels: bool
) -> Callable[[], str | None] | str:
    """What compiles the header and returns the complaint, or why it is skipped."""
    source = f'#include "{header.relative_to(lib)}"\n'
    vectors = VECTORS in header.read_text()
    if vectors and platform.machine() != "x86_64":
        return "has instructions of x86"
    if ARM_VECTORS in header.read_text() and platform.machine() != "aarch64":
        return "has instructions of Arm"
    if not needs_cuda(header, lib):
        flags = ["-xc++", "-fsyntax-only", *FLAGS, *(VECTOR_FLAGS * vectors), *includes]
        return functools.partial(complaint, cxx, flags, source)
    if nvcc:
        return functools.partial(cuda_complaint, header, nvcc, includes, source, of_kernels)
    return "needs nvcc, and this build has no CUDA"


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
    headers = sorted(path for path in lib.rglob("*") if path.suffix in {".hpp", ".cuh"})
    kernels = read_by_kernels(lib)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        checks = [
            check_of(each, lib, options.cxx, options.nvcc, includes, each in kernels)
            for each in headers
        ]
        results = [each if isinstance(each, str) else pool.submit(each) for each in checks]
        for header, result in zip(headers, results, strict=True):
            name = str(header.relative_to(lib))
            if isinstance(result, str):
                tap.skip(name, result)
            else:
                tap.check(name, result.result())
    tap.finish()


if __name__ == "__main__":
    main()
