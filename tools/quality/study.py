"""Does a calibration of 4-bit weights hold on texts of other kinds than it saw? Judges several,
beside the scales of bitsandbytes, on five texts.

    python tools/quality/study.py FOLDER OUT.json [--texts FILE.json] [--device cuda]
        [--window N] [--group-size N] [--part I/N]

FOLDER is a dense causal language model with a tokenizer.json. The figures are written to OUT.json
after each design. --part does every Nth design after the Ith, beside the first of its kind, so
that several processes can share the work; page.py joins what they write.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import texts
import torch
from nf4.torch.calibration import rounding
from nf4.torch.calibration.layers import Seen, round_layers
from nf4.torch.comparing import encoded, windows
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

# Tokens of each kind that calibrate, and the most of each text that judge.
CALIBRATING, JUDGING, ROWS, BATCH = 8192, 8192, 256, 8


class Model:
    """A dense model, its linear layers, and the tokens that calibrate."""

    def __init__(self, folder: Path, calibrating: dict[str, str], window: int, device: str):
        self.folder, self.window, self.device = str(folder), window, device
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.to(device).eval()
        self.layers = {
            name: layer
            for name, layer in self.model.named_modules()
            if isinstance(layer, nn.Linear) and name != "lm_head"
        }
        self.dense = {name: layer.weight.detach().clone() for name, layer in self.layers.items()}
        self.calibrating = self.tokens(calibrating, CALIBRATING)

    def tokens(self, named: dict[str, str], most: int) -> dict[str, list[int]]:
        found = encoded([self.folder], list(named.items()), self.window, self.window // 2)
        return {each.name: each.tokens[:most] for each in found}

    def batches(self, share: float = 1.0) -> list[Tensor]:
        """Windows of all kinds, of the first share of the tokens of each."""
        rows = []
        for tokens in self.calibrating.values():
            count = max(1, int(len(tokens) * share) // self.window) * self.window
            rows.append(torch.tensor(tokens[:count]).view(-1, self.window))
        return list(torch.cat(rows).to(self.device).split(BATCH))

    def restore(self) -> None:
        for name, layer in self.layers.items():
            layer.weight.data.copy_(self.dense[name])

    def round(self, design: Design, seen: dict[str, Seen]) -> None:
        """Rounds every weight. seen: of the dense model."""
        self.restore()
        if design.needs_x and design.sequential:
            batches = self.batches(design.share)
            round_layers(self.model, list(self.layers), batches, lambda name, layer, seen: (
                layer.weight.data.copy_(design.of(layer.weight.data, seen.hessian))
            ))  # fmt: skip
            return
        for name, layer in self.layers.items():
            layer.weight.data.copy_(design.of(layer.weight.data, seen[name].hessian))


@dataclasses.dataclass
class Design:
    """How weights are rounded.

    grid        the codes
    scales      "largest": of the largest magnitude; "weights": of the least square error of the
                weights; "x": of the least square error weighted by x^2
    damping     of error feedback; None: none
    nested      whether scales have 8 bits
    sequential  whether x is that of the model in which the layers before are rounded
    share       of the calibrating tokens
    """

    grid: Callable[[], rounding.Grid]
    scales: Literal["largest", "weights", "x"] = "largest"
    damping: float | None = None
    nested: bool = False
    sequential: bool = True
    share: float = 1.0

    @property
    def needs_x(self) -> bool:
        return self.scales == "x" or self.damping is not None

    def of(self, weight: Tensor, hessian: Tensor) -> Tensor:
        """Returns what a matrix is worth after rounding. hessian: the mean of x x^T."""
        grid, scales = self.grid(), self._scales(weight, hessian.diagonal())
        if self.nested and not self.needs_x:
            return _nested_afterwards(weight, grid, scales)
        if self.nested:
            scales, _ = rounding.nested(scales.scale)
        if self.damping is None:
            return rounding.nearest(weight, grid, scales)[1]
        return rounding.with_feedback(weight, grid, scales, hessian, self.damping)[1]

    def _scales(self, weight: Tensor, squares: Tensor) -> rounding.Scales:
        if self.scales == "largest":
            return rounding.largest_scales(weight, self.grid())
        counts = squares if self.scales == "x" else torch.ones_like(squares)
        return rounding.searched_scales(weight, self.grid(), counts)


def _nested_afterwards(weight: Tensor, grid: rounding.Grid, scales: rounding.Scales) -> Tensor:
    """As bitsandbytes: codes are chosen before the scales get 8 bits."""
    blocks, of_rows = rounding.blocks_of(weight, grid.blocksize), (slice(None), None)
    places = grid.nearest(blocks, scales.at(of_rows))
    worth = grid.worth(places, rounding.nested(scales.scale)[0].at(of_rows))
    return worth.flatten()[: weight.numel()].view(weight.shape)


def designs(device: str, group_size: int) -> dict[str, tuple[str, Design]]:
    """What is judged, by name, with the name of what it is over: bitsandbytes' scales of the same
    format, or rounding to nearest. The first are these."""

    def codebook(format: str) -> Callable[[], rounding.Grid]:
        return lambda: rounding.Codebook(format, 64, torch.device(device))

    def integers(symmetric: bool) -> Callable[[], rounding.Grid]:
        return lambda: rounding.Integers(group_size, symmetric, torch.float16)

    nf4, fp4 = codebook("nf4"), codebook("fp4")
    found: dict[str, tuple[str, Design]] = {}

    def add(base: str, designs: dict[str, Design]) -> None:
        found.update(
            {f"{base}, {name}": (f"{base}, plain", each) for name, each in designs.items()}
        )

    def with_x(grid: Callable[[], rounding.Grid], damping: float, **more: Any) -> dict[str, Design]:
        name = "".join(f", {each}" for each in more.pop("named", ()))
        return {
            f"scales by x^2{name}": Design(grid, scales="x", **more),
            f"GPTQ by x^2, damped by {damping}{name}": Design(
                grid, scales="x", damping=damping, **more
            ),
        }

    dampings = {
        f"GPTQ by x^2, damped by {damping}": Design(nf4, scales="x", damping=damping)
        for damping in (0.01, 0.1, 1)
    }
    add("NF4", {"plain": Design(nf4), **with_x(nf4, 0.3), **dampings})
    add("nested NF4", {"plain": Design(nf4, nested=True), **with_x(nf4, 0.3, nested=True)})
    add("FP4", {"plain": Design(fp4), **with_x(fp4, 0.3)})
    for name, symmetric in (("symmetric", True), ("asymmetric", False)):
        of = integers(symmetric)
        gptq = {"GPTQ, damped by 0.01": Design(of, damping=0.01)}
        add(f"{name} integers", {"plain": Design(of), **with_x(of, 0.3), **gptq})
    add("NF4", {
        "GPTQ, damped by 0.01": Design(nf4, damping=0.01),
        "GPTQ, damped by 0.3": Design(nf4, damping=0.3),
        "least square error": Design(nf4, scales="weights"),
        **with_x(nf4, 0.3, share=0.25, named=["a quarter of the tokens"]),
        **with_x(nf4, 0.3, sequential=False, named=["of the dense model"]),
    })  # fmt: skip
    return found


class Judging:
    """The judging texts, and the dense model's logits on them."""

    def __init__(self, model: Model, judging: dict[str, str]):
        self._model = model
        self._texts = model.tokens(judging, JUDGING)
        self._dense = {name: list(self._logits(tokens)) for name, tokens in self._texts.items()}
        self._bases: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}

    @torch.inference_mode()
    def _logits(self, tokens: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the logits and the targets of each window."""
        window, device = self._model.window, self._model.device
        for begin, end, scored in windows(len(tokens), 0, window, window * 3 // 4):
            ids = torch.tensor([tokens[begin:end]], device=device)
            logits = self._model.model(input_ids=ids, use_cache=False).logits[0]
            yield logits[scored - begin - 1 : -1], ids[0, scored - begin :]

    def _each(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """The dense loss of each token of a text, its change, and its KL divergence."""
        found = []
        dense, now = self._dense[name], self._logits(self._texts[name])
        for (before, targets), (after, _) in zip(dense, now, strict=True):
            for at in range(0, len(targets), ROWS):
                part, of = slice(at, at + ROWS), targets[at : at + ROWS, None]
                logs = [functional.log_softmax(x[part].double(), -1) for x in (before, after)]
                losses = [-each.gather(1, of)[:, 0] for each in logs]
                divergence = functional.kl_div(logs[1], logs[0], reduction="none", log_target=True)
                found.append((losses[0], losses[1] - losses[0], divergence.sum(1)))
        return tuple(torch.cat(part) for part in zip(*found, strict=True))

    @torch.inference_mode()
    def report(self, name: str, base: str) -> dict[str, Any]:
        """Judges the weights that the model has now. base: the design that it is over, which was
        judged before."""
        rows = {}
        for text in self._texts:
            loss, change, divergence = self._each(text)
            own = self._bases.setdefault(name, {})
            own[text] = change, divergence
            of_base = self._bases[base][text]
            rows[text] = {
                "tokens": len(change),
                "perplexities": [math.exp(loss.mean()), math.exp((loss + change).mean())],
                "loss_change": _mean(change),
                "kl_divergence": _mean(divergence),
                "loss_over_base": _mean(change - of_base[0]),
            }
        return rows


def _mean(values: Tensor) -> list[float]:
    """The mean, and its standard error if tokens were independent."""
    return [values.mean().item(), values.std().item() / len(values) ** 0.5]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--part", default="0/1", metavar="I/N")
    parser.add_argument("--only", action="append", metavar="DESIGN")
    args = parser.parse_args()
    both = json.loads(args.texts.read_text()) if args.texts else None
    calibrating = both["calibrating"] if both else texts.calibrating()
    model = Model(args.folder, calibrating, args.window, args.device)
    judging = Judging(model, both["judging"] if both else texts.judging())
    seen: dict[str, Seen] = {}
    round_layers(
        model.model,
        list(model.layers),
        model.batches(),
        lambda name, _, of: seen.update({name: of}),
    )
    every = designs(args.device, args.group_size)
    at, parts = map(int, args.part.split("/"))
    bases = {base for base, _ in every.values()}
    others = [name for name in every if name not in bases][at::parts]
    chosen = [name for name in others if not args.only or name in args.only]
    done: dict[str, Any] = {}
    training = json.loads((args.folder / "training.json").read_text())

    def judge(name: str) -> None:
        began = time.perf_counter()
        base, design = every[name]
        model.round(design, seen)
        rounded = time.perf_counter() - began
        done[name] = {"over": base, "seconds": rounded, "texts": judging.report(name, base)}
        figures = {"window": args.window, "group_size": args.group_size, "designs": done}
        figures |= {"order": list(every), "training": training}
        args.out.write_text(json.dumps({args.folder.name: figures}, indent=1) + "\n")
        print(f"{name} ({rounded:.1f} s): {_line(done[name], done[base])}", flush=True)

    for name in chosen:
        base = every[name][0]
        if base not in done:
            judge(base)
        judge(name)


def _line(found: dict[str, Any], base: dict[str, Any]) -> str:
    """The ratios of KL divergence and of loss change, and loss over the base in standard errors."""
    pairs = [(each, base["texts"][name]) for name, each in found["texts"].items()]
    kl = [a["kl_divergence"][0] / b["kl_divergence"][0] for a, b in pairs]
    loss = [a["loss_change"][0] / b["loss_change"][0] for a, b in pairs]
    errors = [a["loss_over_base"][0] / (a["loss_over_base"][1] or 1) for a, _ in pairs]
    lists = (" ".join(f"{each:.2f}" for each in found) for found in (kl, loss, errors))
    return "KL {}; loss {}; over it in errors {}".format(*lists)


if __name__ == "__main__":
    main()
