"""Which layers of experts are measured, at how many tokens. Needs only Python."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DENSE = "dense"  # torch's grouped_mm on bf16 weights
DEQUANTIZED = (
    "dequantize + dense"  # bitsandbytes' dequantize of each active expert, then grouped_mm
)
GROUPED_NF4 = "grouped-nf4-gemm"
PEERS = (DENSE, DEQUANTIZED, GROUPED_NF4)
FORMS = ("libnf4", *PEERS)

BLOCKSIZE, NESTED_BLOCKSIZE = 64, 256
ROUTINGS = 16  # of which each launch of a graph takes the next
REPLAYS = 7


@dataclass(frozen=True)
class Model:
    """The experts of a layer: gate and up together [2 intermediate, hidden], down [hidden,
    intermediate]. Each token goes to top_k of them."""

    name: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int

    def shape(self, work: str) -> tuple[int, int, int]:
        """Experts, rows, columns."""
        if work != "down":
            return self.experts, 2 * self.intermediate, self.hidden
        return self.experts, self.hidden, self.intermediate


@dataclass(frozen=True)
class Group:
    """Some work of a model: "gate_up", whose rows of x are taken by index, "down", whose x is
    sorted by expert, "layer", one after the other, or "gradient", the dX of each row of gate_up's
    dY."""

    model: Model
    work: str
    tokens: tuple[int, ...]
    peers: tuple[str, ...] = PEERS

    @property
    def works(self) -> tuple[str, ...]:
        return ("gate_up", "down") if self.work == "layer" else (self.work,)


QWEN = Model("Qwen3-30B-A3B", 128, 2048, 768, 8)
MIXTRAL = Model("Mixtral-8x7B", 8, 4096, 14336, 2)
GPT_OSS = Model("gpt-oss-20b", 32, 2880, 2880, 4)
GPT_OSS_120B = Model("gpt-oss-120b", 128, 2880, 2880, 4)
LARGE = Model("64x(7168, 2048)", 64, 7168, 2048, 8)
_OF_LAYERS = (DENSE, DEQUANTIZED)


def full() -> list[Group]:
    return [
        Group(QWEN, "gate_up", (1, 8, 64, 256, 512, 1024, 4096)),
        Group(QWEN, "down", (1, 8, 64, 256, 512, 1024, 4096), _OF_LAYERS),
        Group(QWEN, "gradient", (1, 64, 1024, 4096), _OF_LAYERS),
        Group(QWEN, "layer", (1, 4, 16, 64, 256, 1024, 4096), _OF_LAYERS),
        Group(MIXTRAL, "layer", (1, 4, 16, 64, 256, 1024, 4096), _OF_LAYERS),
        Group(GPT_OSS, "layer", (1, 4, 16, 64, 256, 1024, 4096), _OF_LAYERS),
        Group(LARGE, "layer", (1, 4, 16, 64, 256, 1024, 4096), _OF_LAYERS),
    ]


def quick() -> list[Group]:
    return [
        Group(QWEN, "gate_up", (1, 8, 64, 512, 4096)),
        Group(MIXTRAL, "layer", (1, 16, 256, 1024, 4096), _OF_LAYERS),
        Group(GPT_OSS, "layer", (1, 64, 4096), _OF_LAYERS),
    ]


def of_format() -> list[Group]:
    """gpt-oss, in the format of its checkpoints or in another one than NF4."""
    models, tokens = (GPT_OSS, GPT_OSS_120B), (1, 8, 64, 1024)
    return [Group(model, work, tokens, (DENSE,)) for model in models
            for work in ("layer", "gradient")]  # fmt: skip


def by_model(groups: Iterable[Group]) -> dict[Model, list[Group]]:
    found: dict[Model, list[Group]] = {}
    for group in groups:
        found.setdefault(group.model, []).append(group)
    return found
