"""What test_parallel.py has two processes check: PEFT's adapters, models of transformers and FSDP2
with layers that are cut for tensor parallelism."""

import copy
import tempfile

import nf4.torch
import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from checkpoint_models import mixture
from nf4.torch.distributed import (
    ColwiseParallel,
    RowwiseParallel,
    clip_grad_norm_,
    named_by_cut,
    plan_of,
)
from parallel_checks import IN, INNER, MLP, close, inputs, mesh_of, mine, mlp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}


def adapted(kind="nested", model=None, seed=7, **options):
    """With weights that are not zero."""
    config = {"r": 4, "target_modules": ["up", "down"]} | options
    made = peft.get_peft_model(model or mlp(kind), peft.LoraConfig(**config))
    torch.manual_seed(seed)
    for name, each in made.named_parameters():
        if "lora" in name:
            each.data = torch.randn_like(each) * 0.1
    return made


def cut(made, mesh, **options):
    inner = made.base_model.model if isinstance(made, peft.PeftModel) else made
    return parallelize_module(inner, mesh, {n: style() for n, style in PLAN.items()}, **options)


def check_adapters(rank, world):
    """Forward and backward, twice, as in one process; ranks begin with other adapters."""
    for kind in ("nested", "flat", "gptq", "act order"):
        whole, made = adapted(kind), adapted(kind, seed=7 + rank)
        cut(made, mesh_of(world))
        for seed in (1, 2):
            x = inputs(3, IN, seed=seed)
            found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
            y, reference = made(found), whole(expected)
            of_layer = made.base_model.model.up(found).grad_fn
            assert "Adapted" in type(of_layer).__name__  # layer and adapter are one product
            close(y.detach(), reference.detach())
            reference.square().sum().backward()
            y.square().sum().backward()
            close(found.grad, expected.grad)
        layers = whole.base_model.model
        for name, half, dim in (("up", "lora_B", 0), ("down", "lora_A", 1)):
            ours = getattr(getattr(made.base_model.model, name), half).default.weight
            theirs = getattr(getattr(layers, name), half).default.weight
            close(ours.grad, mine(theirs.grad, rank, world, dim))
            other = {"lora_A": "lora_B", "lora_B": "lora_A"}[half]
            ours = getattr(getattr(made.base_model.model, name), other).default.weight
            close(ours.grad, getattr(getattr(layers, name), other).default.weight.grad)
        with torch.no_grad():
            close(made(x), whole(x))


def check_losses(rank, world):
    """50 steps beside one process, with gradients that are clipped."""

    def losses(made, clip):
        trained = [each for each in made.parameters() if each.requires_grad]
        optimizer, found = torch.optim.AdamW(trained, lr=3e-3), []
        for at in range(50):
            loss = (made(inputs(4, IN, seed=at % 4)) - 1).square().mean()
            loss.backward()
            clip(made)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    mesh = mesh_of(world)
    for kind in ("nested", "gptq"):
        whole, made = adapted(kind), adapted(kind)
        cut(made, mesh)
        found = losses(made, lambda made: clip_grad_norm_(made, 0.5, mesh))
        expected = losses(
            whole, lambda made: torch.nn.utils.clip_grad_norm_(made.parameters(), 0.5)
        )
        assert expected[-1] < 0.9 * expected[0]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


def check_merged_adapters(rank, world):
    """Each rank quantizes its part of the sum, with nested scales of its own."""
    whole, made = adapted().base_model.model.down, adapted()
    cut(made, mesh_of(world))
    dense = whole.base_layer.dequantize() + whole.get_delta_weight("default")
    made.merge_adapter()
    whole.base_layer.requantize(dense)
    found = made.base_model.model.down.base_layer.dequantize()
    expected, once = (mine(each, rank, world, 1) for each in (dense, whole.base_layer.dequantize()))
    assert (found - expected).norm() < 1.01 * (once - expected).norm()


def check_unloaded_adapters(rank, world):
    """Base layers alone are summed as the LoRA layers around them were."""
    whole, made, x = mlp(), adapted(), inputs(3, IN)
    cut(made, mesh_of(world))
    with torch.no_grad():
        made(x)
        close(made.unload()(x), whole(x))
    again = adapted()
    cut(again, mesh_of(world))
    with torch.no_grad(), again.disable_adapter():
        close(again(x), whole(x))
    with pytest.raises(nf4.InvalidArgument, match="cut"):
        nf4.torch.to_dense(again)


