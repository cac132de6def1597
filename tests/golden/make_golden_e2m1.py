"""Makes golden_e2m1.npz: MXFP4 and NVFP4 as compressed-tensors quantizes, packs and unpacks them.

python -m venv golden && . golden/bin/activate
pip install torch==2.11.0 compressed-tensors==0.20.1
python tests/golden/make_golden_e2m1.py
"""

from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import MXFP4PackedCompressor, NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

KINDS = {
    "mxfp4": (MXFP4PackedCompressor, MXFP4A16),
    "nvfp4": (NVFP4PackedCompressor, NVFP4A16),
}


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    normal = torch.randn(16, 96)
    zeros = normal.clone()
    zeros[3] = 0
    zeros[5, :32] = 0
    zeros[7, 3] = -0.0
    return {
        "normal": normal,
        "spread": torch.randn(16, 96) * torch.randn(16, 1).mul(4).exp(),
        "ties": torch.randint(-24, 25, (16, 96)) / 4,
        "zeros": zeros,
        "tiny": torch.randn(16, 96) * 1e-30,
    }


def quantized(format: str, weight: torch.Tensor) -> dict[str, np.ndarray]:
    compressor, scheme = KINDS[format]
    args = scheme["weights"]
    blocks = weight.unflatten(-1, (-1, args.group_size))
    state = {"weight": weight.clone()}
    if format == "nvfp4":
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    scales, _ = calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), args, global_scale=state.get("weight_global_scale")
    )
    quantization = QuantizationScheme(targets=["Linear"], weights=args)
    packed = compressor.compress(state | {"weight_scale": scales}, quantization)
    dense = compressor.decompress(dict(packed), quantization)["weight"].bfloat16()
    made = {
        "weight": weight.numpy(),
        "packed": packed["weight_packed"].view(torch.uint8).numpy(),
        "absmax": packed["weight_scale"].view(torch.uint8).numpy(),
        "expected": dense.view(torch.uint16).numpy(),
    }
    if format == "nvfp4":
        made["global"] = packed["weight_global_scale"].numpy()
    return made


def main() -> None:
    arrays = {
        f"{format}-{name}/{part}": array
        for format in KINDS
        for name, weight in weights().items()
        for part, array in quantized(format, weight).items()
    }
    np.savez_compressed(Path(__file__).with_name("golden_e2m1.npz"), **arrays)


if __name__ == "__main__":
    main()
