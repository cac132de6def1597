"""Includes in lib/ point one way: api -> backends -> problem -> nf4.h, and all of them -> core.

In lib/cpu: backend -> operations -> weight and the files beside backend; what is compiled for an
instruction set sees plain data and isa/ alone.
In lib/cuda: operations -> runtime, weight -> ptx; the kernels of matmul never include each other.
"""

import argparse
import re
from pathlib import Path

from tap import Tap

# The rooms that a file of each room may include. "shared" is what stands beside the rooms and
# belongs to neither backend; "api" is the rest of lib/.
SHARED = {"problem.hpp", "status.hpp", "status.cpp"}
_CPU_OPERATION = {"core", "shared", "header", "cpu", "cpu/weight", "cpu/kernels", "cpu/isa"}
_BACKEND = _CPU_OPERATION | {"cpu/backend.hpp", "cpu/dequant", "cpu/quantize", "cpu/matmul"}
_BELOW_CUDA = {"core", "shared", "header", "cuda"}
_OPERATION = _BELOW_CUDA | {"cuda/ptx", "cuda/runtime", "cuda/weight"}
_PRODUCTS = {
    "cuda/matmul",
    *(f"cuda/matmul/{kernel}" for kernel in ("skinny", "mma", "multistage", "wgmma")),
}
MAY_INCLUDE = {
    "core": {"core", "header"},
    "shared": {"shared", "header"},
    "cpu": {"cpu", "cpu/weight", "core", "shared", "header"},
    "cpu/isa": {"cpu/isa"},
    "cpu/kernels": {"cpu/kernels", "cpu/isa", "header"},
    "cpu/weight": {"cpu/weight", "core", "shared", "header"},
    "cpu/dequant": _CPU_OPERATION | {"cpu/dequant"},
    "cpu/quantize": _CPU_OPERATION | {"cpu/quantize"},
    "cpu/matmul": _CPU_OPERATION | {"cpu/dequant", "cpu/matmul"},
    "cpu/backend.hpp": {"cpu", "shared", "header"},
    "cpu/backend.cpp": _BACKEND,
    "cpu/grouped.cpp": _BACKEND,
    "cpu/path.cpp": _BACKEND,
    "cuda": _BELOW_CUDA,
    "cuda/ptx": _BELOW_CUDA | {"cuda/ptx"},
    "cuda/runtime": _BELOW_CUDA | {"cuda/runtime"},
    "cuda/weight": _BELOW_CUDA | {"cuda/ptx", "cuda/weight"},
    "cuda/dequant": _OPERATION | {"cuda/dequant"},
    "cuda/quantize": _OPERATION | {"cuda/quantize"},
    "cuda/permute": _OPERATION | {"cuda/permute"},
    "cuda/lora": _OPERATION | {"cuda/lora"},
    "cuda/costs": _OPERATION | {"cuda/costs", "cuda/matmul", "cuda/matmul/multistage"},
    "cuda/matmul": _OPERATION | {"cuda/costs", "cuda/lora", "cuda/permute"} | _PRODUCTS,
    "cuda/matmul_grad": _OPERATION | {"cuda/lora", "cuda/matmul_grad"} | _PRODUCTS,
    "cuda/matmul_grouped": _OPERATION
    | {"cuda/lora", "cuda/matmul_grad", "cuda/matmul_grouped"}
    | _PRODUCTS,
    "cuda/kinds": _OPERATION
    | {"cuda/costs", "cuda/dequant", "cuda/lora", "cuda/matmul_grad", "cuda/matmul_grouped"}
    | {"cuda/kinds"}
    | _PRODUCTS,
    "cuda/matmul/skinny": _OPERATION | {"cuda/lora", "cuda/matmul", "cuda/matmul/skinny"},
    "cuda/matmul/mma": _OPERATION | {"cuda/lora", "cuda/matmul", "cuda/matmul/mma"},
    "cuda/matmul/multistage": _OPERATION | {"cuda/lora", "cuda/matmul", "cuda/matmul/multistage"},
    "cuda/matmul/wgmma": _OPERATION | {"cuda/lora", "cuda/matmul", "cuda/matmul/wgmma"},
    "cuda/path.cpp": _OPERATION
    | {"cuda/costs", "cuda/dequant", "cuda/matmul", "cuda/matmul/mma", "cuda/matmul/multistage"}
    | {"cuda/matmul_grouped"},
    "cuda/info.cpp": _OPERATION
    | {"cuda/costs", "cuda/dequant", "cuda/quantize", "cuda/permute", "cuda/lora"}
    | {"cuda/matmul", "cuda/matmul_grouped"},
    "api": {"api", "cpu/backend.hpp", "cuda", "core", "shared", "header"},
}
# The files that are compiled for one instruction set: a function that such a file shared with
# others might be linked in its version, for every machine.
CPU_KERNELS = re.compile(r"cpu/\w+/((avx|neon)\w*\.cpp|kernels\.hpp|(\w+_)?loops\.hpp)")
# The build generates these files; each belongs to a room.
GENERATED = {"nf4_config.hpp": "shared"}
# The only rooms whose code nvcc sees.
CUDA_ROOMS = ("cuda", "core")
CUDA_HEADER = re.compile(r"cuda|cooperative_groups|driver_types|vector_types|mma\.h")
SOURCES = {".cpp", ".hpp", ".h", ".cu", ".cuh", ".inl"}


def room(path: str) -> str:
    """The room of a path relative to lib/."""
    if path == "nf4/nf4.h":
        return "header"
    if "/" not in path:
        return "shared" if path in SHARED else GENERATED.get(path, "api")
    if CPU_KERNELS.fullmatch(path):
        return "cpu/kernels"
    within = [room for room in MAY_INCLUDE if f"{path}/".startswith(f"{room}/")]
    return max(within, key=len, default=path.partition("/")[0])


def faults(source: Path, lib: Path) -> list[str]:
    home = room(str(source.relative_to(lib)))
    if home not in MAY_INCLUDE:
        return [f"lib/{home}/ has no rule here: give it one"]
    found = []
    for number, line in enumerate(source.read_text().splitlines(), 1):
        include = re.match(r'\s*#\s*include\s*([<"])(.*)[>"]', line)
        if not include:
            continue
        bracket, target = include.groups()
        if (lib / target).exists():
            bracket = '"'  # ours, however it is written
        where = f"{source.relative_to(lib.parent)}:{number}: {target}"
        if bracket == "<":
            if CUDA_HEADER.match(target) and not home.startswith(CUDA_ROOMS):
                found.append(f"{where}: a CUDA header outside lib/cuda and lib/core")
        elif ".." in target or (
            target.count("/") == 0 and (source.parent / target).exists() and source.parent != lib
        ):
            found.append(f"{where}: write the path from lib/")
        elif room(target) not in MAY_INCLUDE[home]:
            found.append(f"{where}: {home} may not include {room(target)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    lib = parser.parse_args().root / "lib"

    tap = Tap()
    sources = sorted(path for path in lib.rglob("*") if path.suffix in SOURCES)
    by_room: dict[str, list[str]] = {}
    for source in sources:
        by_room.setdefault(room(str(source.relative_to(lib))), []).extend(faults(source, lib))
    for name, found in sorted(by_room.items()):
        tap.check(f"includes of {name}", "\n".join(found))
    tap.finish()


if __name__ == "__main__":
    main()
