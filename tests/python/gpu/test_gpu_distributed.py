"""FSDP2, tensor parallelism and sharded checkpoints on two GPUs, with NCCL. The modules named here
have the checks."""

import importlib
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
import checkpoint_models  # noqa: E402
import ranks  # noqa: E402

# Memory is that of the process there.
LEFT_OUT = {"checkpoint_checks": {"check_memory"}}
NAMES = {
    module: [
        name
        for name in vars(importlib.import_module(module))
        if name.startswith("check_") and name not in LEFT_OUT.get(module, ())
    ]
    for module in ("gpu_fsdp_checks", "gpu_parallel_checks", "checkpoint_checks")
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What the checks of a module found: its processes are started once."""
    found = {}

    def made(module):
        if module not in found:
            folder = tmp_path_factory.mktemp(module)
            found[module] = ranks.run(module, NAMES[module], 2, folder, "nccl")
        return found[module]

    data = tmp_path_factory.mktemp("checkpoints")
    checkpoint_models.write_models(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHECKPOINTS", str(data))
        yield made


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in NAMES.items() for name in names]
)
def test_gpu_distributed(module, name, run):
    ranks.require_passed(run(module)[name])
