"""Compares GPTQ for symmetric integers, as `nf4 quantize --calibrate` has it, with llmcompressor's:
the same model, scales, damping and x x^T, judged as in study.py.

    python tools/quality/peers.py FOLDER OUT.json [--group-size N] [--tokens N] [--judging N]

FOLDER is a dense causal language model with a tokenizer.json. Uniform noise of up to half a step of
Q4_1 is added to its weights, because those of the demo's model are on that grid. A layer whose
columns are not whole groups stays dense. x is that of the dense model, of --tokens of each
calibrating text; --judging of each judging text judge. page.py makes a table of OUT.json. Only the
function of llmcompressor is used that rounds a matrix, so that most of what it requires is not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import study
import texts
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from nf4.torch.calibration import rounding
from nf4.torch.calibration.layers import Seen, round_layers
from nf4.torch.calibration.weights import DAMPING_OF_INTEGERS
from torch import Tensor

BASE = "integers, GPTQ by llmcompressor"


@dataclasses.dataclass
class Peer(study.Design):
    """GPTQ by llmcompressor. actorder: "static" takes columns in the order of their mean x^2, as
    libnf4 does; None: as they are stored."""

    actorder: str | None = None

    def of(self, weight: Tensor, hessian: Tensor) -> Tensor:
        size = self.grid().blocksize
        args = QuantizationArgs(
            num_bits=4, symmetric=True, strategy="group", group_size=size, actorder=self.actorder
        )
        groups = weight.view(len(weight), -1, size)
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        scale = scale.half().float()  # as both store it
        made = quantize_weight(
            weight[None].clone(), hessian[None].clone(), scale[None], zero[None], None, args,
            percdamp=DAMPING_OF_INTEGERS,
        )  # fmt: skip
        return made[0][0]


def add_noise(model: study.Model) -> None:
    torch.manual_seed(0)
    for name, dense in model.dense.items():
        blocks = dense.view(-1, 32)
        step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15
        blocks += (torch.rand_like(blocks) - 0.5) * step
        model.layers[name].weight.data.copy_(dense)


def designs(group_size: int) -> dict[str, study.Design]:
    grid = partial(rounding.Integers, group_size, True, torch.float16)
    return {
        BASE: Peer(grid),
        f"{BASE}, static act order": Peer(grid, actorder="static"),
        "integers, plain": study.Design(grid),
        "integers, GPTQ": study.Design(grid, damping=DAMPING_OF_INTEGERS),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--judging", type=int, default=1024)
    args = parser.parse_args()
    study.CALIBRATING, study.JUDGING = args.tokens, args.judging
    model = study.Model(args.folder, texts.calibrating(), 512, "cpu")
    add_noise(model)
    judging = study.Judging(model, texts.judging())
    chosen = [name for name, each in model.dense.items() if not each.shape[1] % args.group_size]
    seen: dict[str, Seen] = {}
    round_layers(model.model, chosen, model.batches(), lambda name, _, of: seen.update({name: of}))
    done: dict[str, Any] = {}
    every = designs(args.group_size)
    for title, design in every.items():
        began = time.process_time()
        for name, of in seen.items():
            weight = design.of(model.dense[name].clone(), of.hessian)
            model.layers[name].weight.data.copy_(weight)
        seconds = time.process_time() - began
        done[title] = {"over": BASE, "cpu_seconds": seconds, "texts": judging.report(title, BASE)}
        figures = {"window": 512, "group_size": args.group_size, "layers": len(seen)}
        figures |= {"designs": done, "order": list(every)}
        figures |= {"calibrating": args.tokens, "judging": args.judging}
        name = f"{args.folder.name}-noise-{args.group_size}"
        args.out.write_text(json.dumps({name: figures}, indent=1) + "\n")
        print(f"{title} ({seconds:.0f} CPU s): {study._line(done[title], done[BASE])}", flush=True)


if __name__ == "__main__":
    main()
