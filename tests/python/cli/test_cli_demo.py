"""tools/demo/demo.py, which `./dev demo` runs, on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import checkpoint_helpers as helpers
import pytest

DEMO = Path(__file__).resolve().parents[3] / "tools" / "demo" / "demo.py"

if importlib.util.find_spec("matplotlib") is None:
    pytest.skip("matplotlib is not installed", allow_module_level=True)


def _demo(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEMO), "--group-size", "32", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("kind", ["directory", "file", "shards"])
def test_demo_does_the_whole_job(kind, tmp_path):
    make = helpers.write_shards if kind == "shards" else helpers.write_model
    model = make(tmp_path / "tiny")
    if kind == "file":
        model = model / "model.safetensors"
    before = helpers.tree(tmp_path)
    for _ in range(2):
        result = _demo("--out", tmp_path / "out", "--model", model)
        assert result.returncode == 0, result.stderr
    name = "model" if kind == "file" else "tiny"
    assert "model.layers.0" in result.stdout and "ok (2 4-bit weights" in result.stdout
    assert str(tmp_path / "out" / "demo.png") in result.stdout.splitlines()[-1]
    assert (tmp_path / "out" / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    document = json.loads((tmp_path / "out" / "inspect.json").read_text())
    assert document["totals"]["weights"] == 2
    suffix = ".safetensors" if kind == "file" else ""
    made = {f"{name}-{kind}{suffix}" for kind in ("dense", "nf4", "int4", "mxfp4")}
    outputs = made | {"demo.png", "inspect.json"}
    assert "integers, groups of 32" in result.stdout and "MXFP4, blocks of 32" in result.stdout
    assert set(helpers.listing(tmp_path / "out")) == outputs
    after = helpers.tree(tmp_path)
    assert before.items() <= after.items()


def test_demo_says_what_is_wrong(tmp_path):
    result = _demo("--out", tmp_path / "out", "--model", tmp_path / "nothing")
    assert result.returncode == 1
    assert "nothing" in result.stderr and "Traceback" not in result.stderr


def test_demo_replaces_only_what_it_wrote(tmp_path):
    model = helpers.write_model(tmp_path / "tiny")
    other = helpers.write_model(tmp_path / "out" / "tiny-nf4")
    before = helpers.tree(other)
    arguments = ("--out", tmp_path / "out", "--model", model)
    result = _demo(*arguments)
    assert result.returncode == 1 and "exists already" in result.stderr
    assert helpers.tree(other) == before
    assert _demo(*arguments, "--force").returncode == 0
    assert helpers.tree(other) != before
