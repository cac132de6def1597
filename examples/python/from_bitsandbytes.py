"""Dequantizes a layer that bitsandbytes quantized, from the same memory, and compares the values.

python examples/python/from_bitsandbytes.py
"""

import sys

import nf4

try:
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)


def shared(weight) -> nf4.QuantizedTensor:
    """A bitsandbytes Params4bit as libnf4 sees it: every part is the tensor that it has, no
    copy."""
    state = weight.quant_state
    nested = state.state2 if state.nested else None
    return nf4.QuantizedTensor(
        packed=weight.data,
        absmax=state.absmax,
        nested_absmax=nested.absmax if nested else None,
        nested_code=nested.code if nested else None,
        nested_offset=state.offset if nested else None,
        format=state.quant_type,
        blocksize=state.blocksize,
        nested_blocksize=nested.blocksize if nested else 0,
        shape=tuple(state.shape),
        dtype=state.dtype,
    )


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = Linear4bit(
        512, 256, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4",
        compress_statistics=True,
    )  # fmt: skip
    layer.weight.data = torch.randn(256, 512).bfloat16()
    layer = layer.to(device)  # quantizes it

    weight = nf4.dequantize(shared(layer.weight))
    theirs = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert weight.shape == theirs.shape
    differing = int((weight != theirs.view_as(weight)).sum())
    print(f"{tuple(weight.shape)} {weight.dtype} on {device}: {differing} elements differ")
    # bitsandbytes' own CPU kernels round scales otherwise; its CUDA kernels are met bit for bit.
    assert differing == 0 or device == "cpu"


if __name__ == "__main__":
    main()
