"""The build backend for pip: meson-python, and nvcc from wheels.

A build uses the nvcc of CUDACXX or PATH. Where there is none, nvcc's wheels are build
requirements, and the library is for drivers of CUDA 12 and later: ptxas and the runtime are those
of more wheels, and lz4 compresses the kernels (nf4_toolkit.py). NF4_CUDA_RUNTIME then names a
folder with another machine's runtime.

NF4_CUDA_DRIVER in the environment, 12 or 13, says which drivers are to load the library: 12 takes
those wheels beside an nvcc 13 of PATH, too, and 13 takes none. NF4_CUDA=0 builds for the CPU alone.

    python nf4_build.py               shell lines that set up the nvcc of installed wheels
    python nf4_build.py requirements  the wheels that such a build needs beside the installed nvcc
    python nf4_build.py all           the wheels that any build may need
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import nf4_toolkit

# nvcc does not require the last one, whose headers it needs.
CUDA_WHEELS = [
    f"nvidia-{part}==13.0.*"
    for part in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime", "cuda-cccl")
]
# The last of CUDA 12, which know every architecture, and what nf4_fatbin.py compresses with.
CUDA_12_WHEELS = ["nvidia-cuda-nvcc-cu12==12.9.*", "nvidia-cuda-runtime-cu12==12.9.*", "lz4>=4.3"]
_HAVE_WHEELS = ("Linux-x86_64", "Linux-aarch64")
# The compilers that Meson tries.
_CPP_COMPILERS = ("c++", "g++", "clang++", "nvc++", "pgc++", "icpc", "icpx")


def cuda_wanted() -> bool:
    return os.environ.get("NF4_CUDA", "1") != "0"


def for_cuda_12(nvcc: str | None) -> bool:
    """Whether drivers of CUDA 12 are to load the library. nvcc: the installed one, wheels aside.
    Raises SystemExit for a value of the variable without a meaning."""
    driver = os.environ.get("NF4_CUDA_DRIVER")
    if driver not in (None, "12", "13"):
        raise SystemExit(f"libnf4: NF4_CUDA_DRIVER is {driver}, which is neither 12 nor 13")
    return nvcc is None if driver is None else driver == "12"


def system_nvcc() -> str | None:
    """The installed nvcc, wheels aside. Raises FileNotFoundError for a CUDACXX that names no
    program, as no other compiler was asked for."""
    chosen = os.environ.get("CUDACXX")
    found = shutil.which(chosen or "nvcc")
    if chosen and not found:
        raise FileNotFoundError(f"CUDACXX is {chosen}, which is not a program")
    return found


def _installed(part: str, file: str) -> Path | None:
    """The folder of a part of NVIDIA's wheels, by a file in it."""
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec(f"nvidia.{part}")
    roots = [Path(each) for each in spec.submodule_search_locations or []] if spec else []
    return next((root for root in roots if (root / file).exists()), None)


def wheel_root() -> Path | None:
    """Where the wheels installed nvcc for this Python."""
    return _installed("cu13", "bin/nvcc")


def available_wheels() -> list[str]:
    """The wheels that a build may need; nothing on a machine that has none."""
    have = f"{platform.system()}-{platform.machine()}" in _HAVE_WHEELS
    return [*CUDA_WHEELS, *CUDA_12_WHEELS] if have else []


def required_wheels() -> list[str]:
    """Those that this build needs beside the installed nvcc."""
    nvcc = system_nvcc()
    needed = [] if nvcc else CUDA_WHEELS
    if for_cuda_12(nvcc) and (nvcc is None or _major_version(nvcc) > 12):
        needed = [*needed, *CUDA_12_WHEELS]
    return [each for each in available_wheels() if each in needed]


def _major_version(nvcc: str) -> int:
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+)\.", said)
    if found is None:
        raise SystemExit(f"libnf4: {nvcc} --version does not say which CUDA it is of")
    return int(found[1])


