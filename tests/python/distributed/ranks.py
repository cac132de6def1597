"""Checks that several processes run together, on the CPU with gloo, or on a GPU each with nccl:
started once for all of them, as that takes longer than they do."""

import ctypes
import datetime
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
import warm
from limits import HANG

TIMEOUT = datetime.timedelta(seconds=HANG)
M_MMAP_THRESHOLD = -3  # of malloc.h


def _main(rank, world, module, names, folder, backend):
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    dist.init_process_group(backend, store, TIMEOUT, world_size=world, rank=rank)
    checks, found = importlib.import_module(module), {}
    for name in names:
        try:
            getattr(checks, name)(rank, world)
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        everywhere = [None] * world
        # A rank that failed may have left collectives out: the next check would get them.
        dist.all_gather_object(everywhere, found[name] is None)
        if not all(everywhere):
            break
    dist.destroy_process_group()


def fork(world, module, names, folder, backend):
    """Starts the ranks, which share what the checks import: that takes seconds in each."""
    # malloc reads this variable when a process starts, which a fork does not.
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        threshold = int(os.environ["MALLOC_MMAP_THRESHOLD_"])
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, threshold)
    importlib.import_module(module)
    arguments = (world, module, names, folder, backend)
    torch.multiprocessing.start_processes(_main, arguments, nprocs=world, start_method="fork")


def run(module, names, world, folder, backend="gloo"):
    """What each check raised on each rank, by its name; None where it passed. Those after one that
    failed are not run."""
    arguments = (world, module, names, str(folder), backend)
    # CUDA cannot be used in a child of fork() where what is imported has started it.
    if backend == "nccl":
        try:
            torch.multiprocessing.spawn(_main, arguments, nprocs=world)
        except Exception as error:
            print(error, file=sys.stderr)
    else:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        code = "import json, ranks, sys; ranks.fork(*json.loads(sys.argv[1]))"
        print(warm.run(code, json.dumps(arguments), env=environment).stderr, file=sys.stderr)
    files = [Path(folder, f"{rank}.json") for rank in range(world)]
    found = [json.loads(each.read_text()) if each.exists() else {} for each in files]
    return {name: [each.get(name, "not run") for each in found] for name in names}


def place():
    """The device of this process."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def require_passed(found):
    """Of one check."""
    failed = {rank: error for rank, error in enumerate(found) if error is not None}
    assert not failed, "\n".join(f"rank {rank}: {error}" for rank, error in failed.items())
