"""What an eager call of experts costs the host, nothing waited for."""

from __future__ import annotations

from functools import partial
from typing import Any

import nf4.torch
import torch
from nf4.torch._weight import WeightParts

from nf4bench.experts_cases import Model
from nf4bench.experts_weights import Operands, Routing, Stack
from nf4bench.host import host_times
from nf4bench.rows import Bench

# So small that the GPU is done before the host has come to the next.
MODEL, TOKENS = Model("small", 8, 256, 128, 2), 4
LAYER, DENSE = "nf4.torch.NF4Experts", "torch.nn.functional.grouped_mm"


def calls(bench: Bench) -> list[dict[str, Any]]:
    """By the name of what is called."""
    place = bench.gpu.place
    routing, stack = Routing(MODEL, TOKENS, place), Stack(MODEL.shape("gate_up"), place)
    each = Operands("gate_up", stack, TOKENS, routing)
    layer = nf4.torch.NF4Experts.from_quantized(stack.quantized)
    given = (each.x, routing.ends, routing.index)
    arguments = WeightParts.of(stack.quantized).arguments()
    operator = torch.ops.nf4.linear_grouped.default
    grouped_mm = torch.nn.functional.grouped_mm
    work = {
        LAYER: partial(layer, *given),
        "torch.ops.nf4.linear_grouped": partial(operator, *given, None, *arguments),
        "nf4.matmul_grouped": partial(
            nf4.matmul_grouped, each.x, stack.quantized, routing.ends, x_index=routing.index
        ),
        DENSE: partial(grouped_mm, each.sorted_x, stack.dense.transpose(1, 2), offs=routing.ends),
    }
    with torch.no_grad():
        times = host_times(bench.gpu, work)
    return [
        {"name": name, **time.figures(), "ratio": round(time.us / times[DENSE].us, 3)}
        for name, time in times.items()
    ]
