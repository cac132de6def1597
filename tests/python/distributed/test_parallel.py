"""Quantized layers under tensor parallelism, by two processes: parallel_checks.py and
parallel_model_checks.py have the checks."""

import pytest
import torch_cases

pytestmark = pytest.mark.interop
torch_cases.require("torch", "peft", "transformers")
import torch  # noqa: E402

if not torch.distributed.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

import parallel_checks  # noqa: E402
import parallel_model_checks  # noqa: E402
import ranks  # noqa: E402

MODULES = (parallel_checks, parallel_model_checks)
NAMES = {
    name: module.__name__
    for module in MODULES
    for name in vars(module)
    if name.startswith("check_")
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By the module of the checks, each of which is run when it is first asked for."""
    made = {}

    def of(module):
        if module not in made:
            names = [name for name, each in NAMES.items() if each == module]
            made[module] = ranks.run(module, names, 2, tmp_path_factory.mktemp(module))
        return made[module]

    return of


@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallel(name, found):
    ranks.require_passed(found(NAMES[name])[name])
