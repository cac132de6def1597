"""Generates nf4/checkpoint/known_models.py: what tensor names do not show of transformers' models.

    python tools/known_models.py [--jobs N]

Every model class is built as in check_architectures.py. Where the rules by name quantize a weight
that transformers does not load in 4 bits, or leave out an entry of llm_int8_skip_modules, the
shortest pattern that mends it becomes an entry of the class's model_type. A model_type that no
pattern mends is left dense: its dense is "*".
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import check_architectures as checks
import nf4.checkpoint.rules as rules
from nf4.checkpoint.known_models import Known
from nf4.checkpoint.rules import matches, module_of
from nf4.checkpoint.skips import SkipMatcher

_FILE = Path(__file__).parents[1] / "bindings/python/nf4/checkpoint/known_models.py"
_ROUNDS = 8
_EVERYTHING = Known(dense=("*",))


def _runs(module: str) -> list[str]:
    """Runs of whole parts of a name without numbers, the shortest first."""
    parts = module.split(".")
    spans = [parts[i:j] for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]
    plain = {".".join(span) for span in spans if not any(part.isdigit() for part in span)}
    return sorted(plain, key=lambda run: (run.count("."), len(run), run))


def _starred(module: str, star: str) -> list[str]:
    """The name with `star` for all from its first number to its last; none without numbers."""
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    if not numbers or numbers[0] == 0:
        return []
    return [".".join([*parts[: numbers[0]], star, *parts[numbers[-1] + 1 :]])]


def _dense_pattern(module: str, kept: Iterable[str]) -> str:
    """The pattern that names `module` and the fewest of `kept`."""
    kept = list(kept)
    candidates = [*_runs(module), *_starred(module, "*"), module]
    return min(candidates, key=lambda run: sum(matches(run, other) for other in kept))


def _skip_entry(module: str, matcher: SkipMatcher) -> str | None:
    """The entry that skips `module` and no module of the matcher."""
    runs = _runs(module)
    entries = [run for run in runs if module.endswith(run) or f"{module}.".startswith(f"{run}.")]
    entries += [f".*{run}" for run in runs] + [f"{e}$" for e in [*_starred(module, ".*"), module]]
    return next((entry for entry in entries if matcher.first(entry) is None), None)


class Learner:
    """Learns the entries of model types from the classes of each."""

    def __init__(self, found: Iterable[checks.Architecture]):
        self.classes = list(found)
        self.known: dict[str, Known] = {}
        self._wrong: dict[str, set[str]] = {}
        self._bare: dict[str, set[str]] = {}
        self._good: dict[str, set[str]] = {}

    def _judge(self, found: checks.Architecture) -> None:
        """Find the weights that must stay dense and the modules that lack a skip entry."""
        name, model = found.kind.__name__, found.model
        choice = checks.choose(found, "names")
        skipped = choice.skipped(model)
        good = {
            weight
            for weight, transposed in choice.weights.items()
            if model.reasons[weight] is None
            and model.modules[weight] not in model.read_by_owners
            and model.modules[weight] not in skipped
            and (model.modules[weight] in model.conv1d) == transposed
        }
        targets = {model.modules[weight] for weight in good}
        self._wrong[name] = choice.weights.keys() - good
        # Once such a weight is left dense, its module is skipped by the name that both have.
        same = {module_of(w) for w in self._wrong[name] if module_of(w) == model.modules[w]}
        read = same & model.read_by_owners
        bare = model.linear - skipped - targets - read
        self._bare[name] = bare if choice.weights else set()
        self._good[name] = good

    def _mend(self, model_type: str, classes: list[checks.Architecture]) -> None:
        known = self.known.get(model_type, Known())
        dense, skip = set(known.dense), set(known.skip)
        names = [found.kind.__name__ for found in classes]
        kept = {module_of(weight) for name in names for weight in self._good[name]}
        wrong = {module_of(weight) for name in names for weight in self._wrong[name]}
        for module in sorted(wrong, key=lambda name: (name.count("."), name)):
            if not any(matches(pattern, module) for pattern in dense):
                dense.add(_dense_pattern(module, kept))
        targets = {f.model.modules[w] for f in classes for w in self._good[f.kind.__name__]}
        matcher = SkipMatcher(targets, sys.maxsize)
        for module in sorted(set[str]().union(*(self._bare[name] for name in names))):
            if not any(SkipMatcher([module]).first(entry) for entry in skip):
                entry = _skip_entry(module, matcher)
                skip |= {entry} if entry else set()
                dense |= set() if entry else {"*"}
        mended = Known(tuple(sorted(dense)), tuple(sorted(skip)))
        hopeless = mended == known or "*" in dense or not kept
        self.known[model_type] = _EVERYTHING if hopeless else mended

    def learn(self) -> dict[str, Known]:
        """The entries, by model type."""
        by_type = collections.defaultdict(list)
        for found in self.classes:
            by_type[found.config.model_type].append(found)
        due = set(by_type)
        for _ in range(_ROUNDS):
            rules.KNOWN.clear()
            rules.KNOWN.update(self.known)
            for found in self.classes:
                if found.config.model_type in due or due & found.types:
                    self._judge(found)
            bad = {name for name, w in self._wrong.items() if w or self._bare[name]}
            due = {f.config.model_type for f in self.classes if f.kind.__name__ in bad}
            for model_type in due:
                self._mend(model_type, by_type[model_type])
            if not due:
                break
        return dict(sorted(self.known.items()))


def source(known: dict[str, Known], version: str) -> str:
    """The module's text."""
    head = _FILE.read_text().partition("# Of transformers")[0].rstrip()
    lines = [f"{head}\n\n\n# Of transformers {version}.\nKNOWN: dict[str, Known] = {{"]
    for model_type, entry in known.items():
        fields = [f"{field}={value!r}" for field, value in vars(entry).items() if value]
        lines.append(f'    "{model_type}": Known({", ".join(fields)}),')
    return "\n".join([*lines, "}\n"]).replace("'", '"')


def _build(name: str) -> checks.Architecture | None:
    try:
        return checks.architecture(name)
    except Exception:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.jobs, checks.quiet, maxtasksperchild=100) as pool:
        built = pool.imap_unordered(_build, checks.class_names())
        learner = Learner(sorted(filter(None, built), key=lambda found: found.kind.__name__))
    _FILE.write_text(source(learner.learn(), checks.transformers.__version__))


if __name__ == "__main__":
    main()
