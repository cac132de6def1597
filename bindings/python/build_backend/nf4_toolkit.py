"""Composes a CUDA toolkit whose programs run with drivers of CUDA 12 and later.

The wheels of CUDA 12 have the assembler and the runtime, but no nvcc. The toolkit compiles kernels
to PTX by CUDA 13 and its headers, so the PTX is that of nvcc 13. ptxas and the static runtime are
of 12.9, with the headers for the host's code: drivers of CUDA 12 load neither the cubins of ptxas
13, nor PTX of version 9.0, nor a runtime of CUDA 13.

    toolkit/bin/nvcc         a copy, as nvcc looks for its files beside itself
    toolkit/bin/ptxas        of 12.9
    toolkit/bin/fatbinary    runs that of 13 for drivers of CUDA 12 (nf4_fatbin.py)
    toolkit/nvvm/bin/cicc    runs that of 13 for ptxas 12.9 (nf4_fatbin.py)
    toolkit/include          of 13, for kernels
    toolkit/runtime/include  of 12.9, for the host (lib/cuda/meson.build)
    toolkit/lib64            of 12.9
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

_BESIDE_NVCC = ("bin2c", "crt", "cudafe++", "nvlink")
_FATBIN = Path(__file__).with_name("nf4_fatbin.py")
# The Python of the build runs the module, because it has lz4.
_WRAPPER = """\
#!/bin/sh
exec {python} {module} {name} {program} "$@"
"""


def _wrap(path: Path, module: Path, program: Path) -> None:
    words = dict(python=sys.executable, module=module, name=program.name, program=program)
    quoted = {word: shlex.quote(str(value)) for word, value in words.items()}
    path.write_text(_WRAPPER.format(**quoted))
    path.chmod(0o755)


def _fill(toolkit: Path, at: Path, cuda13: Path, ptxas: Path, runtime: Path) -> None:
    """at: where the toolkit will lie."""
    (toolkit / "bin").mkdir()
    for name in ("nvcc", "nvcc.profile"):
        shutil.copy2(cuda13 / "bin" / name, toolkit / "bin" / name)
    for name in _BESIDE_NVCC:
        (toolkit / "bin" / name).symlink_to(cuda13 / "bin" / name)
    (toolkit / "bin" / "ptxas").symlink_to(ptxas)
    (toolkit / "nvvm" / "bin").mkdir(parents=True)
    (toolkit / "nvvm" / "libdevice").symlink_to(cuda13 / "nvvm" / "libdevice")
    shutil.copy2(_FATBIN, toolkit / "nf4_fatbin.py")
    for program in ("bin/fatbinary", "nvvm/bin/cicc"):
        _wrap(toolkit / program, at / "nf4_fatbin.py", cuda13 / program)
    (toolkit / "include").symlink_to(cuda13 / "include")
    (toolkit / "runtime").mkdir()
    (toolkit / "runtime" / "include").symlink_to(runtime / "include")
    (toolkit / "lib64").symlink_to(runtime / "lib")


def compose(folder: Path, cuda13: Path, ptxas: Path, runtime: Path) -> Path:
    """Returns the toolkit of these parts, which lies in the folder. cuda13 is the root of a toolkit
    of CUDA 13, and runtime that of the headers and libraries. Raises FileNotFoundError for a part
    that is missing."""
    cuda13, ptxas, runtime = cuda13.resolve(), ptxas.resolve(), runtime.resolve()
    for part in (
        *(cuda13 / "bin" / name for name in ("nvcc", "nvcc.profile", "fatbinary", *_BESIDE_NVCC)),
        *(cuda13 / "nvvm" / name for name in ("bin/cicc", "libdevice")),
        cuda13 / "include" / "crt" / "host_runtime.h",
        *(runtime / name for name in ("include/cuda_runtime.h", "lib/libcudart_static.a")),
        ptxas,
    ):
        if not part.exists():
            raise FileNotFoundError(f"there is no {part}, which a build for CUDA 12 needs")
    made_of = (_WRAPPER, _FATBIN.read_text(), sys.executable, cuda13, ptxas, runtime)
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()
    toolkit = folder / f"cuda12-{digest[:16]}"
    if toolkit.exists():
        return toolkit
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        whole = Path(beside) / "toolkit"
        whole.mkdir()
        _fill(whole, toolkit, cuda13, ptxas, runtime)
        try:
            os.rename(whole, toolkit)
        except OSError:
            if not toolkit.exists():  # else another process was first
                raise
    return toolkit
