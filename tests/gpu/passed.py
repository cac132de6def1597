"""The runs that have passed, in a file from which a later one takes them: a GPU may be at hand for
less time than all steps take. A run counts as long as its command, the code, how it was built and
the GPUs and their driver are the same, whichever machine compiled it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gpu_execution import ROOT

GPU = "CUDA_VISIBLE_DEVICES"  # a run may have any of those that it depends on


class Passed:
    """`of`: what all runs depend on. A file of other code, or one that is not whole, counts for
    nothing. Without a file nothing is kept."""

    def __init__(self, file: Path | None = None, of: Mapping[str, object] | None = None) -> None:
        self._file, self._of, self._lock = file, dict(of or {}), threading.Lock()
        found = None
        if file is not None and file.exists():
            try:
                found = json.loads(file.read_text())
            except ValueError as error:
                print(f"{file} is left aside: {error}")
        same = isinstance(found, dict) and found.get("of") == self._of
        self._runs: dict[str, dict] = found["runs"] if same else {}

    def once(
        self,
        command: list[str],
        environment: Mapping[str, str],
        of: Mapping[str, str],
        work: Callable[[], dict],
    ) -> dict:
        """Returns what `work` does, and its seconds; of a run that has passed, what it returned
        then, "resumed". `of`: what this run depends on beside the rest."""
        on = (f"{name}={value}" for name, value in environment.items() if name != GPU)
        name = " ".join([*on, *command]).replace(f"{ROOT}/", "")
        kept = self._runs.get(name)
        if kept is not None and kept["of"] == of:
            return kept["result"] | {"resumed": True}
        began = time.monotonic()
        result = work()
        result |= {"seconds": round(time.monotonic() - began, 1)}
        self._keep(name, {"of": dict(of), "result": result})
        return result

    def _keep(self, name: str, run: dict) -> None:
        with self._lock:
            self._runs[name] = run
            if self._file is None:
                return
            whole = self._file.with_suffix(".new")
            rows = (f" {json.dumps(each)}: {json.dumps(self._runs[each])}" for each in self._runs)
            runs = ",\n".join(rows)
            whole.write_text(f'{{"of": {json.dumps(self._of)},\n"runs": {{\n{runs}\n}}}}\n')
            os.replace(whole, self._file)
