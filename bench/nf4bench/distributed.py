"""Two GPUs of one machine: a QLoRA step under FSDP2 and a token under tensor parallelism, each
beside one GPU. torchrun starts this file once a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nf4bench.errors import LaunchFailed, LibraryMissing
from nf4bench.table import NOTHING, Row, Table, number, text

GPUS, SECONDS = 2, 300
PARTS = ("training", "decode")  # distributed_*.py


def _over(name: str) -> Callable[[Row], str]:
    def made(row: Row) -> str:
        return f"{row['us'] / row['others'][name]:.2f}x" if name in row["others"] else NOTHING

    return made


def _of(field: str, unit: float, digits: int) -> Callable[[Row], str]:
    return lambda row: f"{row[field] / unit:.{digits}f}" if field in row else NOTHING


TABLE = Table(
    text("work", "{work}"),
    text("form", "{form}"),
    number("µs", "{us:.0f}"),
    number("over one GPU", _over("libnf4, one GPU")),
    number("over bitsandbytes", _over("bitsandbytes")),
    number("error", _of("error", 1, 5)),
    number("GB of weights a rank", _of("resident_bytes", 1e9, 2)),
    number("GB a step beyond", _of("step_bytes", 1e9, 2)),
    number("bytes of the sharded parts a weight", _of("sharded_bytes_a_weight", 1, 4)),
)


def rows(figures: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Those of the table, from the figures of each part by form."""
    found = []
    for work, forms in figures.items():
        others = {form: each["us"] for form, each in forms.items()}
        found += [
            {"work": work, "form": form, "others": others, **each} for form, each in forms.items()
        ]
    return found


def run(report: Callable[[str], None], parts: tuple[str, ...] = PARTS) -> dict[str, Any]:
    """Raises LibraryMissing with fewer GPUs, LaunchFailed where a process ended with an error, such
    as a wrong result."""
    import torch

    if torch.cuda.device_count() < GPUS:
        raise LibraryMissing(f"{torch.cuda.device_count()} GPUs; --distributed needs {GPUS}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={GPUS}", __file__, str(file), *parts]
        if subprocess.run(command, timeout=SECONDS).returncode:
            raise LaunchFailed("a process of torchrun failed; it says why above")
        figures = json.loads(file.read_text())
    for row in rows(figures["parts"]):
        report(TABLE.line(row))
    return figures


def _worker(file: Path, parts: list[str]) -> None:
    import importlib

    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    place = f"cuda:{torch.cuda.current_device()}"
    dist.init_process_group("nccl", device_id=torch.device(place))
    found = {}
    for part in parts:
        found[part] = importlib.import_module(f"nf4bench.distributed_{part}").run(place)
        torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        device = torch.cuda.get_device_name()
        made = {"device": device, "gpus": GPUS, "torch": torch.__version__, "parts": found}
        file.write_text(json.dumps(made))
    dist.destroy_process_group()


if __name__ == "__main__":
    _worker(Path(sys.argv[1]), sys.argv[2:])
