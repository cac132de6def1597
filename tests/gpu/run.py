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
import os
import sys
import tempfile
from pathlib import Path

import nf4

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "bench")]

import gpu_steps as steps  # noqa: E402
import record as records  # noqa: E402
from gpu_execution import Failure, at_once, gpus, step  # noqa: E402
from passed import Passed  # noqa: E402
from sources import JUDGING, source_hash  # noqa: E402

SKIPPED_STATUS = 77
# The figures that the bench measures, by name: that of its mode, but for the rows.
MEASURED = (
    "bench", "challenge", "call", "matmul", "models", "int4", "training", "experts", "families",
)  # fmt: skip
CHALLENGE_ITERATIONS = 200


def figures(build: Path, commit: str) -> dict:
    """What the bench measures, the challenge, the cost of a call, matmul and whole models, by
    name, each with its commit and the hash of its code. It needs torch, which the tests do not."""
    from nf4bench import modes
    from nf4bench.check import WrongResult
    from nf4bench.library import LaunchFailed, LibraryMissing
    from nf4bench.options import Options

    def measured(name: str) -> dict:
        mode, iterations = "" if name == "bench" else name, None
        if name == "challenge":
            iterations = CHALLENGE_ITERATIONS
        return modes.run(Options(mode=mode, iterations=iterations, build=build))

    try:
        found = {name: measured(name) for name in MEASURED}
    except (WrongResult, LibraryMissing, LaunchFailed) as error:
        raise Failure(f"the bench: {error}") from error
    return {name: records.stamped(name, each, commit) for name, each in found.items()}


def environment() -> dict[str, str]:
    """The variables that a run sees beside its own, and that may change what it does."""
    names = [name for name in os.environ if name.startswith("NF4_") and name != "NF4_LIBRARY"]
    forced = [name for name in ("CUDA_FORCE_PTX_JIT", "CUDA_DISABLE_PTX_JIT") if name in os.environ]
    return {name: os.environ[name] for name in sorted(names + forced)}


def require_built(build: Path, sources: str) -> None:
    """Raises Failure where `./dev gpu --build` built other code."""
    made = build / "gpu-sources"
    if not made.exists() or made.read_text().strip() != sources:
        raise Failure(f"{build} is not of this code: ./dev gpu --build builds it")


def record_of(arguments: argparse.Namespace, device: nf4.Device, folder: Path) -> dict:
    sources, root = source_hash(), arguments.build.parent
    require_built(arguments.build, sources)
    gpus_at_hand = [device.name, device.device_count, device.driver_version]
    infos = {str(each): steps.family_info(each, each.library(root)) for each in steps.FAMILIES}
    of = {
        "sources": sources,
        "judging": source_hash(ROOT, JUDGING),
        "gpus": gpus_at_hand,
        "builds": infos | {"library": nf4.build_info()},
        "environment": environment(),
    }
    kept = Passed(arguments.resume, of)
    sections = steps.sections(arguments, device.device_count, folder, kept)
    skipped = {name: {"skipped": why} for name, why in arguments.skip}
    asked = {
        name: work
        for section in sections.values()
        for name, work in section.items()
        if name not in skipped
    }
    results = at_once(asked, gpus(device.device_count), steps.RACECHECK_STEPS) | skipped
    if "examples" not in skipped:
        results["examples"] = step("examples", lambda: steps.examples(arguments.build))
    if source_hash() != sources:
        raise Failure("the code changed while its tests ran")
    return {
        "sources": sources,
        "date": records.today(),
        "device": device.name,
        "compute_capability": ".".join(map(str, device.compute_capability)),
        "driver": device.driver_version,
        "build": nf4.build_info(),
        "tests": {name: results[name] for name in sections["tests"]},
        "families": {
            family: {"build": info}
            | {name.removeprefix(f"{family}: "): results[name] for name in sections[family]}
            for family, info in infos.items()
        },
        "two GPUs": results["two GPUs"],
        "examples": results["examples"],
        "compute-sanitizer": {name: results[name] for name in sections["compute-sanitizer"]},
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
        help="a step that is left out; the record says so, and is for no release",
    )
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keeps what has passed in FILE")
    arguments = parser.parse_args()
    sections = steps.sections(arguments, 0, Path(), Passed()).values()
    names = [*(name for section in sections for name in section), "examples"]
    for name, _ in arguments.skip:
        if name not in names:
            parser.error(f"--skip {name}: expected one of {'; '.join(names)}")
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
