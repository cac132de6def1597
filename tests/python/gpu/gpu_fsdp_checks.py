"""What test_gpu_distributed.py has two processes check, each with a GPU: those of fsdp_checks.py
that a GPU may answer otherwise, and layers large enough for streams to overlap."""

import torch
from fsdp_cases import all_ranks, inputs, model, require_same, shard, step
from fsdp_checks import (  # noqa: F401
    check_accumulation,
    check_checkpointing,
    check_compiled,
    check_forward_and_backward,
    check_memory_and_traffic,
    check_meta,
    check_mixed_precision,
    check_offload,
    check_state_dict,
)
from nf4.torch import NF4Linear
from nf4.torch.distributed import gather_by_copy_engines
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def check_every_byte_arrives(rank, world):
    """Beside parameters in bf16, as which copies would change the bytes of a NaN, with a policy,
    too; and in every step, while the next layer is gathered."""
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        torch.manual_seed(0)
        layers = [nn.Linear(1024, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
        quantized = [NF4Linear.from_linear(each) for each in layers]
        for each in quantized:
            each.weight.copy_(torch.randint(256, each.weight.shape))
        x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        expected = x
        for each in quantized:
            expected = torch.nn.functional.layer_norm(each(expected), (1024,))
        expected.square().sum().backward()
        grad, x.grad = x.grad, None
        for each in quantized:
            fully_shard(each, mesh=all_ranks(), mp_policy=policy)
        for _ in range(3):
            y = x
            for each in quantized:
                y = torch.nn.functional.layer_norm(each(y), (1024,))
            y.square().sum().backward()
            assert torch.equal(y, expected) and torch.equal(x.grad, grad)
            x.grad = None


def check_copy_engines(rank, world):
    """All-gathers without NCCL, of modules of several sizes."""
    for kind in ("nested", "gptq"):
        expected = step(model(kind), inputs())
        made = shard(model(kind))
        gather_by_copy_engines(made, all_ranks())
        for _ in range(3):
            require_same(step(made, inputs()), expected)
            made.zero_grad()
