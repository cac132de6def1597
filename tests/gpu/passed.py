"""The steps that have passed, in a file: a later run of the same code, build and kind of GPU takes
them from there, as a record may take longer than a GPU can be had at a time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path


class Passed:
    """`of` says what they are of; what the file has of anything else counts for nothing. Without a
    file nothing is kept."""

    def __init__(self, file: Path | None, of: dict) -> None:
        self._file, self._of, self._lock = file, of, threading.Lock()
        found = json.loads(file.read_text()) if file is not None and file.exists() else {}
        self._steps: dict[str, dict] = found["steps"] if found.get("of") == of else {}

    def once(self, name: str, work: Callable[..., dict]) -> Callable[..., dict]:
        """`work`, but for a step that has passed, whose result is returned at once."""

        def run(*arguments: object) -> dict:
            if name in self._steps:
                return self._steps[name]
            result = work(*arguments)
            with self._lock:
                self._steps[name] = result
                if self._file is not None:
                    self._file.write_text(json.dumps({"of": self._of, "steps": self._steps}))
            return result

        return run
