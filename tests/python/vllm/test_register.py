"""Which versions of vLLM the plugin serves, and how it is switched off. vLLM is not needed."""

import sys
import types
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


@pytest.mark.parametrize(
    ("version", "problem"), [("0.33.1", "not 0.33.1"), ("0.32.0", "No module named 'vllm.")]
)
def test_a_vllm_that_is_not_served_is_named_once(version, problem, monkeypatch):
    """The second lacks what the plugin imports."""
    said = []
    logger = types.SimpleNamespace(warning=lambda text, *values: said.append(text % values))
    vllm = types.ModuleType("vllm")
    vllm.__version__, vllm.__path__ = version, []
    vllm_logger = types.ModuleType("vllm.logger")
    vllm_logger.init_logger = lambda name: logger
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.logger", vllm_logger)
    nf4.vllm.register()
    (text,) = said
    assert "libnf4 does not serve vLLM: " in text and problem in text and "NF4_VLLM=0" in text


def test_the_entry_point_is_the_function():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    name, _, function = project["entry-points"]["vllm.general_plugins"]["nf4"].partition(":")
    assert getattr(import_module(name), function) is nf4.vllm.register
