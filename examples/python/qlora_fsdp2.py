"""Trains adapters beside a LLaMA-shaped model in 4 bits that FSDP2 shards over several GPUs
(QLoRA). Each all-gather moves the 4-bit codes; no rank makes a dense weight.

The script makes the model, so it downloads nothing. The model learns to count in steps.

torchrun --nproc-per-node 8 examples/python/qlora_fsdp2.py
    on GPUs, with NCCL. On several machines, add torchrun's --nnodes and --rdzv-endpoint, and this
    script's --folder with a directory that all machines share
python examples/python/qlora_fsdp2.py
    two processes on the CPU, with gloo
"""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

try:
    import peft
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)
import nf4.torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCABULARY, LENGTH, BATCH, STEPS = 64, 32, 8, 120


def quantized_model() -> transformers.PreTrainedModel:
    """Of random weights, the same on each rank."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    nf4.torch.quantize_model(model)
    return model


def sharded(device: torch.device) -> torch.nn.Module:
    """Each decoder layer is gathered by itself, then freed."""
    config = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(quantized_model(), config).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sequences(device: torch.device) -> torch.Tensor:
    """Numbers that grow by a step of 1 to 4 and begin anew at the end of the vocabulary."""
    start, step = torch.randint(VOCABULARY, (BATCH, 1)), torch.randint(1, 5, (BATCH, 1))
    return ((start + step * torch.arange(LENGTH)) % VOCABULARY).to(device)


def train(model: torch.nn.Module, steps: int, device: torch.device) -> list[float]:
    """The loss of each step, a mean over the ranks."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    losses = []
    for _ in range(steps):
        batch = sequences(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


@contextlib.contextmanager
def checkpoint_folder(given: str | None) -> Iterator[str]:
    """That of all ranks: what is given stays; else a temporary one of this machine."""
    if given is not None:
        yield given
        return
    with contextlib.ExitStack() as stack:
        folder = [None]
        if dist.get_rank() == 0:
            folder = [stack.enter_context(tempfile.TemporaryDirectory())]
        dist.broadcast_object_list(folder)
        yield folder[0]
        dist.barrier()  # rank 0 deletes it when nobody reads any more


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="QLoRA over several GPUs, by FSDP2")
    parser.add_argument("--folder", help="for the checkpoint; one that all machines share")
    given = parser.parse_args()
    if given.folder is None and os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        parser.error("on several machines --folder is needed, a directory that all of them share")
    return given


def main() -> None:
    given = arguments()
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = sharded(device).train()
    torch.manual_seed(rank)  # each rank has batches of its own
    losses = train(model, STEPS, device)
    if rank == 0:
        print(f"{world} ranks, {STEPS} steps: loss {losses[0]:.2f} to {losses[-1]:.2f}")
    assert losses[-1] < 0.6 * losses[0]

    # A sharded checkpoint: each rank writes its part, under the keys that one process would have.
    again = sharded(device).eval()
    with checkpoint_folder(given.folder) as folder:
        checkpoint.save(model.state_dict(), checkpoint_id=folder)
        state = again.state_dict()
        checkpoint.load(state, checkpoint_id=folder)
    again.load_state_dict(state)
    with torch.no_grad():
        batch = sequences(device)
        same = torch.equal(again(batch).logits, model.eval()(batch).logits)
    print(f"rank {rank}: the saved model is {'the same' if same else 'another'}")
    assert same
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:  # not started by torchrun
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.execv(sys.executable, [*torchrun, "--standalone", *sys.argv])
    main()
