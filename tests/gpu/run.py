"""Everything that needs a GPU, in one run: the tests and compute-sanitizer's four tools, then the
bench with its challenge, matmul and models. Writes tests/gpu/record.json if, and only if, all
tests passed, and docs/bench/figures.json if the bench did, too.

    python tests/gpu/run.py [--build DIR] [--ptx-build DIR] [--race-build DIR]
                             [--record FILE] [--figures FILE] [--commit ID] [--no-bench]
                             [--skip STEP WHY] [--resume FILE]

Beside the folder of --build lie those of what other GPUs run: kernels of one family as machine code
of this one, with the shared memory that a CTA has there (families_cases.py).

`--ptx-build` holds check_cuda of a build with -Dgpu_archs=75-ptx,80-ptx: the PTX that later
GPUs compile, and the kernels for GPUs between, which this one may not be. `--race-build` holds
the one for racecheck, of a build with -Dcuda_args=-DNF4_RACECHECK (lib/cuda/ptx/mbarrier.cuh).
`--resume` keeps what has passed, and takes it from there (passed.py).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import nf4

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "bench")]

import record as records  # noqa: E402
from nf4bench.families_cases import FAMILIES, Family  # noqa: E402
from passed import Passed  # noqa: E402
from sources import COVERED, SCRIPTS, source_hash  # noqa: E402

# Steps of compute-sanitizer: the tool, and the tests that it runs. Racecheck takes seconds for a
# random product in all of its kernels; what is left meets each kernel, if not with each dtype. It
# is the longest, and all of its time is a GPU's: it is cut by kernels.
_USUAL = "[cuda]~[large]~[long]"
_STREAM_K_ADAPTERS = '"stream-K kernels add an adapter once"'
_PRODUCTS = "[matmul]~[lora]~[matmul_grad]~[matmul_grouped]"
RACECHECK_STEPS = {
    "racecheck of adapters": f"[lora]~{_STREAM_K_ADAPTERS}",
    "racecheck of products": f"{_PRODUCTS}~[int4]",
    "racecheck of integers' products": f"{_PRODUCTS}[int4]",
    "racecheck of gradients": "[matmul_grad]",
    "racecheck of adapters by stream-K": _STREAM_K_ADAPTERS,
    "racecheck of experts": "[matmul_grouped]",
    "racecheck": "~[matmul]~[lora]~[matmul_grad]~[matmul_grouped]",
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
CHALLENGE_ITERATIONS = 200
SKIPPED_STATUS = 77
STEP_SECONDS = 3600  # a step that takes longer hangs
# Steps side by side on a GPU, besides one of racecheck, and files of tests in a step: most of their
# time is a processor's, but a GPU serves many programs slowly, and where a test has an input come
# late the host must launch within a millisecond.
LANES = 2
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
# A step is told which GPU is its own, as CUDA_VISIBLE_DEVICES has it. Python's tests and those of
# two GPUs see all.
Step = Callable[[str], dict]


class Failure(Exception):
    """A step did not pass; the message says what to read."""


_running: set[subprocess.Popen] = set()
_ended = threading.Event()  # a step failed: what runs is killed, and what is started


def execute(command: list[str], **environment: str) -> tuple[int, str]:
    """The status of a command and what it printed. One that takes too long, or is
    interrupted, is killed with all that it started."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        _running.add(process)
        try:
            if _ended.is_set():
                os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate(timeout=STEP_SECONDS)
        except subprocess.TimeoutExpired as late:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise Failure(f"{' '.join(command)} took over {STEP_SECONDS} s:\n{output}") from late
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            _running.discard(process)
    return process.returncode, output


