"""Evaluates and writes llm_int8_skip_modules, the modules that transformers leaves as they are.

transformers.quantizers.quantizers_utils.should_convert_module leaves a module alone if an entry,
as a regular expression, matches its name from the start up to a dot or the end, or if the name
ends with the entry. SkipMatcher finds such modules by bisection in sorted names, so that a list
of names is judged in near-linear time.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

# Only these entries are run as regular expressions, because they come from a file: names, names
# escaped by re.escape, at most one ".*", and "$" at the end. All of them compile.
_PLAIN = r"(?:[\w .:/-]|\\[^\w])*"
_SIMPLE = re.compile(rf"({_PLAIN})(?:(?<!\\)\.\*({_PLAIN}))?(\$?)")
_TOKEN = re.compile(r"\\(?P<escaped>[^\w])|(?P<any>\.)|(?P<literal>[^\\.]+)")
# The most bisections and regular expressions that one SkipMatcher runs; they take a few seconds.
MAX_STEPS = 1_000_000
# Names i to j of a sorted list, which all begin with the same characters.
_Range = tuple[int, int]


def is_simple(entry: str) -> bool:
    """Tells if this entry can be evaluated in full. Other entries are only evaluated as
    suffixes."""
    return _SIMPLE.fullmatch(entry) is not None


class SkipMatcher:
    """Finds the modules that entries of llm_int8_skip_modules skip.

    steps: bisections and regular expressions so far. At max_steps the matcher is `exhausted`:
    from then on it judges entries as suffixes only.
    """

    def __init__(self, modules: Iterable[str], max_steps: int = MAX_STEPS):
        self._names = sorted(set(modules))
        self._reversed = sorted(name[::-1] for name in self._names)
        self._max_steps = max_steps
        self.steps = 0

    @property
    def exhausted(self) -> bool:
        return self.steps >= self._max_steps

    def skipped(self, entry: str) -> Iterator[str]:
        """Yields the modules that `entry` skips, some of them twice."""
        suffix = entry[::-1]
        for i, j in self._with_text(self._reversed, (0, len(self._names)), 0, suffix):
            yield from (name[::-1] for name in self._reversed[i:j])
        simple = _SIMPLE.fullmatch(entry)
        if simple is not None and not self.exhausted:
            yield from self._matched(entry, *simple.groups())

    def first(self, entry: str) -> str | None:
        """Returns a module that `entry` skips, or None."""
        return next(self.skipped(entry), None)

    def _with_text(
        self, names: list[str], within: _Range, depth: int, text: str
    ) -> Iterator[_Range]:
        """Yields the part of a range whose names continue with `text` after `depth` characters."""
        end = depth + len(text)
        i = bisect_left(names, text, *within, key=lambda name: name[depth:end])
        j = bisect_right(names, text, i, within[1], key=lambda name: name[depth:end])
        self.steps += 1
        if i < j:
            yield i, j

    def _by_character(self, within: _Range, depth: int) -> Iterator[_Range]:
        """Yields the parts of a range, one for each character that follows `depth` characters."""
        i, end = within
        if len(self._names[i]) == depth:
            i += 1
        while i < end and not self.exhausted:
            (part,) = self._with_text(self._names, (i, end), depth, self._names[i][depth])
            yield part
            i = part[1]

    def _matched(self, entry: str, head: str, tail: str | None, end: str) -> Iterator[str]:
        ranges, depth = [(0, len(self._names))] if self._names else [], 0
        for token in _TOKEN.finditer(head):
            if token["any"]:
                ranges = [part for found in ranges for part in self._by_character(found, depth)]
                depth += 1
            else:
                text = token["escaped"] or token["literal"]
                ranges = [
                    p for found in ranges for p in self._with_text(self._names, found, depth, text)
                ]
                depth += len(text)
        for found in ranges:
            if tail is None:
                yield from self._up_to_boundary(found, depth, end)
            elif tail == "":
                yield from self._names[slice(*found)]
            else:
                yield from self._searched(found, entry)

    def _up_to_boundary(self, found: _Range, depth: int, end: str) -> Iterator[str]:
        first = self._names[found[0]]
        if len(first) == depth:
            yield first
        if end:
            return
        if first[depth - 1 : depth] == ".":
            yield from self._names[slice(*found)]
        else:
            for part in self._with_text(self._names, found, depth, "."):
                yield from self._names[slice(*part)]

    def _searched(self, found: _Range, entry: str) -> Iterator[str]:
        pattern = re.compile(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))")
        for name in self._names[slice(*found)]:
            if self.exhausted:
                return
            self.steps += 1
            if pattern.match(name):
                yield name


def skip_entries(
    dense: Iterable[str], quantized: Iterable[str], absent: Iterable[str] = ()
) -> list[str]:
    """Returns entries for llm_int8_skip_modules that skip every module of `dense` and none of
    `quantized`.

    All experts of a layer share an entry. `absent`: entries for output layers that are tied and
    not in the file; left out where they would skip a module of `quantized`.
    """
    matcher = SkipMatcher(quantized)
    entries = {entry for entry in absent if matcher.first(entry) is None}
    experts: dict[str, bool] = {}
    for module in set(dense):
        layer, mark, _ = module.partition(".experts.")
        shared = f"{layer}.experts"
        if mark and shared not in experts:
            experts[shared] = _skips_nothing(matcher, shared)
        if mark and experts[shared]:
            entries.add(shared)
        elif _skips_nothing(matcher, module):
            entries.add(module)
        else:
            entries.add(f"{re.escape(module)}$")
    return sorted(entries)


def _skips_nothing(matcher: SkipMatcher, entry: str) -> bool:
    return matcher.first(entry) is None and is_simple(entry) and not matcher.exhausted
