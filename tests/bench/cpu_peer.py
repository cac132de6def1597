"""bitsandbytes on the CPU, on the same memory as ours."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nf4
import numpy as np

# A libnf4 that pip installed would serve it, and be measured beside itself.
os.environ["NF4_BITSANDBYTES"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import oracle  # noqa: E402


class Peer:
    """bitsandbytes on the CPU, or why it is missing."""

    def __init__(self, threads: int) -> None:
        self.functional = None
        try:
            import bitsandbytes
            import bitsandbytes.functional as functional
            import torch
        except Exception as error:  # an import that fails for any reason is a missing peer
            self.version = f"missing: {error}"
            return
        torch.set_num_threads(threads)
        self.torch, self.functional, self.version = torch, functional, bitsandbytes.__version__

    def tensor(self, array: np.ndarray) -> Any:
        """The same memory as a torch tensor; torch takes no bfloat16 from numpy."""
        if array.dtype == oracle.DTYPES["bf16"]:
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)

    def array(self, tensor: Any, like: np.ndarray) -> np.ndarray:
        """The way back, to the dtype of `like`."""
        return tensor.view(self.torch.uint8).numpy().view(like.dtype)

    def state(self, q: nf4.QuantizedTensor) -> Any:
        """The weight as bitsandbytes describes it, borrowing its parts."""
        layout = {"dtype": self.tensor(np.empty(0, oracle.DTYPES[q.dtype])).dtype}
        if not q.nested:
            return self.functional.QuantState(
                absmax=self.tensor(q.absmax), shape=self.torch.Size(q.shape),
                code=self.tensor(nf4.codebook("nf4").copy()), blocksize=q.blocksize,
                quant_type="nf4", **layout,
            )  # fmt: skip
        nested = self.functional.QuantState(
            absmax=self.tensor(q.nested_absmax), blocksize=q.nested_blocksize,
            code=self.tensor(q.nested_code.copy()), dtype=self.torch.float32,
        )  # fmt: skip
        return self.functional.QuantState(
            absmax=self.tensor(q.absmax), shape=self.torch.Size(q.shape),
            code=self.tensor(nf4.codebook("nf4").copy()), blocksize=q.blocksize,
            quant_type="nf4", offset=self.tensor(q.nested_offset), state2=nested, **layout,
        )  # fmt: skip