def check_adapters_that_are_refused(rank, world):
    mesh, x = mesh_of(world), inputs(2, IN)
    with pytest.raises(nf4.InvalidArgument, match="DoRA"):
        cut(adapted(use_dora=True), mesh)
    before = adapted(model=cut(mlp(), mesh))
    within = adapted()
    parallelize_module(within.base_model.model.up.base_layer, mesh, ColwiseParallel())
    unloaded = adapted()
    cut(unloaded, mesh)
    again = adapted(model=unloaded.unload())
    for made in (before, within, again):
        for compiles in (False, True):
            with pytest.raises(nf4.InvalidArgument, match="PEFT first"):
                (torch.compile(made, backend="eager") if compiles else made)(x)
    torch._dynamo.reset()
    with pytest.raises(nf4.InvalidArgument, match="'default' of .* is on meta"):
        cut(adapted().to("meta"), mesh, src_data_rank=None)
    made = adapted()
    cut(made, mesh)
    made.add_adapter("second", peft.LoraConfig(r=4, target_modules=["up", "down"]))
    made.set_adapter("second")
    with pytest.raises(nf4.InvalidArgument, match="adapter 'second'"):
        made(x)
    with torch.no_grad():
        made(x)


def check_adapters_on_meta_given_values(rank, world):
    """As the error for them says."""
    made = adapted().to("meta")
    for name in PLAN:
        layer = getattr(made.base_model.model, name)
        layer.lora_A.to_empty(device="cpu"), layer.lora_B.to_empty(device="cpu")
        layer.reset_lora_parameters("default", True)
    cut(made, mesh_of(world))
    half = made.base_model.model.down.lora_A.default.weight
    assert half.shape == (4, INNER // world) and half.norm() > 0


def check_adapters_that_differ_between_ranks(rank, world):
    def frozen():
        made = adapted()
        made.base_model.model.up.lora_A.requires_grad_(rank == 0)
        return made

    def of_bf16():
        return adapted().to(torch.bfloat16) if rank else adapted()

    others = {
        "of r 8": lambda: adapted(r=4 << rank),
        "scaling 4.0": lambda: adapted(lora_alpha=8 << rank),
        "frozen": frozen,
        "bfloat16": of_bf16,
    }
    for words, make in others.items():
        with pytest.raises(nf4.InvalidArgument, match="rank 0 has .*rank 1 has") as found:
            cut(make(), mesh_of(world), src_data_rank=None)
        assert words in str(found.value), str(found.value)


def check_what_one_rank_refuses(rank, world):
    """Is raised on every rank, which would wait otherwise, and changes no layer."""
    made = adapted(use_dora=rank == 1)
    with pytest.raises(nf4.InvalidArgument, match="DoRA"):
        cut(made, mesh_of(world))
    assert made.base_model.model.up.base_layer.out_features == INNER
    made = mlp()
    if rank == 0:
        made.up.tensor_parallel = 0
    with pytest.raises(nf4.InvalidArgument, match="cut already") as found:
        cut(made, mesh_of(world))
    assert ("rank 0 failed" in str(found.value)) == (rank == 1)


def check_clipped_gradients(rank, world):
    """By the norm of one process; what is whole stays the same on all ranks."""
    whole, made, x = adapted(bias="all"), adapted(bias="all"), inputs(3, IN)
    cut(made, mesh_of(world))
    for each in (whole, made):
        each(x).square().sum().backward()
    for limit in (1e9, 1.0):
        parameters = [each for each in whole.parameters() if each.grad is not None]
        expected = torch.nn.utils.clip_grad_norm_(parameters, limit)
        assert expected > 1
        close(clip_grad_norm_(made, limit, mesh_of(world)), expected)
    for name, half in (("up", "lora_A"), ("down", "lora_B")):
        ours, theirs = (
            getattr(getattr(each.base_model.model, name), half).default.weight.grad
            for each in (made, whole)
        )
        close(ours, theirs)
        everywhere = [torch.empty_like(ours) for _ in range(world)]
        torch.distributed.all_gather(everywhere, ours)
        assert all(torch.equal(each, ours) for each in everywhere)


def check_hooks_of_a_base_layer(rank, world):
    """Those of others run, too."""
    made, seen, x = adapted(), [], inputs(3, IN)
    cut(made, mesh_of(world))
    with torch.no_grad():
        expected = made(x)
        base = made.base_model.model.up.base_layer
        base.register_forward_hook(lambda *_: seen.append(1))
        close(made(x), expected)
    assert seen == [1]


def check_a_model_of_transformers(rank, world):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    whole = transformers.LlamaForCausalLM(config).eval()
    nf4.torch.quantize_model(whole)
    made = copy.deepcopy(whole)
    plan = plan_of(made)
    assert len(plan) == 14 and isinstance(plan["model.layers.1.mlp.down_proj"], RowwiseParallel)
    parallelize_module(made, mesh_of(world), plan)
    tokens = torch.arange(10).view(2, 5)
    with torch.no_grad():
        close(made(tokens).logits, whole(tokens).logits)
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(made.generate(tokens, **options), whole.generate(tokens, **options))
    adapted = peft.get_peft_model(whole, peft.LoraConfig(r=4, task_type="CAUSAL_LM"))
    plan = plan_of(adapted.base_model.model)
    assert len(plan) == 14
    parallelize_module(adapted.base_model.model, mesh_of(world), plan)
    with torch.no_grad():
        close(adapted(tokens).logits, made(tokens).logits)
    for other in (adapted, MLP()):
        with pytest.raises(nf4.InvalidArgument, match="tp_plan"):
            plan_of(other)


def check_experts_stay_whole(rank, world):
    """By a plan of transformers' own. A style for them is refused by name."""
    whole = mixture()
    nf4.torch.quantize_model(whole, experts=True, blocksize=32, nested=False)
    made, tokens = copy.deepcopy(whole), torch.arange(10).view(2, 5)
    plan = plan_of(made)
    assert plan and not any("experts" in name for name in plan)
    parallelize_module(made, mesh_of(world), plan)
    with torch.no_grad():
        close(made(tokens).logits, whole(tokens).logits)
    for style in (ColwiseParallel, RowwiseParallel):
        with pytest.raises(nf4.InvalidArgument, match="for NF4Experts; expected no style"):
            experts = {"model.layers.0.mlp.experts.gate_up_proj": style()}
            parallelize_module(made, mesh_of(world), experts)


def check_checkpoints(rank, world):
    """Of torch.distributed.checkpoint: weights, adapters and their optimizer, each rank's own."""

    def made(seed):
        model = adapted(model=mlp(seed=seed), seed=seed)
        cut(model, mesh_of(world))
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
        model(inputs(3, IN)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    def states(model, optimizer):
        return [*map(dict, (model.state_dict(), get_optimizer_state_dict(model, optimizer)))]

    def named(model, states):
        return {str(i): named_by_cut(model, each) for i, each in enumerate(states)}

    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        torch.distributed.broadcast_object_list(folders, src=0)
        first, second = made(1), made(2)
        dcp.save(named(first[0], states(*first)), checkpoint_id=folders[0])
        found = states(*second)
        dcp.load(named(second[0], found), checkpoint_id=folders[0])
        second[0].load_state_dict(found[0])
        set_optimizer_state_dict(*second, found[1])
        for _ in range(2):  # the second is after a step with the moments that were loaded
            ys = [model(inputs(3, IN)) for model, _ in (first, second)]
            assert torch.equal(*ys)
            for y, (_, optimizer) in zip(ys, (first, second), strict=True):
                y.square().sum().backward()
                optimizer.step()
        other = mlp()
        parallelize_module(other, mesh_of(world), {"up": RowwiseParallel()})
        with pytest.raises(
            dcp.CheckpointException, match=r"Missing key .*\[columns \d+:\d+ of 128\]"
        ):
            dcp.load({"0": named_by_cut(other, other.state_dict())}, checkpoint_id=folders[0])
        torch.distributed.barrier()


def check_names_in_checkpoints(rank, world):
    """Under wrappers, of which a state_dict has no name or another; and of another model."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    model = adapted()
    cut(model, mesh["tp"])
    inner = model.base_model.model
    inner.up, plain = checkpoint_wrapper(inner.up), inner.up
    parallel = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    for each in (model, torch.compile(model), parallel):
        of_optimizer = get_optimizer_state_dict(each, optimizer)
        assert len(of_optimizer["state"]) == 4
        for state in (each.state_dict(), get_model_state_dict(each), of_optimizer):
            named = named_by_cut(each, state)
            assert all(key.endswith("]") for key in named.get("state", named))
    for state in (plain.state_dict(), inner.state_dict(), optimizer.state_dict()):
        with pytest.raises(nf4.InvalidArgument, match="which is not a name in the model"):
            named_by_cut(model, state)


def check_numbers_of_an_optimizer(rank, world):
    """They are restored in the state itself, of layers that are cut and of others."""
    model = mlp()
    parallelize_module(model, mesh_of(world), {"up": ColwiseParallel()})

    def made(step):
        return {"state": {f"{name}.bias": {"step": step} for name in ("up", "down")}}

    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        torch.distributed.broadcast_object_list(folders, src=0)
        dcp.save(named_by_cut(model, made(5)), checkpoint_id=folders[0])
        found = made(0)
        dcp.load(named_by_cut(model, found), checkpoint_id=folders[0])
        assert found == made(5)
        torch.distributed.barrier()


def check_weights_that_are_cut_already(rank, world):
    """As those of from_pretrained(tp_plan="auto") are: DTensors. Refused, with what to do."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=64,
    )  # fmt: skip
    made, name = transformers.LlamaForCausalLM(config), "model.layers.0.self_attn.q_proj"
    parallelize_module(made, mesh_of(world), {name: torch_parallel.ColwiseParallel()})
    with pytest.raises(nf4.InvalidArgument, match="q_proj: its weight is a DTensor.*plan_of"):
        nf4.torch.quantize_model(made)


def check_fsdp_of_layers_that_are_cut(rank, world):
    """Over the other dimension of a mesh, which has one rank here; as FSDP2 has it, last."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    whole, made = mlp(), mlp()
    cut(made, mesh["tp"])
    fully_shard(made, mesh=mesh["dp"])
    x = inputs(3, IN)
    close(made(x).detach(), whole(x).detach())
    assert made.up.out_features * world == INNER
    sharded = fully_shard(mlp(), mesh=mesh["dp"])
    with pytest.raises(nf4.InvalidArgument, match="sharded"):
        cut(sharded, mesh["tp"])
