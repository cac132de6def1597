"""The matrices of experts, one each or as a stack, become this rank's stacks."""

from __future__ import annotations

from types import SimpleNamespace

import nf4.torch
import pytest
import torch
from nf4.vllm import experts, loading
from torch import Tensor

COUNT, HIDDEN, INTERMEDIATE, RANKS = 4, 128, 256, 2


def weight(*shape: int, seed: int = 0) -> nf4.QuantizedTensor:
    generator = torch.Generator().manual_seed(seed)
    return nf4.torch.quantize(torch.randn(shape, generator=generator))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "FLAT_ON", ())


def dense(each: nf4.QuantizedTensor) -> Tensor:
    return nf4.torch.dequantize(each, "fp32")


def layer_of(rank: int, here: range = range(COUNT)) -> SimpleNamespace:
    """A layer that has the experts in `here`, in the opposite order."""
    places = {expert: len(here) - 1 - i for i, expert in enumerate(here)}
    parallel = SimpleNamespace(tp_size=RANKS, tp_rank=rank)
    return SimpleNamespace(
        layer_name="experts",
        nf4_device=torch.device("cpu"),
        nf4_placed={},
        nf4_sizes={"num_experts": len(here)},
        moe_config=SimpleNamespace(moe_parallel_config=parallel),
        _map_global_expert_id_to_local_expert_id=lambda each: places.get(each, -1),
    )


def part(matrix: Tensor, dim: int, rank: int) -> Tensor:
    return matrix.chunk(RANKS, dim)[rank]


@pytest.mark.parametrize("here", [range(COUNT), range(1, 3)])
@pytest.mark.parametrize("rank", range(RANKS))
def test_matrices_of_single_experts(rank: int, here: range) -> None:
    """Each has nested scales with an offset of its own, so that the stack gets fp32 scales."""
    layer, expected = layer_of(rank, here), {"w13": [], "w2": []}
    for expert in range(COUNT):
        gate, up = weight(INTERMEDIATE, HIDDEN, seed=expert), weight(INTERMEDIATE, HIDDEN, seed=9)
        down = weight(HIDDEN, INTERMEDIATE, seed=expert)
        kept = [
            experts._place(layer, each, shard, expert)
            for shard, each in (("w1", gate), ("w3", up), ("w2", down))
        ]
        assert kept == [expert in here] * 3
        if expert in here:
            halves = [part(dense(each), 0, rank) for each in (gate, up)]
            expected["w13"].insert(0, torch.cat(halves))
            expected["w2"].insert(0, part(dense(down), 1, rank))
    for stack, shards in experts.STACKS.items():
        made = experts._stacked(layer, layer.nf4_placed, shards)
        assert torch.equal(dense(made), torch.cat(expected[stack]))


@pytest.mark.parametrize("here", [range(COUNT), range(1, 3)])
@pytest.mark.parametrize("rank", range(RANKS))
def test_stacks(rank: int, here: range) -> None:
    layer = layer_of(rank, here)
    gate_up, down = weight(COUNT, 2 * INTERMEDIATE, HIDDEN), weight(COUNT, HIDDEN, INTERMEDIATE)
    for shard, each in (("w1", gate_up), ("w3", gate_up), ("w2", down)):
        assert experts._place(layer, each, shard, 0)
    own = list(reversed(here))
    halves = dense(gate_up)[own].view(len(own), 2, INTERMEDIATE, HIDDEN)
    w13, w2 = layer.nf4_placed["w1"], layer.nf4_placed["w2"]
    assert w13.nested and torch.equal(dense(w13), part(halves, 2, rank).reshape(-1, HIDDEN))
    columns = part(dense(down)[own], 2, rank)
    assert torch.equal(dense(w2), columns.reshape(-1, INTERMEDIATE // RANKS))


def test_an_expert_that_is_missing_is_named() -> None:
    layer = layer_of(0)
    for expert in (0, 1, 3):
        experts._place(layer, weight(HIDDEN, INTERMEDIATE), "w2", expert)
    with pytest.raises(ValueError, match=r"experts: the checkpoint lacks \('w2', 1\)"):
        experts._stacked(layer, layer.nf4_placed, ("w2",))


def test_the_activation_has_the_limits_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def apply(activation: str, hidden: Tensor, gate_up: Tensor, activation_config: object) -> None:
        assert hidden.shape == (2, 4)
        found.append(activation_config)

    monkeypatch.setattr(experts.fused_moe, "apply_moe_activation", apply)
    limits = {"swiglu_limit": 7.0, "swiglu_alpha": 1.5, "swiglu_beta": None}
    others = {"activation_situ_beta": 2.0, "activation_situ_linear_beta": None}
    moe = SimpleNamespace(has_bias=False, **limits, **others)
    layer = SimpleNamespace(activation="silu", nf4_w2=((), SimpleNamespace(cols=4)))
    experts.NF4ExpertsMethod(moe, None, {}).activated(layer, torch.ones(2, 8))
    assert (found[0].clamp_limit, found[0].alpha, found[0].activation_situ_beta) == (7.0, 1.5, 2.0)
