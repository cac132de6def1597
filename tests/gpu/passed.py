"""The steps that have passed, in a file from which a later run takes them: one run may have a GPU
for less time than all steps take. A step counts as long as what it depends on is the same
(run.py)."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path


class Passed:
    """A file that is not whole counts for nothing. Without a file nothing is kept."""

    def __init__(self, file: Path | None) -> None:
        self._file, self._lock = file, threading.Lock()
        found = None
        if file is not None and file.exists():
            try:
                found = json.loads(file.read_text())
            except ValueError as error:
                print(f"{file} is left aside: {error}")
        self._steps: dict[str, dict] = found if isinstance(found, dict) else {}

    def once(self, name: str, of: dict, work: Callable[..., dict]) -> Callable[..., dict]:
        """`work`, but for a step that has passed with the same `of`, whose result is returned at
        once."""

        def run(*arguments: object) -> dict:
            kept = self._steps.get(name, {})
            if kept.get("of") == of:
                return kept["result"] | {"resumed": True}
            began = time.monotonic()
            result = work(*arguments)
            if "missing" not in result:
                seconds = round(time.monotonic() - began, 1)
                self._keep(name, {"of": of, "result": result | {"seconds": seconds}})
            return result

        return run

    def _keep(self, name: str, step: dict) -> None:
        with self._lock:
            self._steps[name] = step
            if self._file is None:
                return
            whole = self._file.with_suffix(".new")
            whole.write_text(json.dumps(self._steps))
            os.replace(whole, self._file)
