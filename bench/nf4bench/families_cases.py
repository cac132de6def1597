"""Names the builds for GPUs that are not here. Each has one family of kernels, as machine code of
this GPU, and the shared memory that a CTA has there. `./dev gpu --build` makes them. It needs only
Python."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from nf4bench.experts_cases import QWEN
from nf4bench.models_cases import LLAMA_7B
from nf4bench.options import Shape
from nf4bench.training_cases import Group


@dataclass(frozen=True)
class Family:
    """lib/cuda/meson.build has `name`. A CTA may have `shared_kib`. In products x is `dtype`."""

    name: str
    shared_kib: int
    gpus: str
    dtype: str = "bf16"

    def __str__(self) -> str:
        return f"{self.name}, {self.shared_kib} KiB"

    @property
    def info(self) -> dict[str, str]:
        """Returns what nf4.build_info() says of the build."""
        return {"gpu_family": self.name, "shared_memory": f"{self.shared_kib} KiB"}

    def build(self, root: Path) -> Path:
        """Returns its folder in the folder of all builds, as tools/gpu.sh names it."""
        return root / f"build-{self.name.lower()}-{self.shared_kib}"

    def library(self, root: Path) -> Path:
        return self.build(root) / "lib" / "libnf4.so"


FAMILIES = (
    Family("Sm80", 163, "A100"),
    Family("Sm80", 99, "RTX 30 and RTX 40 series, A10, L4, L40S"),
    Family("Sm75", 64, "T4, RTX 20 series", "fp16"),
)

SHAPES: tuple[Shape, ...] = ((14336, 4096), (4096, 4096))
MS = (1, 4, 8, 16, 17, 32, 64, 128, 256, 1024, 4096)
GROUP_SIZE = 128  # of GPTQ
STEP = Group("fp32", False, replace(LLAMA_7B, layers=8))
EXPERTS, TOKENS = QWEN, (1, 8, 64, 512, 4096)
TURNS = 11

# These are the forms of a product. libnf4 must not be slower than the better of the first two.
BITSANDBYTES, DENSE = "bitsandbytes", "dequantize + dense"
DROP_IN, LAYER = "drop-in", "libnf4"
INT4, INT4_DENSE = "int4", "int4 dequantize + dense"
FORMS = (BITSANDBYTES, DENSE, DROP_IN, LAYER, INT4, INT4_DENSE)
GROUPED_DENSE = "dequantize + grouped_mm"  # of experts
