"""libnf4 beside its peers and beside the bandwidth roofline, on the GPU if there is one, else on
the CPU.

    python bench/bench.py [--quick | --shapes 4096x4096,...] [--json FILE] [--plots DIR]
    python bench/bench.py --sweep | --challenge | --call | --matmul | --matmul-sweep
    python bench/bench.py --models | --int4 [--quick]
    python bench/bench.py --experts [--quick] | --families | --distributed
    python bench/bench.py --matmul | --experts | --training, --format mxfp4 | nvfp4
    python bench/bench.py --report FILE
    python bench/bench.py --before DIR [--quick] [--json FILE]

On the GPU, times are of CUDA-graph replays that rotate over more data than L2 holds, in turns;
the roofline is the fastest of our own kernels that move the same bytes and do nothing else. Bits
are compared before a case is timed: a wrong result ends the program with status 1. Options
that make no sense end it with status 2. A peer that is not installed is named as missing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))

from nf4bench import compare, plots  # noqa: E402
from nf4bench import options as command_line  # noqa: E402
from nf4bench.errors import LaunchFailed, LibraryMissing, WrongResult  # noqa: E402
from nf4bench.options import Options  # noqa: E402


def no_gpu() -> str | None:
    """Why nothing can be measured on a GPU here, or None."""
    import nf4

    device = nf4.device_info(0)
    if not device.usable:
        return device.reason
    try:
        import torch
    except ImportError as error:
        return f"torch is needed on the GPU: {error}"
    return None if torch.cuda.is_available() else "torch sees no GPU"


def on_cpu(options: Options) -> dict:
    from nf4bench import cpu

    shapes = options.shapes or cpu.SHAPES[: 1 if options.quick else None]
    program = {"": cpu.run, "int4": cpu.int4, "models": cpu.layers}[options.mode]
    return program(shapes, options.threads or len(os.sched_getaffinity(0)))


def on_gpu(options: Options) -> dict:
    from nf4bench import modes

    return modes.run(options)


def measured(options: Options) -> dict:
    """All figures; ends the program with status 1 where something is wrong or missing."""
    try:
        if options.before:
            return compare.main(options.before, ROOT, options.build, options.quick)
        on_device = {"gpu": on_gpu, "cpu": on_cpu}
        return on_device[command_line.settle(options, no_gpu())](options)
    except WrongResult as error:
        sys.exit(f"bench: wrong result: {error}; not timed")
    except (LibraryMissing, LaunchFailed, compare.Failed, ModuleNotFoundError) as error:
        sys.exit(f"bench: {error}")


def main() -> int:
    options = command_line.parse(sys.argv[1:])
    figures = measured(options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.plots:
        for path in plots.write(options.plots, options.mode or "bench", figures):
            print(f"wrote {path}")
    return 0 if not options.before or compare.within_bounds(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
