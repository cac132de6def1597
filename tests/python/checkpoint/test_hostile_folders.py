"""The folders of tests/support/hostile_folders.py, as the readers in C++ and Rust see them, too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nf4.checkpoint import Checkpoint, FormatError
from nf4.checkpoint.bnb import survey

_PROGRAM = Path(__file__).resolve().parents[2] / "support" / "hostile_folders.py"
_SECONDS = 20  # a reader that waits, or reads a device, never ends


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("hostile") / "folders"
    subprocess.run([sys.executable, _PROGRAM, made], check=True)
    return made


def _cases(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _read(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        survey(checkpoint).require_sound()


def test_good_folders_are_read(folders):
    for folder in _cases(folders / "read"):
        began = time.monotonic()
        _read(folder)
        assert time.monotonic() - began < _SECONDS, folder


@pytest.mark.parametrize("kind", ["refused", "refused_config"])
def test_hostile_folders_are_refused(kind, folders):
    cases = _cases(folders / kind)
    assert len(cases) > 10
    for folder in cases:
        began = time.monotonic()
        with pytest.raises((FormatError, OSError)) as caught:
            _read(folder)
            pytest.fail(f"{folder} is read")
        text = str(caught.value)
        assert text.isprintable(), folder
        assert os.fspath(folder) in text, folder
        assert time.monotonic() - began < _SECONDS, folder
