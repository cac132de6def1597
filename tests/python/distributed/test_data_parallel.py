"""Quantized layers under DDP, FSDP1 and replicate, and adapters beside sharded ones, by two
processes. data_parallel_checks.py has the checks."""

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)
pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

import data_parallel_checks  # noqa: E402
import ranks  # noqa: E402

pytestmark = pytest.mark.interop
NAMES = [name for name in vars(data_parallel_checks) if name.startswith("check_")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return ranks.run("data_parallel_checks", NAMES, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", NAMES)
def test_data_parallel(name, found):
    ranks.require_passed(found[name])
