"""Which models are measured, at what work, and how long that may take."""

from __future__ import annotations

from dataclasses import dataclass, replace

DROP_IN = "drop-in"  # bitsandbytes' layers on libnf4's kernels, timed in eager mode alone
PEERS = ("bitsandbytes", "dense")
FORMS = ("libnf4", DROP_IN, *PEERS)  # the forms of a linear layer
CONTEXT = 512  # positions of the key-value cache
LORA_RANK = 16
ADAPTED = ("q_proj", "v_proj")  # the layers that have adapters in training
SECONDS, QUICK_SECONDS = 150, 15  # no group begins when so many are over
TURNS = 15  # a slow host makes single ones twice as long
WARM_STEPS = 2  # before an eager one is timed: after one it takes up to a tenth longer

# ||y - y'|| / ||y'||, y of NF4Linear and y' of bitsandbytes on the same bytes. Both round to bf16
# after each product, and the layers of a model carry that on: 1.2e-2 after 32 of them on the CPU,
# where the weights before they were quantized give 0.1.
MOST_ERROR = {"decode": 3e-2, "prefill": 3e-2, "training": 3e-2, "mlp": 1.5e-2}


@dataclass(frozen=True)
class Size:
    """Of a LLaMA-shaped model."""

    hidden: int
    heads: int
    intermediate: int
    layers: int
    vocabulary: int

    def linears(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of a layer's weights, by name."""
        square, up = (self.hidden, self.hidden), (self.intermediate, self.hidden)
        return {
            "q_proj": square, "k_proj": square, "v_proj": square, "o_proj": square,
            "gate_proj": up, "up_proj": up, "down_proj": up[::-1],
        }  # fmt: skip


@dataclass(frozen=True)
class Group:
    """One work at one size, timed in some ways to launch.

    work      "decode": the last token of a full context for each of `batch` sequences;
              "prefill": prompts of `tokens` tokens, the logits of each one's last;
              "training": forward and backward, gradients for the adapters alone;
              "mlp": the MLP of one layer, forward
    compiled  by torch.compile, a layer at a time
    launches  of "eager" and "graph"
    """

    work: str
    batch: int
    tokens: int
    size: Size
    launches: tuple[str, ...]
    compiled: bool = False

    def __str__(self) -> str:
        layers = "1 layer" if self.size.layers == 1 else f"{self.size.layers} layers"
        compiled = ", compiled" if self.compiled else ""
        return f"{self.work} {self.batch}x{self.tokens}, {layers} of {self.size.hidden}{compiled}"


LLAMA_7B = Size(hidden=4096, heads=32, intermediate=11008, layers=32, vocabulary=32000)
FEW_LAYERS = replace(LLAMA_7B, layers=8)  # these take little time to compile
# MLPs of LLaMA-7B and LLaMA-65B: the ends of the sweep in the NF4Tensor study, with its batches.
MLPS = (
    (replace(LLAMA_7B, layers=1), 8, 128),
    (Size(hidden=8192, heads=64, intermediate=22016, layers=1, vocabulary=32000), 32, 512),
)
EAGER, GRAPH, BOTH = ("eager",), ("graph",), ("eager", "graph")


def full(size: Size = LLAMA_7B, few: Size = FEW_LAYERS) -> list[Group]:
    """What matters most comes first, since time may run out."""
    training = Group("training", 4, 256, size, BOTH)
    mlps = [Group("mlp", batch, tokens, each, EAGER) for each, batch, tokens in MLPS]
    return [
        Group("decode", 1, 1, size, BOTH),
        Group("decode", 8, 1, size, BOTH),
        Group("prefill", 4, 256, size, BOTH),
        training,
        replace(training, size=few),
        *mlps,
        Group("decode", 1, 1, few, BOTH, compiled=True),
        replace(training, size=few, compiled=True),
        *(replace(each, compiled=True) for each in mlps),
        Group("decode", 8, 1, few, BOTH, compiled=True),
    ]


def quick(size: Size = LLAMA_7B) -> list[Group]:
    return [
        Group("decode", 1, 1, size, GRAPH),
        Group("decode", 8, 1, size, GRAPH),
        Group("prefill", 4, 256, size, GRAPH),
        Group("training", 4, 256, size, BOTH),
    ]
