"""Which versions of vLLM the plugin serves, and how it is switched off."""

import sys
from importlib import import_module
from pathlib import Path

import nf4.vllm
import pytest
import tomllib


@pytest.mark.parametrize("version", ["0.32.0", "0.32.3+cpu", "0.32"])
def test_tested_versions_are_served(version):
    assert nf4.vllm.version_problem(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "0.6.3.post1", "dev"])
def test_other_versions_are_named(version):
    assert f"not {version}" in nf4.vllm.version_problem(version)


@pytest.mark.parametrize("value", ["0", "off", " False "])
def test_it_can_be_switched_off(value, monkeypatch):
    monkeypatch.setenv("NF4_VLLM", value)
    monkeypatch.setitem(sys.modules, "vllm", None)
    nf4.vllm.register()  # does not import vLLM


def test_the_entry_point_is_the_function():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    name, _, function = project["entry-points"]["vllm.general_plugins"]["nf4"].partition(":")
    assert getattr(import_module(name), function) is nf4.vllm.register
