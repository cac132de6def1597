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
    """`of`: what each run depends on. A file that is not whole counts for nothing. Without a file
    nothing is kept."""

    def __init__(self, file: Path | None = None, of: Mapping[str, object] | None = None) -> None:
        self._file, self._of, self._lock = file, dict(of or {}), threading.Lock()
        found = None
        if file is not None and file.exists():
            try:
                found = json.loads(file.read_text())
            except ValueError as error:
                print(f"{file} is left aside: {error}")
        self._runs: dict[str, dict] = found if isinstance(found, dict) else {}

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
        of = self._of | dict(of)
        kept = self._runs.get(name)
        if kept is not None and kept["of"] == of:
            return kept["result"] | {"resumed": True}
        began = time.monotonic()
        result = work()
        result |= {"seconds": round(time.monotonic() - began, 1)}
        self._keep(name, {"of": of, "result": result})
        return result

    def _keep(self, name: str, run: dict) -> None:
        with self._lock:
            self._runs[name] = run
            if self._file is None:
                return
            whole = self._file.with_suffix(".new")
            whole.write_text(json.dumps(self._runs, indent=0, sort_keys=True) + "\n")
            os.replace(whole, self._file)
