"""FSDP2 on two GPUs. gpu_fsdp_checks.py has the checks."""

import sys
from pathlib import Path

import pytest
from gpu_cases import NEEDS_GPU

pytestmark = [pytest.mark.interop, NEEDS_GPU]
torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2 or not torch.distributed.is_nccl_available():
    pytest.skip("needs two GPUs and NCCL", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import gpu_fsdp_checks  # noqa: E402
import ranks  # noqa: E402

NAMES = [name for name in vars(gpu_fsdp_checks) if name.startswith("check_")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return ranks.run("gpu_fsdp_checks", NAMES, 2, folder, "nccl")


@pytest.mark.parametrize("name", NAMES)
def test_gpu_fsdp(name, found):
    ranks.require_passed(found[name])
