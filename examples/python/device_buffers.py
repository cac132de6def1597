"""Quantizes and dequantizes on raw device buffers, without torch, on a stream of its own, and
compares every bit with the CPU.

    python examples/python/device_buffers.py     # exits with 77 if there is no GPU

Memory and stream come from the CUDA driver through ctypes. Any other source of device
addresses works too.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

import nf4
import numpy as np

ROWS, COLS = 1000, 4097  # an odd count: the last block is partial, the last nibble unused
NO_GPU = 77


class Gpu:
    """GPU 0: its primary context, one stream, and the memory that was allocated."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._allocated: list[c_uint64] = []
        device, context, stream = c_int(), c_void_p(), c_void_p()
        self._call("cuInit", c_int(0))
        self._call("cuDeviceGet", byref(device), c_int(0))
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", byref(stream), c_int(1))  # CU_STREAM_NON_BLOCKING
        self.stream = stream

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} returned CUresult {status}")

    def allocate(self, nbytes: int) -> int:
        """The address of new device memory."""
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), c_size_t(max(nbytes, 1)))
        self._allocated.append(address)
        return address.value

    def upload(self, array: np.ndarray) -> int:
        """The address of a copy of an array."""
        address = self.allocate(array.nbytes)
        arguments = c_uint64(address), c_void_p(array.ctypes.data), c_size_t(array.nbytes)
        self._call("cuMemcpyHtoDAsync_v2", *arguments, self.stream)
        return address

    def download(self, address: int, like: np.ndarray) -> np.ndarray:
        """What is at an address, once the stream has got there."""
        array = np.empty_like(like)
        arguments = c_void_p(array.ctypes.data), c_uint64(address), c_size_t(array.nbytes)
        self._call("cuMemcpyDtoHAsync_v2", *arguments, self.stream)
        self._call("cuStreamSynchronize", self.stream)
        return array

    def close(self) -> None:
        self._call("cuStreamSynchronize", self.stream)
        for address in self._allocated:
            self._call("cuMemFree_v2", address)
        self._call("cuStreamDestroy_v2", self.stream)
        self._call("cuDevicePrimaryCtxRelease_v2", c_int(0))


def device_weight(gpu: Gpu, shape: tuple[int, ...], dtype: str) -> nf4.QuantizedTensor:
    """A nested NF4 weight of uninitialised device memory: its parts are addresses."""
    sizes = nf4.sizes(shape, nested_blocksize=256)
    return nf4.QuantizedTensor(
        packed=gpu.allocate(sizes.packed_bytes),
        absmax=gpu.allocate(sizes.absmax_bytes),
        nested_absmax=gpu.allocate(4 * sizes.nested_blocks),
        nested_code=gpu.upload(nf4.scale_code()),
        nested_offset=gpu.allocate(4),
        nested_blocksize=256,
        shape=shape,
        dtype=dtype,
    )


def differing_bytes(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.count_nonzero(a.reshape(-1).view(np.uint8) != b.reshape(-1).view(np.uint8)))


def main() -> int:
    info = nf4.device_info(0)
    if not info.usable:
        print(f"no usable GPU: {info.reason}")
        return NO_GPU
    weight = np.random.default_rng(0).standard_normal((ROWS, COLS)).astype(np.float16)
    expected = nf4.quantize(weight)

    gpu = Gpu()
    q = device_weight(gpu, weight.shape, "fp16")
    workspace = gpu.allocate(q.sizes.workspace_bytes)
    nf4.quantize(gpu.upload(weight), out=q, workspace=workspace, stream=gpu.stream)
    differing = {
        part: differing_bytes(gpu.download(getattr(q, part), values), values)
        for part in ("packed", "absmax", "nested_absmax", "nested_offset")
        for values in [getattr(expected, part)]
    }
    for dtype in ("fp32", "fp16", "bf16"):
        values = nf4.dequantize(expected, dtype)
        out = gpu.allocate(values.nbytes)
        nf4.dequantize(q, dtype, out=out, stream=gpu.stream)
        differing[dtype] = differing_bytes(gpu.download(out, values), values)
    gpu.close()

    print(f"{info.name}, kernels {info.dequant_variant}: {ROWS} x {COLS} weights")
    for part, count in differing.items():
        print(f"{part:13} {count} bytes differ from the CPU's")
    return 1 if any(differing.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
