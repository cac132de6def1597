"""nf4 doctor: says which kernels run on this machine, and why."""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import nf4
from nf4 import _costs, _paths
from nf4._formats import SCALE_RULES
from nf4._load import library as load_library
from nf4.checkpoint.errors import printable
from nf4.cli import doctor_bitsandbytes
from nf4.cli.console import add_command, print_json, show, size_text
from nf4.cli.exits import Exit
from nf4.tuning.report import PRODUCTS

_DESCRIPTION = """\
Report the library, the CPU and the GPUs, which kernels run on them and why. Exit code 0 if the
library can be used at least on the CPU.
"""
# The CPU features that each variant needs (lib/cpu), by their names in /proc/cpuinfo.
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
_NEEDS = {
    "x86_64": {
        "avx512bf16": (*_AVX512, "avx512_bf16"),
        "avx512": _AVX512,
        "avx2": ("avx2", "fma", "f16c"),
    },
    "aarch64": {"neonbf16": ("bf16",), "neon": ("asimd",)},
}
# The first Linux driver for each CUDA version, from the release notes of its toolkit.
_DRIVERS = {12: "525.60.13", 13: "580.65.06"}
# The first driver branch for GPUs from a compute capability on: that of the first CUDA version
# whose compilers know it (tools/cuda_images.py).
_BRANCHES = {(10, 0): "570", (10, 3): "575", (11, 0): "580", (12, 0): "570", (12, 1): "575"}
# The oldest compute capability that has kernels (lib/cuda/meson.build).
_OLDEST_GPU = (7, 5)
_KINDS = {"nf4": "NF4 and FP4", "int4": "integers"}
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_PACKAGES = ("numpy", "ml_dtypes", "safetensors", "torch", "bitsandbytes", "transformers")


def add_parser(commands: Any) -> None:
    add_command(
        commands, "doctor", run, "show which kernels run on this machine, and why", _DESCRIPTION
    )


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return set(flags.partition(":")[2].split())


def _cpu_reason(variant: str, built: str) -> str:
    """Says why this CPU variant runs and not a faster one."""
    flags = _cpu_flags()
    reasons = []
    for better, needs in _NEEDS.get(platform.machine(), {}).items():
        if better == variant:
            break
        missing = [flag for flag in needs if flag not in flags]
        if better not in built:
            reasons.append(f"{better} is not in this build")
        elif missing:
            reasons.append(f"{better} needs {', '.join(missing)}, which this CPU lacks")
    return "; ".join(reasons) or "the fastest in this build for this CPU"


def _gpus(first: nf4.Device, files: Sequence[_costs.CostsFile] = ()) -> list[dict[str, Any]]:
    """Returns a row for each GPU; `first` is device_info(0), and `files` are those of costs."""
    if first.device_count == 0:
        return []
    found = [first, *(nf4.device_info(index) for index in range(1, first.device_count))]
    alone, driver = not any(device.usable for device in found), _installed_driver()
    return [
        {
            "index": device.index,
            "name": device.name,
            "usable": device.usable,
            "reason": _not_used(device, alone),
            "compute_capability": ".".join(map(str, device.compute_capability)),
            "multiprocessors": device.multiprocessors,
            "memory_bytes": device.memory_bytes,
            "driver": driver,
            "driver_version": device.driver_version,
            "runtime_version": device.runtime_version,
            "kernels": device.dequant_variant,
            "shared_memory_bytes": device.shared_memory_bytes,
            "timed": device.timed,
            "costs": _costs_of(device, files),
            **_fused(device),
        }
        for device in found
    ]


def _costs_of(device: nf4.Device, files: Sequence[_costs.CostsFile]) -> dict[str, Any]:
    """Returns which products have costs that were measured on this GPU."""
    line = _costs.gpu_line(device)
    used = next((file for file in files if file.gpu_line == line), None)
    return {"path": str(used.path) if used else None, "products": used.products if used else []}