def gpus(count: int) -> list[str]:
    """The names of the GPUs that this program sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(index) for index in range(count)]


def at_once(steps: dict[str, Step], devices: list[str]) -> dict[str, dict]:
    """What the steps return, by name. LANES of them and one of racecheck run at a time on each
    device; the first that fails ends the others."""
    results = {}
    lanes: queue.SimpleQueue[str] = queue.SimpleQueue()
    races: queue.SimpleQueue[str] = queue.SimpleQueue()
    for device in devices * LANES:
        lanes.put(device)
    for device in reversed(devices):
        races.put(device)

    def run(name: str, work: Step) -> dict:
        free = races if name in RACECHECK_STEPS else lanes
        device = free.get()
        try:
            if _ended.is_set():
                raise Failure("another step failed")
            return step(name, functools.partial(work, device))
        finally:
            free.put(device)

    with concurrent.futures.ThreadPoolExecutor(len(steps)) as pool:
        futures = {pool.submit(run, name, work): name for name, work in steps.items()}
        try:
            for future in concurrent.futures.as_completed(futures):
                results[futures[future]] = future.result()
        except BaseException:
            _ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            raise
    return {name: results[name] for name in steps}


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


def catch2(
    program: Path, tags: str, folder: Path, files_at_once: int = FILES_AT_ONCE, **environment: str
) -> dict:
    def run(file: str) -> dict:
        with tempfile.NamedTemporaryFile(suffix=".xml", dir=folder) as made:
            junit = Path(made.name)
        command = [str(program), "--filenames-as-tags", file + tags, "-r", "junit"]
        counts = run_junit([*command, "-o", str(junit)], junit, **environment)
        suites = xml.etree.ElementTree.parse(junit).getroot().iter("testsuite")
        return counts | {"assertions": sum(int(suite.get("tests", 0)) for suite in suites)}

    found = by_file(run, files_at_once)
    return require_some({name: sum(counts[name] for counts in found) for name in found[0]}, tags)


def require_some(counts: dict, tests: str) -> dict:
    if counts["passed"] == 0:
        raise Failure(f"{tests}: no test passed")
    return counts


def python_tests() -> list[str]:
    found = sorted((ROOT / "tests" / "python" / "gpu").glob("test_gpu*.py"))
    return [path.name for path in found if path.name != "test_gpu_run.py"]  # which needs none


def pytest(folder: Path, tests: Iterable[str], **environment: str) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".xml", dir=folder) as made:
        junit = Path(made.name)
    paths = [str(ROOT / "tests" / "python" / "gpu" / test) for test in tests]
    command = [sys.executable, "-m", "pytest", "-q", *paths, f"--junitxml={junit}"]
    return require_some(run_junit(command, junit, **environment), "pytest")


def sanitize(program: Path, tool: str, tags: str, gpu: str) -> dict:
    """One of compute-sanitizer's tools over kernels; raises on the first report."""
    base = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", str(program)]
    on = {"NF4_TEST_SHAPES": SANITIZER_SHAPES, "CUDA_VISIBLE_DEVICES": gpu}

    def ran(file: str) -> bool:
        chosen = ["--filenames-as-tags", file + tags]
        # compute-sanitizer fails where nothing is launched. The status is how many tests there are.
        if execute([str(program), *chosen, "--list-test-names-only"], **on)[0] == 0:
            return False
        status, output = execute([*base, *chosen], **on)
        summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
        if status != 0 or summary is None or summary[1] != "0":
            raise Failure(f"compute-sanitizer {tool} ended with {status}:\n{output}")
        return True

    # Racecheck leaves a GPU no time for its own files side by side.
    if not any([ran("")] if tool == "racecheck" else by_file(ran)):
        raise Failure(f"compute-sanitizer {tool} {tags}: no test ran")
    if tool == "memcheck" and execute([*base, "[.planted]"], **on)[0] != 9:
        raise Failure("compute-sanitizer memcheck missed a planted write past the end")
    return {"reports": 0, "shapes_per_kernel": 48 * int(SANITIZER_SHAPES)}


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


def two_gpus(check: Path, devices: int, folder: Path, _gpu: str) -> dict:
    if devices < 2:
        return {"skipped": "one GPU"}
    return catch2(check, "[.two-gpus]", folder)


def step(title: str, work: Callable[[], dict]) -> dict:
    began = time.monotonic()
    print(f"{title} ...", flush=True)
    result = work()
    seconds = round(time.monotonic() - began, 1)
    print(f"{title}: {json.dumps(result)} in {seconds} s", flush=True)
    return {"seconds": seconds} | result


def figures(build: Path, commit: str) -> dict:
    """What the bench measures, the challenge, the cost of a call, matmul and whole models, by
    name, each with its commit and the hash of its code. It needs torch, which the tests do not."""
    from nf4bench import modes
    from nf4bench.check import WrongResult
    from nf4bench.library import LaunchFailed, LibraryMissing
    from nf4bench.options import Options

    options = {
        "bench": Options(build=build),
        "challenge": Options(mode="challenge", iterations=CHALLENGE_ITERATIONS, build=build),
        "call": Options(mode="call", build=build),
        "matmul": Options(mode="matmul", build=build),
        "models": Options(mode="models", build=build),
        "int4": Options(mode="int4", build=build),
        "training": Options(mode="training", build=build),
        "experts": Options(mode="experts", build=build),
        "families": Options(mode="families", build=build),
    }
    try:
        found = {name: modes.run(each) for name, each in options.items()}
    except (WrongResult, LibraryMissing, LaunchFailed) as error:
        raise Failure(f"the bench: {error}") from error
    return {name: records.stamped(name, each, commit) for name, each in found.items()}


def tests(arguments: argparse.Namespace, folder: Path) -> dict[str, Step]:
    check, check_ptx = check_cuda(arguments.build), check_cuda(arguments.ptx_build)

    def of(tags: str) -> Step:
        return lambda gpu: catch2(check, tags, folder, CUDA_VISIBLE_DEVICES=gpu)

    def ptx(gpu: str) -> dict:
        on = {"CUDA_VISIBLE_DEVICES": gpu, "CUDA_FORCE_PTX_JIT": "1"}
        return catch2(check_ptx, "[cuda]~[large]", folder, PTX_FILES_AT_ONCE, **on)

    return {
        "compute_75 and compute_80 PTX": ptx,
        "kernels and launches": of("[cuda]~[matmul]"),
        "matmul": of("[cuda][matmul]"),
        "a sticky error": of("[.sticky]"),
        "a cold capture": of("[.cold]"),
        "Python": lambda _: pytest(folder, python_tests()),
    }


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


