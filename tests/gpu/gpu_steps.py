"""The steps of run.py: the tests of this GPU's kernels, of PTX and of other GPUs' kernels, the
tools of compute-sanitizer, the tests of two GPUs, and the examples. A step is told which GPU it may
use. It returns its counts, or raises Failure."""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import os
import re
import shutil
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from gpu_execution import ROOT, Failure, Step, execute
from passed import GPU, Passed
from sources import SCRIPTS, source_hash

sys.path.insert(0, str(ROOT / "bench"))
from nf4bench.families_cases import FAMILIES, Family  # noqa: E402

# Steps of compute-sanitizer: the tool, and the tests that it runs. Racecheck takes seconds for a
# random product in all of its kernels; what is left meets each kernel, if not with each dtype. It
# is the longest, and all of its time is a GPU's: it is cut by kernels, and its shortest steps are
# first.
_USUAL = "[cuda]~[large]~[long]"
_STREAM_K_ADAPTERS = '"stream-K kernels add an adapter once"'
_PRODUCTS = "[matmul]~[lora]~[matmul_grad]~[matmul_grouped]"
RACECHECK_STEPS = {
    "racecheck of adapters by stream-K": _STREAM_K_ADAPTERS,
    "racecheck": "~[matmul]~[lora]~[matmul_grad]~[matmul_grouped]",
    "racecheck of integers' products": f"{_PRODUCTS}[int4]",
    "racecheck of gradients": "[matmul_grad]",
    "racecheck of experts": "[matmul_grouped]",
    "racecheck of products": f"{_PRODUCTS}~[int4]~[e2m1]",
    "racecheck of products of MXFP4 and NVFP4": f"{_PRODUCTS}[e2m1]",
    "racecheck of adapters": f"[lora]~{_STREAM_K_ADAPTERS}",
}
SANITIZER_STEPS = {
    **{name: ("racecheck", f"{_USUAL}~[random]{tags}") for name, tags in RACECHECK_STEPS.items()},
    "memcheck": ("memcheck", _USUAL),
    "initcheck": ("initcheck", _USUAL),
    "synccheck": ("synccheck", _USUAL),
}
# Shapes per dtype, blocksize and flat/nested: NF4, FP4 and a codebook of the caller's. With
# 48 such classes, 144 for each family and shape of a kernel that dequantizes or quantizes; of
# matmul's each has one or more, which the tests see to.
SANITIZER_SHAPES = "3"
# Files of tests in a step: see LANES of gpu_execution.py.
FILES_AT_ONCE = 2
# The driver compiles PTX on one core for half a minute in each program: the files of that step run
# side by side.
PTX_FILES_AT_ONCE = os.cpu_count() or FILES_AT_ONCE
RUST = ROOT / ".cache" / "rust"
# The steps of a family try the choices that the library makes there, on fewer shapes than the step
# of PTX tries their kernels on, and those of Python's tests whose values no choice changes.
FAMILY_TAGS, FAMILY_SHAPES = _USUAL, "10"
FAMILY_TESTS = (
    "test_gpu_paths.py",
    "test_gpu_matmul.py",
    "test_gpu_torch.py::test_linear_and_its_gradients",
    "test_gpu_torch.py::test_inference_in_a_graph",
    "test_gpu_bitsandbytes.py::test_bitsandbytes_dequantizes_the_same_bits",
    "test_gpu_bitsandbytes.py::test_bitsandbytes_multiplies_as_well",
    "test_gpu_bitsandbytes.py::test_a_layer_of_bitsandbytes_has_its_gradients",
    "test_gpu_int4_torch.py::test_linear_and_its_gradients",
    "test_gpu_grouped.py::test_values_and_gradients",
    "test_gpu_grouped.py::test_integers",
)

T = TypeVar("T")


