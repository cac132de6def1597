"""Models that Python packages ship."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path


def packaged_file(package: str, ending: str) -> Path:
    """The file of the package whose name ends so. SystemExit if it is not installed."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(ending):
            return Path(str(file.locate()))
    sys.exit(f"no model; install {package}, or name a model")
