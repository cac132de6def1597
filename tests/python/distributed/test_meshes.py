"""Quantized layers on meshes of two dimensions, by four processes.
mesh_checks.py has the checks."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.fsdp")
if not torch.distributed.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

import mesh_checks  # noqa: E402
import ranks  # noqa: E402

pytestmark = pytest.mark.interop
NAMES = [name for name in vars(mesh_checks) if name.startswith("check_")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return ranks.run("mesh_checks", NAMES, 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", NAMES)
def test_meshes(name, found):
    ranks.require_passed(found[name])
