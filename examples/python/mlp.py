"""Computes the MLP of a LLaMA-shaped model on the CPU, y = down(silu(gate(x)) * up(x)), with
weights in 4 bits. Compares the result with the same MLP on dequantized weights.

python examples/python/mlp.py
"""

import ml_dtypes
import nf4
import numpy as np

HIDDEN, INTERMEDIATE, TOKENS = 512, 1376, 16
# The error in the norm: three products in bfloat16, each off by at most 4e-3, and roundings.
ALLOWED = 4 * 4e-3


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    wide = gate.astype(np.float32)
    return (wide / (1 + np.exp(-wide)) * up.astype(np.float32)).astype(gate.dtype)


class Mlp:
    """Three NF4 weights, each [outputs, inputs]."""

    def __init__(self, rng: np.random.Generator) -> None:
        shapes = {
            "gate": (INTERMEDIATE, HIDDEN),
            "up": (INTERMEDIATE, HIDDEN),
            "down": (HIDDEN, INTERMEDIATE),
        }
        self.weights = {
            name: nf4.quantize(rng.normal(0, 0.02, shape).astype(ml_dtypes.bfloat16))
            for name, shape in shapes.items()
        }

    def __call__(self, x: np.ndarray) -> np.ndarray:
        gate, up = nf4.matmul_batch(x, [self.weights["gate"], self.weights["up"]])
        return nf4.matmul(swiglu(gate, up), self.weights["down"])

    def dense(self, x: np.ndarray) -> np.ndarray:
        """The same in float32, on weights that take eight times the memory."""
        gate, up, down = (
            nf4.dequantize(self.weights[name], "fp32") for name in ("gate", "up", "down")
        )
        return swiglu(x @ gate.T, x @ up.T) @ down.T


def main() -> None:
    rng = np.random.default_rng(0)
    mlp = Mlp(rng)
    x = rng.standard_normal((TOKENS, HIDDEN)).astype(ml_dtypes.bfloat16)
    y, expected = mlp(x), mlp.dense(x.astype(np.float32))
    error = np.linalg.norm(y.astype(np.float32) - expected) / np.linalg.norm(expected)
    megabytes = sum(weight.nbytes for weight in mlp.weights.values()) / 1e6
    print(f"{megabytes:.1f} MB of weights, {TOKENS} rows: {error:.1e} from float32")
    assert y.dtype == x.dtype and error < ALLOWED


if __name__ == "__main__":
    main()
