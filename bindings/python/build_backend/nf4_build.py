"""The build backend for pip: meson-python, and nvcc from wheels.

A build uses the nvcc of CUDACXX or PATH. Where there is none, nvcc's wheels are build
requirements. NF4_CUDA=0 in the environment builds for the CPU alone.

    python nf4_build.py               shell lines that set up the nvcc of installed wheels
    python nf4_build.py requirements  the wheels; nothing where the machine has none
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

# nvcc does not require the last one, whose headers it needs.
CUDA_WHEELS = [
    f"nvidia-{part}==13.0.*"
    for part in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime", "cuda-cccl")
]
_HAVE_WHEELS = ("Linux-x86_64", "Linux-aarch64")
# Those that Meson tries.
_CPP_COMPILERS = ("c++", "g++", "clang++", "nvc++", "pgc++", "icpc", "icpx")


def cuda_wanted() -> bool:
    return os.environ.get("NF4_CUDA", "1") != "0"


def system_nvcc() -> str | None:
    """The installed nvcc, wheels aside. Raises FileNotFoundError for a CUDACXX that names no
    program, as no other compiler was asked for."""
    chosen = os.environ.get("CUDACXX")
    found = shutil.which(chosen or "nvcc")
    if chosen and not found:
        raise FileNotFoundError(f"CUDACXX is {chosen}, which is not a program")
    return found


def wheel_root() -> Path | None:
    """Where the wheels installed nvcc for this Python."""
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cu13")
    roots = [Path(each) for each in spec.submodule_search_locations or []] if spec else []
    return next((root for root in roots if (root / "bin" / "nvcc").exists()), None)


def available_wheels() -> list[str]:
    """CUDA_WHEELS; nothing on a machine that has none."""
    return CUDA_WHEELS if f"{platform.system()}-{platform.machine()}" in _HAVE_WHEELS else []


def cuda_environment() -> dict[str, str]:
    """The variables by which Meson finds nvcc, which it looks for on PATH only. The wheels'
    libraries are in lib, where nvcc does not look. The host compiler, which links for it, finds
    them by LIBRARY_PATH; nvcc's flags cannot name a folder with a space."""
    path = os.environ.get("PATH", os.defpath)
    nvcc = system_nvcc()
    if nvcc:
        return {"PATH": f"{Path(nvcc).absolute().parent}{os.pathsep}{path}"}
    root = wheel_root()
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
    if cuda_wanted() and not system_nvcc():
        requirements = [*requirements, *available_wheels()]
    return requirements


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
    if sys.argv[1:] == ["requirements"]:
        for wheel in available_wheels():
            print(wheel)
        return 0
    try:
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
