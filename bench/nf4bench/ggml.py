"""ggml's products, which llama.cpp uses on the CPU: a weight in IQ4_NL or Q4_0, in blocks of 32
with a scale in fp16, times x in fp32, which ggml rounds to 8 bits. As llama.cpp does, it rearranges
the weight where it has kernels for that. `pip install llama-cpp-python` compiles its libraries for
this machine; NF4_GGML names another folder of libggml-base.so and libggml-cpu.so."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch

from nf4bench.peers import PeerMissing, dequantized
from nf4bench.weights import Weight

TYPES = {"Q4_0": 2, "IQ4_NL": 20}  # ggml_type
_F32 = 0
MOST_ERROR = 0.2  # the error of a product whose weights are rounded once more is about 0.1
_CONTEXT_BYTES = 1 << 20  # for the descriptions of tensors and graphs

# The functions in use: result and arguments (ggml.h, ggml-backend.h, ggml-cpu.h).
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, c_void_p, c_void_p),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_buft_name": (c_char_p, c_void_p),
    "ggml_backend_cpu_buffer_type": (c_void_p,),
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_reg": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_backend_reg_dev_get": (c_void_p, c_void_p, c_size_t),
    "ggml_backend_reg_get_proc_address": (c_void_p, c_void_p, c_char_p),
    "ggml_backend_tensor_get": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_free": (None, c_void_p),
    "ggml_log_set": (None, c_void_p, c_void_p),
    "ggml_mul_mat": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_new_graph": (c_void_p, c_void_p),
    "ggml_new_tensor_2d": (c_void_p, c_void_p, c_int, c_int64, c_int64),
    "ggml_quantize_chunk": (c_size_t, c_int, *(c_void_p,) * 2, *(c_int64,) * 3, c_void_p),
    "ggml_row_size": (c_size_t, c_int, c_int64),
}  # fmt: skip


def _pointers(first: Any) -> Iterator[int]:
    """Those of an array that ends with NULL."""
    return itertools.takewhile(bool, (first[i] for i in itertools.count()))


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


def _folder() -> Path:
    named = os.environ.get("NF4_GGML")
    if named:
        return Path(named)
    found = importlib.util.find_spec("llama_cpp")  # not imported, since that loads a backend
    if found is None or found.origin is None:
        raise PeerMissing("llama-cpp-python is not installed")
    return Path(found.origin).parent / "lib"


def _library(folder: Path) -> dict[str, Callable[..., Any]]:
    """Raises PeerMissing."""
    try:
        libraries = [
            ctypes.CDLL(str(folder / f"libggml-{part}.so"), ctypes.RTLD_GLOBAL)
            for part in ("base", "cpu")
        ]
        functions = {}
        for name, (result, *arguments) in _FUNCTIONS.items():
            library = next((each for each in libraries if hasattr(each, name)), libraries[0])
            function = functions[name] = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        init = functions["ggml_init"] = libraries[0].ggml_init
    except (OSError, AttributeError) as error:
        raise PeerMissing(str(error)) from None
    init.restype, init.argtypes = c_void_p, [_InitParams]
    return functions


@ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
def _quiet(_level: int, _text: bytes, _data: int) -> None:
    """It would report each tensor that it rearranges."""


class Ggml:
    """ggml_mul_mat of weights in one type."""

    def __init__(self, kind: str, threads: int) -> None:
        """Raises PeerMissing."""
        self._call = _library(_folder())
        self._type = TYPES[kind]
        self._kept: list[tuple[int, int]] = []  # contexts, and their tensors' memory
        self._call["ggml_log_set"](_quiet, None)
        self._backend = self._call["ggml_backend_cpu_init"]()
        self._call["ggml_backend_cpu_set_n_threads"](self._backend, threads)
        self._memory = self._call["ggml_backend_cpu_buffer_type"]()
        self._rearranging = self._memory_that_rearranges()

    def _memory_that_rearranges(self) -> int:
        """The kind of memory in which weights are rearranged, or that of everything else."""
        call, registry = self._call, self._call["ggml_backend_cpu_reg"]()
        found = call["ggml_backend_reg_get_proc_address"](
            registry, b"ggml_backend_dev_get_extra_bufts"
        )
        if found is None:
            return self._memory
        kinds = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(found)(
            call["ggml_backend_reg_dev_get"](registry, 0)
        )
        named = {call["ggml_backend_buft_name"](kind): kind for kind in _pointers(kinds)}
        return named.get(b"CPU_REPACK", self._memory)

    def _context(self) -> int:
        """A context for descriptions alone."""
        return self._call["ggml_init"](_InitParams(_CONTEXT_BYTES, None, True))

    def _allocate(self, context: int, memory: int) -> None:
        """Gives memory to the context's tensors."""
        buffer = self._call["ggml_backend_alloc_ctx_tensors_from_buft"](context, memory)
        self._kept.append((context, buffer))

    def free(self) -> None:
        """Frees all weights and products."""
        for context, buffer in self._kept:
            self._call["ggml_backend_buffer_free"](buffer)
            self._call["ggml_free"](context)
        self._kept.clear()

    def prepare(self, weight: Weight) -> int:
        """The weight as a tensor of ggml."""
        call, (rows, cols) = self._call, weight.case.shape
        context = self._context()
        tensor = call["ggml_new_tensor_2d"](context, self._type, cols, rows)
        self._allocate(context, self._rearranging)
        dense = dequantized(weight).contiguous()
        nbytes = rows * call["ggml_row_size"](self._type, cols)
        made = torch.empty(nbytes, dtype=torch.uint8)
        call["ggml_quantize_chunk"](
            self._type, dense.data_ptr(), made.data_ptr(), 0, rows, cols, None
        )
        call["ggml_backend_tensor_set"](tensor, made.data_ptr(), 0, nbytes)
        return tensor

    def product(self, tensor: int, x: torch.Tensor) -> tuple[Callable[[], None], int]:
        """What multiplies a copy of x, which is made here; and the y of it, a tensor of ggml."""
        call, (m, cols) = self._call, x.shape
        context = self._context()
        of_x = call["ggml_new_tensor_2d"](context, _F32, cols, m)
        y = call["ggml_mul_mat"](context, tensor, of_x)
        graph = call["ggml_new_graph"](context)
        call["ggml_build_forward_expand"](graph, y)
        self._allocate(context, self._memory)
        numbers = x.float().contiguous()
        call["ggml_backend_tensor_set"](of_x, numbers.data_ptr(), 0, numbers.nbytes)

        def compute() -> None:
            call["ggml_backend_graph_compute"](self._backend, graph)

        return compute, y

    def read(self, y: int, shape: tuple[int, int]) -> torch.Tensor:
        found = torch.empty(shape)
        self._call["ggml_backend_tensor_get"](y, found.data_ptr(), 0, found.nbytes)
        return found
