"""The steps that have passed, in a file from which a later run takes them: one run may have a GPU
for less time than all steps take. A step counts as long as the programs and scripts that it runs,
the GPUs and their driver are the same."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path


class Passed:
    """`of` says what the steps are of; what the file has of anything else, or a file that is not
    whole, counts for nothing. Without a file nothing is kept."""

    def __init__(self, file: Path | None, of: dict) -> None:
        self._file, self._of, self._lock = file, of, threading.Lock()
        found = None
        if file is not None and file.exists():
            try:
                found = json.loads(file.read_text())
            except ValueError as error:
                print(f"{file} is left aside: {error}")
        known = isinstance(found, dict) and found.get("of") == of
        self._steps: dict[str, dict] = found["steps"] if known else {}

    def once(self, name: str, work: Callable[..., dict]) -> Callable[..., dict]:
        """`work`, but for a step that has passed, whose result is returned at once."""

        def run(*arguments: object) -> dict:
            if name in self._steps:
                return self._steps[name] | {"resumed": True}
            began = time.monotonic()
            result = work(*arguments)
            if "missing" not in result:
                self._keep(name, result | {"seconds": round(time.monotonic() - began, 1)})
            return result

        return run

    def _keep(self, name: str, result: dict) -> None:
        with self._lock:
            self._steps[name] = result
            if self._file is None:
                return
            whole = self._file.with_suffix(".new")
            whole.write_text(json.dumps({"of": self._of, "steps": self._steps}))
            os.replace(whole, self._file)
