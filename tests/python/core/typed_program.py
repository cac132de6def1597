"""A program on nf4's types: test_typing has it checked, and nobody runs it. Where a comment says
that an error is ignored, there has to be one."""

import ctypes
from collections.abc import Mapping

import nf4
import numpy as np
import torch
from nf4.typing import ArrayLike, CudaStreamLike, DTypeLike, MemoryLike
from typing_extensions import assert_type


class Exporter:
    """An array of another library."""

    def __dlpack__(self, *, stream: int | None = None) -> object:
        return object()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class CudaArray:
    @property
    def __cuda_array_interface__(self) -> Mapping[str, object]:
        return {}


class TorchStream:
    cuda_stream = 5


class CupyStream:
    ptr = 5


class CoreStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 5


def arrays(x: np.ndarray, weight: np.ndarray) -> None:
    q = nf4.quantize(weight, format="fp4", blocksize=128, codebook=nf4.codebook("fp4"))
    assert_type(q, nf4.QuantizedTensor[np.ndarray])
    assert_type(nf4.dequantize(q), np.ndarray)
    assert_type(nf4.dequantize(q, np.float16, out=x), np.ndarray)
    assert_type(nf4.dequantize(q, out=4096), int)
    assert_type(nf4.matmul(x, q, bias=x, threads=2), np.ndarray)
    assert_type(nf4.matmul_batch(x, [q, q], bias=[None, x]), list[np.ndarray])
    assert_type(nf4.lora_grad(x, x, x, x, np.float32(2)), tuple[np.ndarray, np.ndarray])
    assert_type(nf4.lora_grad(x, None, None, x)[1], None)
    nf4.lora_grad(x, x, x, x, dtype="fp32", out=[None, 4096])
    assert_type(nf4.matmul_workspace_bytes(q, 3, np.dtype(np.float32)), int)
    assert_type(nf4.matmul_batch_workspace_bytes([q], 3, "bf16"), int)
    assert_type(nf4.quantize(4096, out=q), nf4.QuantizedTensor[np.ndarray])
    w4 = nf4.quantize_int4(weight, layout="awq", group_size=64, scales_dtype=np.float16)
    assert_type(w4, nf4.Int4Tensor[np.ndarray])
    assert_type(nf4.quantize_int4(4096, out=w4, symmetric=False), nf4.Int4Tensor[np.ndarray])
    assert_type(nf4.reorder(w4), nf4.Int4Tensor[np.ndarray])
    assert_type(nf4.dequantize(w4, "fp32"), np.ndarray)
    assert_type(nf4.dequantize(w4, out=4096), int)
    assert_type(nf4.matmul(x, w4), np.ndarray)
    assert_type(nf4.matmul_batch(x, [w4, w4]), list[np.ndarray])
    kinds: list[nf4.Weight[np.ndarray]] = [q, w4]
    assert_type([each.nbytes for each in kinds], list[int])
    assert_type(w4.groups, int)
    assert_type(nf4.sizes((3, 4)).workspace_bytes, int)
    assert_type(nf4.scale_code(), np.ndarray)
    assert_type(nf4.device_info(0).compute_capability, tuple[int, int])


def tensors(x: torch.Tensor, weight: torch.Tensor) -> None:
    q = nf4.quantize(weight)
    assert_type(q, nf4.QuantizedTensor[torch.Tensor])
    assert_type(q.packed, torch.Tensor)
    assert_type(nf4.dequantize(q, torch.float16), torch.Tensor)
    assert_type(nf4.matmul(x, q, stream=TorchStream()), torch.Tensor)
    assert_type(nf4.lora_grad(x, x, x, x), tuple[torch.Tensor, torch.Tensor])
    w4 = nf4.quantize_int4(weight)
    assert_type(w4, nf4.Int4Tensor[torch.Tensor])
    assert_type(nf4.dequantize(w4), torch.Tensor)
    assert_type(nf4.matmul_batch([x, x], [q, q], out=[None, x]), list[torch.Tensor])


def others(x: Exporter, weight: CudaArray) -> None:
    q = nf4.QuantizedTensor(packed=weight, absmax=4096, shape=(2, 64), dtype="bf16")
    assert_type(q, nf4.QuantizedTensor[CudaArray])
    assert_type(nf4.matmul(x, q), np.ndarray)
    assert_type(nf4.matmul(x, q, out=weight, stream=CupyStream()), CudaArray)
    assert_type(nf4.quantize(x), nf4.QuantizedTensor[np.ndarray])
    w4 = nf4.Int4Tensor(layout="gptq", shape=(8, 64), group_size=-1, packed=weight, scales=4096)
    assert_type(w4, nf4.Int4Tensor[CudaArray])
    assert_type(nf4.quantize_int4(x), nf4.Int4Tensor[np.ndarray])


def aliases() -> None:
    _arrays: list[ArrayLike] = [np.zeros(3), Exporter(), CudaArray()]
    _memory: list[MemoryLike] = [*_arrays, 4096, np.int64(4096)]
    _dtypes: list[DTypeLike] = ["fp32", np.float32, np.dtype("f2"), torch.float16]
    _streams: list[CudaStreamLike] = [0, ctypes.c_void_p(), CoreStream(), TorchStream()]


def errors(x: np.ndarray, q: nf4.QuantizedTensor[np.ndarray]) -> None:
    nf4.quantize([1.0, 2.0])  # type: ignore[call-overload]
    nf4.quantize(x, format="nf5")  # type: ignore[call-overload]
    nf4.matmul(4096, q)  # type: ignore[call-overload]
    nf4.matmul(x, x)  # type: ignore[call-overload]
    nf4.lora_grad(x, x, 4096, x)  # type: ignore[call-overload]
    nf4.lora_grad(x, x, x, None)  # type: ignore[call-overload]
    nf4.matmul(x, q, stream="0")  # type: ignore[call-overload]
    nf4.dequantize(q, "fp64")  # type: ignore[call-overload]
    nf4.matmul_workspace_bytes(q, 1, "int8")  # type: ignore[arg-type]
    nf4.sizes((3, 4), format="int4")  # type: ignore[arg-type]
    q.blocksize = 3  # type: ignore[misc]
    nf4.quantize_int4(x, layout="nf4")  # type: ignore[call-overload]
    nf4.quantize(x, out=nf4.quantize_int4(x))  # type: ignore[call-overload]
    nf4.reorder(q)  # type: ignore[arg-type]