def _fused(device: nf4.Device) -> dict[str, dict[str, Any]]:
    """Returns the rows of x that libnf4's own kernels take, by kind of weight. "fused_rows" has the
    most, None for any number. "fused_from" has the fewest, of the kinds that they take at all."""
    kinds = _KINDS if device.usable else ()
    most = {kind: _paths.fused_rows(kind, device.index) for kind in kinds}
    least = {kind: _paths.fused_from(kind, device.index) for kind in most if most[kind] != 0}
    return {"fused_rows": most, "fused_from": least}


def _costs_not_used(first: nf4.Device, files: Sequence[_costs.CostsFile]) -> list[dict[str, str]]:
    """Returns the files of costs that are faulty, or of no GPU of this machine."""
    gpus = [nf4.device_info(index) for index in range(first.device_count)]
    lines, found = {_costs.gpu_line(gpu) for gpu in gpus}, []
    for file in files:
        reason = file.reason or ("" if file.gpu_line in lines else f"there is no {file.gpu_line}")
        if reason:
            found.append({"path": str(file.path), "reason": reason})
    return found


def _not_used(device: nf4.Device, alone: bool) -> str:
    """Says why a GPU is not used, and for one that is too old, what is used instead. alone: no GPU
    is usable."""
    if (0, 0) < device.compute_capability < _OLDEST_GPU:
        oldest = ".".join(map(str, _OLDEST_GPU))
        until = ". Until there is such a GPU the CPU kernels are used" if alone else ""
        needed = f"libnf4 needs compute capability {oldest} (Turing) or later"
        return f"{device.reason}; {needed}{until}"
    return device.reason


def _installed_driver() -> str:
    """Returns the version of the NVIDIA driver, such as "550.54.15"; "" if it is unknown."""
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", _DRIVER_FILE.read_text(errors="replace"))
    except OSError:
        return ""
    return found[0] if found else ""


def _no_gpu(device: nf4.Device) -> str:
    """Says why there is no GPU, and for a driver that is too old, what to do."""
    needed = device.runtime_version // 1000
    if not 0 < device.driver_version < needed * 1000:
        return device.reason
    driver = " ".join(["the NVIDIA driver", *_installed_driver().split()])
    return (
        f"{driver} is for {_cuda_version(device.driver_version)}; this libnf4 needs one for CUDA "
        f"{needed}.0, which is {_DRIVERS.get(needed, 'newer')} or later. Install that; until then "
        f"the CPU kernels are used"
    )


def _packages() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def diagnose() -> dict[str, Any]:
    """Returns what `nf4 doctor --json` prints. "usable": the library can be used."""
    packages = _packages()
    report: dict[str, Any] = {
        "usable": False,
        "python": platform.python_version(),
        "packages": packages,
        "machine": platform.machine(),
    }
    try:
        library = nf4.library_path()
    except nf4.LibraryNotFound as error:
        return {**report, "reason": str(error)}
    files = _costs.load(load_library())
    build, variant, first = nf4.build_info(), nf4.cpu_variant(), nf4.device_info(0)
    return {
        **report,
        "usable": True,
        "library": library,
        "version": nf4.version(),
        "build": build,
        "cpu": {"kernels": variant, "reason": _cpu_reason(variant, build.get("cpu_variants", ""))},
        "gpus": _gpus(first, files),
        "costs_not_used": _costs_not_used(first, files),
        "no_gpu": _no_gpu(first) if first.device_count == 0 else None,
        "bitsandbytes": doctor_bitsandbytes.diagnose(packages["bitsandbytes"]),
    }


def _cuda_version(number: int) -> str:
    return f"CUDA {number // 1000}.{number % 1000 // 10}" if number else "none"


