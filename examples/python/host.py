"""Quantizes a weight on the CPU with numpy, and back.

python examples/python/host.py
"""

import ml_dtypes
import nf4
import numpy as np


def main() -> None:
    weight = np.random.default_rng(0).standard_normal((4096, 1024)).astype(ml_dtypes.bfloat16)
    exact = weight.astype(np.float32)

    print("format  scales  MB      bits per weight  RMS error")
    for format in ("nf4", "fp4"):
        for nested_blocksize in (0, 256):
            q = nf4.quantize(weight, format=format, nested_blocksize=nested_blocksize)
            error = nf4.dequantize(q, "fp32") - exact
            print(
                f"{format:7} {'nested' if q.nested else 'flat':7} {q.nbytes / 1e6:<7.3f} "
                f"{q.bits_per_weight:<16.3f} {np.sqrt(np.mean(error**2)):.4f}"
            )
            assert nf4.dequantize(q).dtype == weight.dtype
            assert np.abs(error).max() < 0.2 * np.abs(exact).max()


if __name__ == "__main__":
    main()
