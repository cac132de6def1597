"""Sharded checkpoints on two GPUs. checkpoint_checks.py and dcp_checks.py have the checks."""

import sys
from pathlib import Path

import pytest
from gpu_cases import NEEDS_GPU

pytestmark = [pytest.mark.interop, NEEDS_GPU]
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if torch.cuda.device_count() < 2 or not torch.distributed.is_nccl_available():
    pytest.skip("needs two GPUs and NCCL", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import checkpoint_checks  # noqa: E402
import checkpoint_models  # noqa: E402
import ranks  # noqa: E402

# Memory is that of the process there.
NAMES = [n for n in vars(checkpoint_checks) if n.startswith("check_") and n != "check_memory"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    data = tmp_path_factory.mktemp("checkpoints")
    checkpoint_models.write_models(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHECKPOINTS", str(data))
        folder = tmp_path_factory.mktemp("ranks")
        yield ranks.run("checkpoint_checks", NAMES, 2, folder, "nccl")


@pytest.mark.parametrize("name", NAMES)
def test_gpu_checkpoints(name, found):
    ranks.require_passed(found[name])