def family_steps(family: Family, root: Path, folder: Path) -> dict[str, Step]:
    """Returns the steps of one build, which is in `root`."""
    check, library = check_cuda(family.build(root)), str(family.library(root))

    def kernels(gpu: str) -> dict:
        on = {"CUDA_VISIBLE_DEVICES": gpu, "NF4_TEST_SHAPES": FAMILY_SHAPES}
        return catch2(check, FAMILY_TAGS, folder, **on)

    def python(gpu: str) -> dict:
        on = {"CUDA_VISIBLE_DEVICES": gpu, "NF4_LIBRARY": library}
        return pytest(folder, FAMILY_TESTS, **on)

    return {f"{family}: kernels": kernels, f"{family}: Python": python}


def runs_on(arguments: argparse.Namespace, device: nf4.Device) -> dict:
    """What the result of a step depends on."""
    builds = [arguments.build, arguments.ptx_build, arguments.race_build]
    extension = (arguments.build / "bindings" / "python").glob("*.so")
    programs = [*map(check_cuda, builds), arguments.build / "lib" / "libnf4.so", *sorted(extension)]
    root = arguments.build.parent
    programs += [check_cuda(each.build(root)) for each in FAMILIES]
    programs += [each.library(root) for each in FAMILIES]
    return {
        "sources": source_hash(ROOT, (*COVERED, *SCRIPTS)),
        "programs": [hashlib.sha256(each.read_bytes()).hexdigest() for each in programs],
        "gpus": [device.name, device.device_count, device.driver_version],
    }


def record_of(arguments: argparse.Namespace, device: nf4.Device, folder: Path) -> dict:
    sources = source_hash()
    check, race = check_cuda(arguments.build), check_cuda(arguments.race_build)
    passed = Passed(arguments.resume, runs_on(arguments, device))
    of_tests, root = tests(arguments, folder), arguments.build.parent
    infos = {str(each): family_info(each, each.library(root)) for each in FAMILIES}
    of_families = {str(each): family_steps(each, root, folder) for each in FAMILIES}
    of_sanitizer = {
        name: functools.partial(sanitize, race if tool == "racecheck" else check, tool, tags)
        for name, (tool, tags) in SANITIZER_STEPS.items()
    }
    two = functools.partial(two_gpus, check, device.device_count, folder)
    skipped = {name: {"skipped": why} for name, why in arguments.skip}
    steps = {"two GPUs": two} | of_tests | of_sanitizer
    for of_family in of_families.values():
        steps |= of_family
    asked = {name: passed.once(name, work) for name, work in steps.items() if name not in skipped}
    results = at_once(asked, gpus(device.device_count)) | skipped
    if source_hash() != sources:
        raise Failure("the code changed while its tests ran")
    return {
        "sources": sources,
        "date": records.today(),
        "device": device.name,
        "compute_capability": ".".join(map(str, device.compute_capability)),
        "driver": device.driver_version,
        "build": nf4.build_info(),
        "tests": {name: results[name] for name in of_tests},
        "families": {
            family: {"build": infos[family]}
            | {name.removeprefix(f"{family}: "): results[name] for name in of_family}
            for family, of_family in of_families.items()
        },
        "two GPUs": results["two GPUs"],
        "examples": step("examples", lambda: examples(arguments.build)),
        "compute-sanitizer": {name: results[name] for name in of_sanitizer},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--ptx-build", type=Path, default=ROOT / "build-ptx")
    parser.add_argument("--race-build", type=Path, default=ROOT / "build-race")
    parser.add_argument("--record", type=Path, default=records.RECORD)
    parser.add_argument("--figures", type=Path, default=records.FIGURES_FILE)
    parser.add_argument("--commit", default=records.commit(), help="what the figures are of")
    parser.add_argument("--no-bench", action="store_true", help="tests alone; no figures")
    parser.add_argument(
        "--skip",
        nargs=2,
        metavar=("STEP", "WHY"),
        action="append",
        default=[],
        help="a step of a sanitizer that is left out; the record says so, and is for no release",
    )
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keeps what has passed in FILE")
    arguments = parser.parse_args()
    for name, _ in arguments.skip:
        if name not in SANITIZER_STEPS:
            parser.error(f"--skip {name}: expected one of {', '.join(SANITIZER_STEPS)}")
    if arguments.resume and not arguments.resume.parent.is_dir():
        parser.error(f"--resume: there is no folder {arguments.resume.parent}")
    device = nf4.device_info(0)
    if not device.usable:
        print(f"no usable GPU: {device.reason}", file=sys.stderr)
        return SKIPPED_STATUS
    try:
        with tempfile.TemporaryDirectory() as folder:
            records.save(arguments.record, record_of(arguments, device, Path(folder)))
        print(f"wrote {arguments.record}", flush=True)
        if not arguments.no_bench:
            measured = figures(arguments.build, arguments.commit)
            records.save(arguments.figures, records.figures_beside(arguments.figures) | measured)
            print(f"wrote {arguments.figures}")
    except Failure as failure:
        print(f"FAILED: {failure}\nnothing more is written", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