def _toolkit_folders(wheels: Path) -> list[Path]:
    """Where a toolkit may lie: beside the wheels, or in the user's cache if that is read-only."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    homes = [Path(cache) / "libnf4"] if os.path.isabs(cache) else []
    return [each / "nf4_toolkit" for each in (wheels, *homes)]


def _toolkit(nvcc: str) -> str:
    """The nvcc for drivers of CUDA 12: this one, or that of a toolkit composed with it. Raises
    SystemExit where there is none."""
    if _major_version(nvcc) <= 12:
        return nvcc
    assembler = _installed("cuda_nvcc", "bin/ptxas")
    given = os.environ.get("NF4_CUDA_RUNTIME")
    runtime = Path(given) if given else _installed("cuda_runtime", "lib/libcudart_static.a")
    if assembler is None or runtime is None or importlib.util.find_spec("lz4") is None:
        raise SystemExit(
            f"libnf4: a library for drivers of CUDA 12 needs {', '.join(CUDA_12_WHEELS)}; "
            "NF4_CUDA_DRIVER=13 builds one for those of CUDA 13"
        )
    root = Path(nvcc).resolve().parents[1]
    folders = _toolkit_folders(assembler.parents[1])
    if root.parent in [folder.resolve() for folder in folders]:  # composed before
        return nvcc
    failures = []
    for folder in folders:
        try:
            parts = root, assembler / "bin" / "ptxas", runtime
            return str(nf4_toolkit.compose(folder, *parts) / "bin" / "nvcc")
        except OSError as error:
            failures.append(str(error))
    raise SystemExit(
        "libnf4: no toolkit for drivers of CUDA 12 can be composed: "
        f"{'; '.join(dict.fromkeys(failures))}; NF4_CUDA_DRIVER=13 builds a library for those of "
        "CUDA 13 without one"
    )


def cuda_environment() -> dict[str, str]:
    """The variables by which Meson finds nvcc, which it looks for on PATH only. The wheels'
    libraries are in lib, where nvcc does not look. The host compiler, which links for it, finds
    them by LIBRARY_PATH; nvcc's flags cannot name a folder with a space."""
    path = os.environ.get("PATH", os.defpath)
    nvcc, root = system_nvcc(), wheel_root()
    if (nvcc or root) and for_cuda_12(nvcc):
        nvcc = _toolkit(nvcc or str(root / "bin" / "nvcc"))
    if nvcc:
        return {"PATH": f"{Path(nvcc).absolute().parent}{os.pathsep}{path}"}
    if root is None:
        return {}
    # An empty entry would be the working directory.
    libraries = [str(root / "lib"), *filter(None, [os.environ.get("LIBRARY_PATH")])]
    return {
        "PATH": f"{root / 'bin'}{os.pathsep}{path}",
        "LIBRARY_PATH": os.pathsep.join(libraries),
    }


def _interpreter_settings() -> list[str]:
    """The extension module is built for the stable ABI, which free-threaded Python lacks."""
    free_threaded = sysconfig.get_config_var("Py_GIL_DISABLED")
    return ["-Dpython.allow_limited_api=false"] if free_threaded else []


def _say_what_takes_long() -> None:
    """On the terminal, if there is one: pip shows nothing of what a build prints."""
    text = (
        "libnf4: compiling CUDA kernels, some minutes on each core "
        "(NF4_CUDA=0 leaves them out; "
        "--config-settings=setup-args=-Dgpu_archs=90 compiles for one GPU)"
    )
    try:
        with open("/dev/tty", "w") as terminal:
            print(text, file=terminal)
    except OSError:
        print(text, file=sys.stderr)


def _need_cpp_compiler(setup_args: list[str]) -> None:
    """Raises SystemExit where there is none, without which nvcc does not run either. One sentence
    in place of Meson's list of what it tried. A file for Meson may name another."""
    if any(each.startswith(("--native-file", "--cross-file")) for each in setup_args):
        return
    if not os.environ.get("CXX") and not any(map(shutil.which, _CPP_COMPILERS)):
        raise SystemExit(
            "libnf4: no C++ compiler on PATH, which building from source needs; install one (on "
            "Debian and Ubuntu: apt install g++), or install a wheel of libnf4, which needs none"
        )


def _prepared(settings: dict[str, Any] | None) -> dict[str, Any]:
    """Sets the environment and returns the settings with the cuda option in front."""
    prepared = dict(settings or {})
    given = prepared.get("setup-args", [])
    given = [given] if isinstance(given, str) else list(given)
    _need_cpp_compiler(given)
    environment = cuda_environment() if cuda_wanted() else {}
    os.environ.update(environment)
    cuda = "disabled" if not cuda_wanted() else "enabled" if environment else "auto"
    if environment:
        _say_what_takes_long()
    prepared["setup-args"] = [f"-Dcuda={cuda}", *_interpreter_settings(), *given]
    return prepared


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    import mesonpy

    requirements = mesonpy.get_requires_for_build_wheel(config_settings)
    return [*requirements, *(required_wheels() if cuda_wanted() else [])]


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    import mesonpy

    return mesonpy.build_wheel(wheel_directory, _prepared(config_settings), metadata_directory)


def build_sdist(sdist_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    import mesonpy

    # Nothing is compiled for it.
    settings = {
        "setup-args": ["-Dcuda=disabled", *_interpreter_settings()],
        **(config_settings or {}),
    }
    return mesonpy.build_sdist(sdist_directory, settings)


def main() -> int:
    try:
        if sys.argv[1:] in (["requirements"], ["all"]):
            wheels = available_wheels() if sys.argv[1] == "all" else required_wheels()
            print(*wheels, sep="\n", end="\n" if wheels else "")
            return 0
        environment = cuda_environment()
    except FileNotFoundError as error:
        print(f"nf4_build: {error}", file=sys.stderr)
        return 1
    for name, value in environment.items():
        print(f"export {name}={shlex.quote(value)}")
    if not environment:
        print("nf4_build: no nvcc on PATH, in CUDACXX or in wheels", file=sys.stderr)
    return 0 if environment else 1


if __name__ == "__main__":
    sys.exit(main())