def run_junit(command: list[str], junit: Path, **environment: str) -> dict:
    """Runs tests that write `junit`; their counts. Raises if any failed."""
    status, output = execute(command, **environment)
    if not junit.exists():
        raise Failure(f"{' '.join(command)} ended with {status} and no results:\n{output}")
    root = xml.etree.ElementTree.parse(junit).getroot()
    cases = list(root.iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None]
    failed += [case for case in cases if case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    if status != 0 or failed:
        raise Failure(f"{' '.join(command)} ended with {status}:\n{output}")
    return {"passed": passed, "failed": 0, "skipped": len(skipped)}


def check_cuda(build: Path) -> Path:
    """The C++ tests on a GPU. Raises where they are not built."""
    found = [path for path in (build / "tests").rglob("check_cuda") if path.is_file()]
    if len(found) != 1:
        raise Failure(f"expected one program check_cuda in {build / 'tests'}, found {found}")
    return found[0]


def by_file(run: Callable[[str], T], files_at_once: int = FILES_AT_ONCE) -> list[T]:
    """run(tags) for the tests of each file, several at once, and for those of none of them. After
    one that fails no other begins; at_once() ends those that run."""
    files = sorted(path.stem for path in (ROOT / "tests" / "cuda").glob("check_*.cpp"))
    tags = [f"[#{file}]" for file in files] + ["".join(f"~[#{file}]" for file in files)]
    pool = concurrent.futures.ThreadPoolExecutor(files_at_once)
    try:
        futures = [pool.submit(run, each) for each in tags]
        return [future.result() for future in concurrent.futures.as_completed(futures)]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def total(runs: list[dict]) -> dict:
    """The counts of several runs. The time is theirs if some of them are of before."""
    names = runs[0].keys() - {"seconds", "resumed"}
    counts = {name: sum(run[name] for run in runs) for name in runs[0] if name in names}
    if any("resumed" in run for run in runs):
        counts |= {"seconds": round(sum(run["seconds"] for run in runs), 1), "resumed": True}
    return counts


def catch2(
    kept: Passed,
    program: Path,
    tags: str,
    folder: Path,
    files_at_once: int = FILES_AT_ONCE,
    **environment: str,
) -> dict:
    def run(file: str) -> dict:
        command = [str(program), "--filenames-as-tags", file + tags, "-r", "junit"]

        def anew() -> dict:
            with tempfile.NamedTemporaryFile(suffix=".xml", dir=folder) as made:
                junit = Path(made.name)
            counts = run_junit([*command, "-o", str(junit)], junit, **environment)
            suites = xml.etree.ElementTree.parse(junit).getroot().iter("testsuite")
            return counts | {"assertions": sum(int(suite.get("tests", 0)) for suite in suites)}

        return kept.once(command, environment, {}, anew)

    return require_some(total(by_file(run, files_at_once)), tags)


def require_some(counts: dict, tests: str) -> dict:
    if counts["passed"] == 0:
        raise Failure(f"{tests}: no test passed")
    return counts


def python_tests() -> list[str]:
    found = sorted((ROOT / "tests" / "python" / "gpu").glob("test_gpu*.py"))
    return [path.name for path in found if path.name != "test_gpu_run.py"]  # which needs none


def pytest(kept: Passed, folder: Path, tests: Iterable[str], **environment: str) -> dict:
    paths = [str(ROOT / "tests" / "python" / "gpu" / test) for test in tests]
    command = [sys.executable, "-m", "pytest", "-q", *paths]

    def anew() -> dict:
        with tempfile.NamedTemporaryFile(suffix=".xml", dir=folder) as made:
            junit = Path(made.name)
        return run_junit([*command, f"--junitxml={junit}"], junit, **environment)

    of = {"bindings": source_hash(ROOT, SCRIPTS)}
    return require_some(total([kept.once(["pytest", *paths], environment, of, anew)]), "pytest")


def sanitize(kept: Passed, program: Path, tool: str, tags: str, gpu: str) -> dict:
    """One of compute-sanitizer's tools over kernels; raises on the first report."""
    base = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", str(program)]
    on = {"NF4_TEST_SHAPES": SANITIZER_SHAPES, GPU: gpu}

    def run(file: str) -> dict:
        chosen = ["--filenames-as-tags", file + tags]

        def anew() -> dict:
            # compute-sanitizer fails where nothing is launched. The status is how many tests there
            # are.
            if execute([str(program), *chosen, "--list-test-names-only"], **on)[0] == 0:
                return {"ran": 0}
            status, output = execute([*base, *chosen], **on)
            summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
            if status != 0 or summary is None or summary[1] != "0":
                raise Failure(f"compute-sanitizer {tool} ended with {status}:\n{output}")
            return {"ran": 1}

        return kept.once([*base, *chosen], on, {}, anew)

    # Racecheck leaves a GPU no time for its own files side by side.
    counts = total([run("")] if tool == "racecheck" else by_file(run))
    if not counts.pop("ran"):
        raise Failure(f"compute-sanitizer {tool} {tags}: no test ran")
    if tool == "memcheck" and execute([*base, "[.planted]"], **on)[0] != 9:
        raise Failure("compute-sanitizer memcheck missed a planted write past the end")
    return counts | {"reports": 0, "shapes_per_kernel": 48 * int(SANITIZER_SHAPES)}


def examples(build: Path) -> dict:
    """The examples on raw device buffers, and candle's tests. Rust's may be missing where there is
    no cargo, and candle's where `./dev gpu --build` left a word why it could not compile them."""
    programs = {
        "C": [str(build / "examples" / "c_device_buffers")],
        "C, a GPTQ weight": [str(build / "examples" / "c_gptq_matmul")],
        "C, mistral.rs": [str(build / "examples" / "c_mistralrs")],
        "C++": [str(build / "examples" / "cpp_device_buffers")],
        "C++, an MLP": [str(build / "examples" / "cpp_swiglu_mlp")],
        "C++, experts": [str(build / "examples" / "cpp_moe_block")],
        "C++, a LLaMA": [
            str(build / "examples" / "cpp_llama"),
            str(ROOT / "tests" / "golden" / "llama"),
            "--tokens",
            "8",
            "1,17,42,5,99,3",
        ],
        "Python": [sys.executable, "examples/python/device_buffers.py"],
        "Rust": [str(RUST / "debug" / "device_buffers")],
        "Rust, candle": [str(RUST / "candle" / "cuda")],
        "Rust, LLaMA on candle": [str(RUST / "candle" / "llama"), "a_gpu_does_the_same"],
    }
    result = {}
    libraries = [str(build / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    for language, command in programs.items():
        if not Path(command[0]).exists():
            reason = Path(command[0]).parent / "skipped"
            if not language.startswith("Rust") or (shutil.which("cargo") and not reason.exists()):
                raise Failure(f"the {language} example is not built: no {command[0]}")
            why = reason.read_text().strip() if reason.exists() else "no cargo"
            result[language] = f"skipped: {why}"
            continue
        status, output = execute(command, LD_LIBRARY_PATH=os.pathsep.join(libraries))
        if status != 0:
            raise Failure(f"the {language} example ended with {status}:\n{output}")
        result[language] = "passed"
    return result


def two_gpus(kept: Passed, build: Path, devices: int, folder: Path, _gpu: str) -> dict:
    if devices < 2:
        return {"missing": "a second GPU"}
    return catch2(kept, check_cuda(build), "[.two-gpus]", folder)


def tests(kept: Passed, build: Path, ptx_build: Path, folder: Path) -> dict[str, Step]:
    def of(tags: str) -> Step:
        return lambda gpu: catch2(kept, check_cuda(build), tags, folder, **{GPU: gpu})

    def ptx(gpu: str) -> dict:
        on = {GPU: gpu, "CUDA_FORCE_PTX_JIT": "1"}
        program = check_cuda(ptx_build)
        return catch2(kept, program, "[cuda]~[large]", folder, PTX_FILES_AT_ONCE, **on)

    return {
        "compute_75 and compute_80 PTX": ptx,
        "kernels and launches": of("[cuda]~[matmul]"),
        "matmul": of("[cuda][matmul]"),
        "a sticky error": of("[.sticky]"),
        "a cold capture": of("[.cold]"),
        "Python": lambda _: pytest(kept, folder, python_tests()),
    }


def sanitizers(kept: Passed, build: Path, race_build: Path) -> dict[str, Step]:
    def of(tool: str, tags: str) -> Step:
        program = race_build if tool == "racecheck" else build
        return lambda gpu: sanitize(kept, check_cuda(program), tool, tags, gpu)

    return {name: of(*each) for name, each in SANITIZER_STEPS.items()}


def family_info(family: Family, library: Path) -> dict:
    """Returns how the build of a family was made. Raises Failure where it is another."""
    script = "import json, nf4; print(json.dumps(nf4.build_info()))"
    status, output = execute([sys.executable, "-c", script], NF4_LIBRARY=str(library))
    if status != 0:
        raise Failure(f"the build of {family} ended with {status}:\n{output}")
    info = json.loads(output.splitlines()[-1])
    if not family.info.items() <= info.items():
        raise Failure(f"{library} is not the build of {family}, but of {info}")
    return info


def family_steps(kept: Passed, family: Family, root: Path, folder: Path) -> dict[str, Step]:
    """Returns the steps of one build, which is in `root`."""

    def kernels(gpu: str) -> dict:
        on = {GPU: gpu, "NF4_TEST_SHAPES": FAMILY_SHAPES}
        return catch2(kept, check_cuda(family.build(root)), FAMILY_TAGS, folder, **on)

    def python(gpu: str) -> dict:
        on = {GPU: gpu, "NF4_LIBRARY": str(family.library(root))}
        return pytest(kept, folder, FAMILY_TESTS, **on)

    return {f"{family}: kernels": kernels, f"{family}: Python": python}


def sections(
    arguments: argparse.Namespace, devices: int, folder: Path, kept: Passed
) -> dict[str, dict[str, Step]]:
    """The steps by section of the record: that of each family has its name. No build is looked at
    before a step runs."""
    build, root = arguments.build, arguments.build.parent
    two = functools.partial(two_gpus, kept, build, devices, folder)
    return {
        "two GPUs": {"two GPUs": two},
        "tests": tests(kept, build, arguments.ptx_build, folder),
        "compute-sanitizer": sanitizers(kept, build, arguments.race_build),
        **{str(each): family_steps(kept, each, root, folder) for each in FAMILIES},
    }