def _gpu_lines(gpu: dict[str, Any]) -> list[str]:
    lines = [
        f"GPU {gpu['index']}      {gpu['name']}, sm_{gpu['compute_capability'].replace('.', '')}, "
        f"{gpu['multiprocessors']} multiprocessors, {size_text(gpu['memory_bytes'])}",
        f"           {_driver_text(gpu)}",
    ]
    if not gpu["usable"]:
        return [*lines, f"           not used: {gpu['reason']}"]
    ways = "; ".join(
        f"{name} {_way(gpu['fused_from'].get(kind, 1), gpu['fused_rows'][kind])}"
        for kind, name in _KINDS.items()
    )
    known = "built in, timed" if gpu["timed"] else "presumed, because libnf4 has not been timed"
    measured = gpu["costs"]["products"]
    costs = f"measured here (nf4 tune): {', '.join(measured) or 'none'}"
    # Only the first ones ever have costs.
    every = *PRODUCTS, *SCALE_RULES, "experts"
    rest = [each for each in every if each not in measured]
    others = f"ways of {', '.join(rest)}" if measured else "these ways"
    return [
        *lines,
        f"           kernels {gpu['kernels']}",
        f"           {costs}",
        f"           products: {ways}",
        f"           {others} are {known} on GPUs of this kind",
    ]


def _branch_of(compute_capability: str) -> str:
    """Returns the driver branch that such a GPU needs, or "" if every driver knows it."""
    capability = tuple(map(int, compute_capability.split(".")))
    known = [each for each in _BRANCHES if each <= capability]
    return _BRANCHES[max(known)] if known else ""


def _driver_text(gpu: dict[str, Any]) -> str:
    """Names the driver, its CUDA version, and the drivers that run this libnf4."""
    name = " ".join(["driver", *gpu["driver"].split()])
    runtime = gpu["runtime_version"]
    first = _DRIVERS.get(runtime // 1000, "newer")
    branch = _branch_of(gpu["compute_capability"])
    is_later = branch and first != "newer" and int(branch) > int(first.partition(".")[0])
    needed = f"; this GPU needs a driver from {branch} on" if is_later else ""
    return (
        f"{name} for {_cuda_version(gpu['driver_version'])}; this libnf4 has the runtime of "
        f"{_cuda_version(runtime)}, for drivers from {first} on{needed}"
    )


def _way(least: int, most: int | None) -> str:
    """Says how products are computed if libnf4's kernels take these numbers of rows of x."""
    dense = "dequantize and a dense product"
    if most is None:
        return "by libnf4's kernels"
    if most == 0:
        return f"by {dense}"
    if least > 1:
        return f"by libnf4's kernels from {least} to {most} rows of x, otherwise {dense}"
    return f"by libnf4's kernels up to {most} rows of x, then {dense}"


def report_lines(report: dict[str, Any]) -> list[str]:
    """Returns the report that `nf4 doctor` prints."""
    versions = ", ".join(
        f"{name} {version or 'not installed'}" for name, version in report["packages"].items()
    )
    python = [f"Python     {report['python']} ({versions})"]
    if not report["usable"]:
        return [f"library    cannot be used: {report['reason']}", *python]
    usable = [gpu for gpu in report["gpus"] if gpu["usable"]]
    lines = [f"library    libnf4 {report['version']}, {report['library']}"]
    lines += [f"           {key}: {value}" for key, value in report["build"].items()]
    lines += [f"CPU        {report['machine']}, kernels {report['cpu']['kernels']}"]
    lines += [f"           {report['cpu']['reason']}"]
    for gpu in report["gpus"]:
        lines += _gpu_lines(gpu)
    lines += [
        f"costs      {each['path']} is not used: {each['reason']}"
        for each in report["costs_not_used"]
    ]
    if report["no_gpu"]:
        lines += [f"GPU        not used: {report['no_gpu']}"]
    on_gpu = f", GPU memory by {usable[0]['kernels']}" if usable else ""
    served = doctor_bitsandbytes.lines(report["bitsandbytes"])
    lines += [*python, *(f"           {line}" for line in served)]
    return [*lines, f"usable     host memory by {report['cpu']['kernels']}{on_gpu}"]


def run(args: argparse.Namespace) -> int:
    report = diagnose()
    if args.json:
        print_json(report)
    else:
        show("\n".join(map(printable, report_lines(report))))
    return Exit.OK if report["usable"] else Exit.FAULT
