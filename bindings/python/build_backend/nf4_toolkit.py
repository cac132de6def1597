"""Composes a CUDA toolkit whose programs run with drivers of CUDA 12 and later.

The wheels of CUDA 12 have the assembler and the runtime, but no nvcc. The toolkit compiles kernels
to PTX by CUDA 13 and its headers, so the PTX is that of nvcc 13. ptxas and the static runtime are
of 12.9, with the headers for the host's code: drivers of CUDA 12 load neither the cubins of ptxas
13, nor PTX of version 9.0, nor a runtime of CUDA 13.

    toolkit/bin/nvcc         a copy, as nvcc looks for its files beside itself
    toolkit/bin/ptxas        of 12.9
    toolkit/bin/fatbinary    runs that of 13, and sets the version of PTX that the library keeps
    toolkit/nvvm/bin/cicc    runs that of 13, and sets the version of its PTX for ptxas
    toolkit/include          of 13, for kernels
    toolkit/runtime/include  of 12.9, for the host (lib/cuda/meson.build)
    toolkit/lib64            of 12.9
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import tempfile
from pathlib import Path

_BESIDE_NVCC = ("bin2c", "crt", "cudafe++", "nvlink")
# PTX of CUDA 13 is PTX of 12.9 but for its version, or ptxas refuses it.
_CICC = """\
#!/bin/sh
{program} "$@" || exit
for argument; do
  [ "$previous" != -o ] || sed -i 's/^\\.version [0-9.]*/.version 8.8/' "$argument"
  previous=$argument
done
"""
# PTX that a library keeps for GPUs to come gets the first version that knows its architecture,
# which its first driver compiles: 8.0, of CUDA 12.0, is the oldest (PTX ISA, "Release Notes"). The
# pragma is of 8.3: it tells ptxas which bytes of a load are used, and nothing needs it. The default
# of CUDA 13 compresses by zstd, which drivers before 12.4 do not unpack; "speed" is LZ4.
_FATBINARY = """\
#!/bin/sh
for argument; do
  case $argument in --image3=kind=ptx,*) ;; *) continue ;; esac
  case $argument in
    *,sm=[789]?,* | *,sm=90a,*) version=8.0 ;;
    *,sm=100*) version=8.6 ;;
    *,sm=120*) version=8.7 ;;
    *) continue ;;
  esac
  file=${{argument#*,file=}}
  sed -i "s/^\\.version [0-9.]*/.version $version/; /\\.pragma .used_bytes_mask /d" "$file"
done
case " $* " in *' --compress-mode='*) ;; *) set -- --compress-mode=speed "$@" ;; esac
exec {program} "$@"
"""


def _wrap(path: Path, script: str, program: Path) -> None:
    path.write_text(script.format(program=shlex.quote(str(program))))
    path.chmod(0o755)


def _fill(toolkit: Path, cuda13: Path, ptxas: Path, runtime: Path) -> None:
    (toolkit / "bin").mkdir()
    for name in ("nvcc", "nvcc.profile"):
        shutil.copy2(cuda13 / "bin" / name, toolkit / "bin" / name)
    for name in _BESIDE_NVCC:
        (toolkit / "bin" / name).symlink_to(cuda13 / "bin" / name)
    (toolkit / "bin" / "ptxas").symlink_to(ptxas)
    (toolkit / "nvvm" / "bin").mkdir(parents=True)
    (toolkit / "nvvm" / "libdevice").symlink_to(cuda13 / "nvvm" / "libdevice")
    _wrap(toolkit / "nvvm" / "bin" / "cicc", _CICC, cuda13 / "nvvm" / "bin" / "cicc")
    _wrap(toolkit / "bin" / "fatbinary", _FATBINARY, cuda13 / "bin" / "fatbinary")
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
    digest = hashlib.sha256(repr((_CICC, _FATBINARY, cuda13, ptxas, runtime)).encode()).hexdigest()
    toolkit = folder / f"cuda12-{digest[:16]}"
    if toolkit.exists():
        return toolkit
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        whole = Path(beside) / "toolkit"
        whole.mkdir()
        _fill(whole, cuda13, ptxas, runtime)
        try:
            os.rename(whole, toolkit)
        except OSError:
            if not toolkit.exists():  # else another process was first
                raise
    return toolkit
