"""Which functions of torch.distributed are wrapped, when, and how that ends. What it does is tested
in ../distributed."""

import subprocess
import sys
import types

import pytest
import warm

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.fsdp")
if not torch.distributed.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

import nf4.torch  # noqa: E402
from nf4.torch import _distributed  # noqa: E402
from nf4.torch.distributed import prepare  # noqa: E402
from torch import nn  # noqa: E402

FUNCTIONS = {
    each.function.rpartition(".")[2] for found in _distributed._WRAPPED.values() for each in found
}


def wrapped() -> set[str]:
    return {each.attribute for each in _distributed._replaced}


def test_all_are_known_here():
    assert wrapped() == FUNCTIONS


@pytest.mark.parametrize("order", ["import nf4.torch, {}", "import {}, nf4.torch"])
def test_before_and_after_torchs_modules(order):
    """And importing nf4.torch loads none of them."""
    modules = "torch.distributed.fsdp"
    code = (
        "import torch, sys; before = 'torch.distributed.fsdp' in sys.modules\n"
        "import nf4.torch; assert before == ('torch.distributed.fsdp' in sys.modules)\n"
        if order.startswith("import nf4")
        else ""
    ) + (
        f"{order.format(modules)}\n"
        "from nf4.torch import _distributed\n"
        "print(*sorted({each.attribute for each in _distributed._replaced}))"
    )
    # Before torch's modules it takes a process that has not imported them.
    if order.startswith("import nf4"):
        command = [sys.executable, "-c", code]
        made = subprocess.run(command, capture_output=True, text=True)
    else:
        made = warm.run(code)
    assert made.returncode == 0, made.stderr
    assert set(made.stdout.split()) == FUNCTIONS


def test_given_back_and_taken_again():
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    ours = _fsdp_init._get_managed_states
    _distributed.unregister()
    try:
        assert _fsdp_init._get_managed_states is ours.__wrapped__ and not wrapped()
    finally:
        _distributed.register()
    assert _fsdp_init._get_managed_states is not ours.__wrapped__ and wrapped() == FUNCTIONS


def test_one_that_is_not_known_is_left_alone(monkeypatch):
    """An error would reach whoever imports torch's module."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    name = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
    other = types.ModuleType(name)
    other._get_param_module_infos = lambda everything: None
    before = other._get_param_module_infos
    _distributed.unregister()
    try:
        monkeypatch.setitem(sys.modules, name, other)
        original = _fsdp_init._get_managed_states
        with pytest.warns(UserWarning, match="does not serve fully_shard: TypeError.*everything"):
            for each in ("torch.distributed.fsdp._fully_shard._fsdp_init", name):
                _distributed._loaded(each)
        assert other._get_param_module_infos is before
        assert _fsdp_init._get_managed_states is original  # half of them would serve nothing
    finally:
        monkeypatch.undo()
        _distributed.unregister()
        _distributed.register()


def test_prepared_layers_are_what_they_were():
    """Results, state_dict and casts, without a process group."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    for at, layer in enumerate(made):
        made[at] = (
            nf4.torch.NF4Linear.from_linear(layer)
            if at
            else nf4.torch.Int4Linear.from_linear(layer, group_size=32)
        )
    x = torch.randn(3, 64)
    y, state = made(x), {key: value.clone() for key, value in made.state_dict().items()}
    assert prepare(made) == ["0", "1"]
    assert prepare(made) == []
    assert torch.equal(made(x), y)
    found = made.state_dict()
    assert list(found) == list(state)
    assert all(type(found[key]) is torch.Tensor for key in found)
    assert all(torch.equal(found[key], each) for key, each in state.items())
    assert torch.equal(made.bfloat16().float()(x), made(x))
    for assign in (False, True):
        made.load_state_dict(state, assign=assign)
        assert torch.equal(made(x), y)
    with pytest.raises(nf4.InvalidArgument, match="model is of type int"):
        prepare(3)


def test_a_part_does_nothing_else():
    made = nf4.torch.NF4Linear.from_linear(nn.Linear(64, 64))
    prepare(nn.Sequential(made))
    with pytest.raises(
        NotImplementedError, match="add.Tensor is called on a part of a quantized weight"
    ):
        made.weight + 1
    made.weight.requires_grad_()
    assert not made.weight.requires_grad
