"""Does a calibration of NF4 hold on texts of other kinds than it saw? Judges several, beside the
scales of bitsandbytes, on five texts.

    python tools/quality/study.py FOLDER [--window N]

FOLDER is a dense causal language model with a tokenizer.json. The report is added by the folder's
name to docs/design/quality.json, from which page.py makes the tables of quality.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rounding
import texts
import torch
from nf4.torch.comparing import Judged, compare_logits, encoded, windows
from nf4.torch.distributed.empty_models import empty_model
from nf4.torch.distributed.loading import load_alone
from page import FIGURES
from torch import Tensor, nn

# Tokens of each kind that calibrate, and the most of each text that judge.
CALIBRATING, JUDGING, ROWS = 4096, 2000, 256
Round = Callable[[str, Tensor], Tensor]


class Model:
    """A dense model, its linear layers, and what they saw while it calibrated: the mean of x x^T of
    each layer's input, by kind of text."""

    def __init__(self, folder: Path, window: int):
        self.folder, self.window = str(folder), window
        self.model = empty_model(folder, dtype="fp32")
        load_alone(self.model, folder, None)
        self.layers = {
            name: layer
            for name, layer in self.model.named_modules()
            if isinstance(layer, nn.Linear) and name != "lm_head"
        }
        self.dense = {name: layer.weight.detach().clone() for name, layer in self.layers.items()}
        self.seen: dict[str, dict[str, Tensor]] = {}

    def tokens(self, named: dict[str, str], most: int) -> dict[str, list[int]]:
        found = encoded([self.folder], list(named.items()), self.window, self.window // 2)
        return {each.name: each.tokens[:most] for each in found}

    @torch.inference_mode()
    def calibrate(self) -> None:
        for kind, tokens in self.tokens(texts.calibrating(), CALIBRATING).items():
            sums: dict[int, Tensor] = {}
            hooks = [layer.register_forward_pre_hook(self._hook(sums)) for layer in self._inputs()]
            for at in range(0, len(tokens), self.window):
                self.logits(tokens[at : at + self.window])
            for hook in hooks:
                hook.remove()
            means = {id(layer): sums[id(layer)] / len(tokens) for layer in self._inputs()}
            self.seen[kind] = {name: means[id(self._like(name))] for name in self.layers}

    def _like(self, name: str) -> nn.Module:
        """The layer whose input is this one's too: k and v have q's, up has gate's."""
        owner, _, own = name.rpartition(".")
        own = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}.get(own, own)
        return self.layers[f"{owner}.{own}"]

    def _inputs(self) -> list[nn.Module]:
        return list({id(each): each for each in map(self._like, self.layers)}.values())

    @staticmethod
    def _hook(sums: dict[int, Tensor]) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor]) -> None:
            x = inputs[0].flatten(0, -2)
            sums[id(layer)] = sums.get(id(layer), 0) + x.T @ x

        return hook

    def hessian(self, name: str, kinds: tuple[str, ...] = ()) -> Tensor:
        """Of all kinds alike, or of these."""
        return torch.stack([self.seen[kind][name] for kind in kinds or self.seen]).mean(0)

    def squares(self, name: str, kinds: tuple[str, ...] = ()) -> Tensor:
        """The mean x^2 of each column, over the mean of all columns."""
        found = self.hessian(name, kinds).diagonal()
        return found / found.mean()

    def logits(self, tokens: list[int]) -> Tensor:
        return self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]

    def set(self, rounds: Round) -> None:
        """Rounds every weight."""
        for name, layer in self.layers.items():
            layer.weight.data.copy_(rounds(name, self.dense[name]))


def choices(model: Model) -> dict[str, dict[str, Tensor]]:
    """Which of rounding.GRID each block takes, by design and layer."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, weight in model.dense.items():
        squares = model.squares(name)
        measures = {
            "least square error": torch.ones_like(squares),
            "least error by x^2": squares,
            "by the RMS of x": squares.sqrt(),
            "by (1 + x^2) / 2": (1 + squares) / 2,
        }
        kinds = {f"by x^2 of {kind} alone": model.squares(name, (kind,)) for kind in model.seen}
        errors = rounding.errors(weight, torch.stack([*measures.values(), *kinds.values()]))
        for at, design in enumerate((*measures, *kinds)):
            found.setdefault(design, {})[name] = errors[:, at].argmin(0).byte()
        errors = errors[:, len(measures) :]
        at_largest = errors[(rounding.GRID - 1).abs().argmin()].clamp_min(1e-30)
        worst = (errors / at_largest).amax(1)
        found.setdefault("by x^2, the worst kind", {})[name] = worst.argmin(0).byte()
    return found


def designs(model: Model) -> dict[str, Round]:
    """What is judged, by name. The first is bitsandbytes'."""

    def searched(chosen: dict[str, Tensor]) -> Round:
        return lambda name, weight: rounding.with_factors(weight, chosen[name].long())

    def feedback(damping: float, search: bool) -> Round:
        return lambda name, weight: rounding.with_feedback(
            weight, model.hessian(name), damping, search
        )

    found = choices(model)
    unused = [f"by x^2 of {kind} alone" for kind in model.seen if kind != "book"]
    return {
        "as bitsandbytes": lambda name, weight: rounding.by_largest(weight),
        **{name: searched(each) for name, each in found.items() if name not in unused},
        "GPTQ, damped by 0.01": feedback(0.01, search=False),
        "GPTQ by x^2, damped by 0.1": feedback(0.1, search=True),
        "GPTQ by x^2, damped by 1": feedback(1.0, search=True),
    }


class Judging:
    """The judging texts, and the dense model's logits on them."""

    def __init__(self, model: Model):
        self._model = model
        self._texts = model.tokens(texts.judging(), JUDGING)
        self._dense = {name: list(self._logits(tokens)) for name, tokens in self._texts.items()}

    @torch.inference_mode()
    def _logits(self, tokens: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the logits and the targets of each window."""
        window = self._model.window
        for begin, end, scored in windows(len(tokens), 0, window, window * 3 // 4):
            logits = self._model.logits(tokens[begin:end])[scored - begin - 1 : -1]
            yield logits, torch.tensor(tokens[scored:end])

    def report(self) -> dict[str, Any]:
        """Judges the weights that the model has now."""
        rows = {}
        for name, tokens in self._texts.items():
            total = Judged()
            for (before, targets), (after, _) in zip(
                self._dense[name], self._logits(tokens), strict=True
            ):
                total += Judged(tokens=len(targets), windows=1)
                for at in range(0, len(targets), ROWS):
                    part = slice(at, at + ROWS)
                    total += compare_logits(before[part], after[part], targets[part])
            rows[name] = {
                "tokens": total.tokens,
                "perplexities": total.perplexities,
                "loss_change": total.loss_change,
                "kl_divergence": total.divergence / total.tokens,
            }
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--window", type=int, default=512)
    args = parser.parse_args()
    model = Model(args.folder, args.window)
    model.calibrate()
    judging, done = Judging(model), {}
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for name, rounds in designs(model).items():
        model.set(rounds)
        done[name] = {"texts": judging.report()}
        figures[args.folder.name] = {"window": args.window, "designs": done}
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
        divergences = (f"{each['kl_divergence']:.4f}" for each in done[name]["texts"].values())
        print(f"{name}: KL {' '.join(divergences)}", flush=True)


if __name__ == "__main__":
    main()
