"""Products of integer weights (GPTQ, groups of 128, bf16) on the CPU: the kernel that vLLM chooses,
beside libnf4 on the bytes of the checkpoint. Run it in vLLM's environment, with libnf4 installed
and NF4_VLLM=0, so that vLLM chooses among its own.

python bench/vllm_integers.py [--turns 7] [--threads 2]
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from functools import partial

import nf4.torch
import torch
import vllm
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

SHAPES = ((4096, 4096), (14336, 4096))
ROWS = (1, 8, 32, 256)
GROUP_SIZE = 128
MOST_ERROR = 1e-2  # of bf16


def vllms(weight: nf4.Int4Tensor, dtype: torch.dtype) -> tuple[str, Callable[[Tensor], Tensor]]:
    """Returns the name of vLLM's kernel and a product with the weight, which it rearranges."""
    rows, cols = weight.shape
    config = MPLinearLayerConfig(
        (cols, rows), (cols, rows), scalar_types.uint4b8, dtype, GROUP_SIZE, zero_points=False
    )
    kind = choose_mp_linear_kernel(config)
    layer, kernel = nn.Module(), kind(config, "packed", "scales")
    layer.bias = None
    dimensions = {"packed": {"packed_dim": 0}, "scales": {}}
    for name, more in dimensions.items():
        param = nn.Parameter(getattr(weight, name).clone(), requires_grad=False)
        param.__dict__.update(more, input_dim=0, output_dim=1)
        layer.register_parameter(name, param)
    kernel.process_weights_after_loading(layer)
    return kind.__name__, lambda x: kernel.apply_weights(layer, x)


def seconds(call: Callable[[], Tensor], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


def times(calls: dict[str, Callable[[Tensor], Tensor]], x: Tensor, turns: int) -> dict[str, float]:
    """Returns microseconds of each call, the median of turns."""
    count = max(1, 64 // len(x))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            taken = seconds(partial(call, x), count)
            if turn:  # the first one warms up
                found[name].append(1e6 * taken)
    return {name: statistics.median(each) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Integer weights on the CPU, vLLM and libnf4.")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    current_platform.import_kernels()
    print(f"{datetime.date.today()}, {arguments.threads} threads, vLLM {vllm.__version__}\n")
    print("| N x K | rows of x | libnf4, us | vLLM, us | libnf4 / vLLM | vLLM's kernel |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for shape in SHAPES:
        weight = nf4.torch.quantize_int4(torch.randn(shape, dtype=torch.bfloat16))
        name, theirs = vllms(weight, torch.bfloat16)
        calls = {"ours": partial(nf4.torch.linear, weight=weight), "theirs": theirs}
        for m in ROWS:
            x = torch.randn(m, shape[1], dtype=torch.bfloat16)
            y, expected = (call(x).float() for call in calls.values())
            error = ((y - expected).norm() / expected.norm()).item()
            if not error <= MOST_ERROR:
                raise SystemExit(f"{shape}, {m} rows: they differ by {error:.1e}")
            found = times(calls, x, arguments.turns)
            ratio = found["ours"] / found["theirs"]
            row = f"{found['ours']:.0f} | {found['theirs']:.0f} | {ratio:.2f} | {name}"
            print(f"| {shape[0]}x{shape[1]} | {m} | {row} |", flush=True)


if __name__ == "__main__":
    main()
