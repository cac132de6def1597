"""include/nf4/nf4.h in ctypes, one to one, and nothing else.

Pointers to the caller's memory are c_void_p, so that an address passes as an int. So is
`const nf4_tensor *` and `const nf4_int4_tensor *`, so that a pointer made once passes in every call
without conversion. A test compares every name, type, size and value here with the header.
"""

from __future__ import annotations

from ctypes import (
    CDLL,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
)

VERSION_MAJOR = 0
VERSION_MINOR = 1
VERSION_PATCH = 0

STATUS_OK = 0
STATUS_INVALID_ARGUMENT = 1
STATUS_NO_CUDA = 2
STATUS_NO_DEVICE = 3
STATUS_UNSUPPORTED_DEVICE = 4
STATUS_CUDA_ERROR = 5

FORMAT_FP4 = 1
FORMAT_NF4 = 2
FORMAT_MXFP4 = 3
FORMAT_NVFP4 = 4

SCALE_FLOOR = 0
SCALE_EVEN = 1
SCALE_CEIL = 2
GLOBAL_FACTOR = 0
GLOBAL_DIVISOR = 1

DTYPE_FP32 = 1
DTYPE_FP16 = 2
DTYPE_BF16 = 3

MATMUL_BATCH_MAX = 64

INT4_GPTQ = 1
INT4_AWQ = 2
INT4_COMPRESSED_TENSORS = 3

PATH_FUSED = 1
PATH_DENSE = 2
DEVICE_CPU = -1

Status = c_int32
Format = c_int32
Dtype = c_int32
Int4Layout = c_int32
Path = c_int32
Stream = c_void_p


class Tensor(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("format", Format),
        ("blocksize", c_int32),
        ("nested_blocksize", c_int32),
        ("scale_rule", c_int32),
        ("rows", c_int64),
        ("cols", c_int64),
        ("packed", c_void_p),
        ("absmax", c_void_p),
        ("nested_absmax", c_void_p),
        ("nested_code", c_void_p),
        ("nested_offset", c_void_p),
        ("codebook", c_void_p),
    ]


class Sizes(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("elements", c_int64),
        ("blocks", c_int64),
        ("nested_blocks", c_int64),
        ("packed_bytes", c_int64),
        ("absmax_bytes", c_int64),
    ]


class Lora(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("dtype", Dtype),
        ("rank", c_int32),
        ("scale", c_float),
        ("reserved", c_int32),
        ("a", c_void_p),
        ("a_stride", c_int64),
        ("b", c_void_p),
        ("b_stride", c_int64),
        ("product", c_void_p),
    ]


class MatmulArgs(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("dtype", Dtype),
        ("reserved", c_int32),
        ("m", c_int64),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("lora", c_void_p),
    ]


class LoraGradArgs(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("dtype", Dtype),
        ("grad_dtype", Dtype),
        ("rank", c_int32),
        ("scale", c_float),
        ("m", c_int64),
        ("rows", c_int64),
        ("cols", c_int64),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("dy", c_void_p),
        ("dy_stride", c_int64),
        ("p", c_void_p),
        ("q", c_void_p),
        ("da", c_void_p),
        ("da_stride", c_int64),
        ("db", c_void_p),
        ("db_stride", c_int64),
    ]


class GroupedArgs(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("dtype", Dtype),
        ("experts", c_int32),
        ("m", c_int64),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("x_rows", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("ends", c_void_p),
        ("x_index", c_void_p),
        ("bias", c_void_p),
        ("bias_stride", c_int64),
        ("row_scale", c_void_p),
    ]


class Int4Tensor(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("layout", Int4Layout),
        ("scales_dtype", Dtype),
        ("group_size", c_int32),
        ("zero_offset", c_int32),
        ("rows", c_int64),
        ("cols", c_int64),
        ("packed", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("g_idx", c_void_p),
        ("permutation", c_void_p),
    ]


class Int4Sizes(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("groups", c_int64),
        ("packed_bytes", c_int64),
        ("scales_bytes", c_int64),
        ("zeros_bytes", c_int64),
    ]


class Device(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("device_count", c_int32),
        ("compute_capability", c_int32),
        ("multiprocessors", c_int32),
        ("driver_version", c_int32),
        ("runtime_version", c_int32),
        ("reserved", c_int32),
        ("memory_bytes", c_int64),
        ("name", c_char * 256),
        ("dequant_variant", c_char * 32),
        ("shared_memory_bytes", c_int32),
        ("timed", c_int32),
    ]


_SIZE = POINTER(c_size_t)
# name: (restype, argtypes)
FUNCTIONS = {
    "nf4_status_string": (c_char_p, [Status]),
    "nf4_last_error": (c_char_p, []),
    "nf4_version": (c_int32, []),
    "nf4_version_string": (c_char_p, []),
    "nf4_build_info": (c_char_p, []),
    "nf4_codebook": (POINTER(c_float), [Format]),
    "nf4_scale_code": (POINTER(c_float), []),
    "nf4_tensor_sizes": (Status, [c_void_p, POINTER(Sizes)]),
    "nf4_quantize_workspace_size": (Status, [c_void_p, _SIZE]),
    "nf4_quantize_launch": (Status, [c_void_p, Dtype, c_void_p, c_void_p, c_size_t, Stream]),
    "nf4_quantize_cpu": (Status, [c_void_p, Dtype, c_void_p, c_void_p, c_size_t, c_int32]),
    "nf4_lora_grad_launch": (Status, [c_void_p, Stream]),
    "nf4_lora_grad_cpu": (Status, [c_void_p, c_int32]),
    "nf4_lora_grad_path": (Status, [c_void_p, c_int32, POINTER(Path)]),
    "nf4_int4_tensor_sizes": (Status, [c_void_p, POINTER(Int4Sizes)]),
    "nf4_int4_quantize_launch": (Status, [c_void_p, Dtype, c_void_p, c_int32, Stream]),
    "nf4_int4_quantize_cpu": (Status, [c_void_p, Dtype, c_void_p, c_int32, c_int32]),
    "nf4_int4_reorder_launch": (Status, [c_void_p, c_void_p, Stream]),
    "nf4_int4_reorder_cpu": (Status, [c_void_p, c_void_p, c_int32]),
    "nf4_set_costs": (Status, [c_char_p, c_size_t]),
    "nf4_device_info": (Status, [c_int32, POINTER(Device)]),
    "nf4_cpu_variant": (c_char_p, []),
}
# Each descriptor of a weight has these functions.
for _kind in ("nf4", "nf4_int4"):
    FUNCTIONS |= {
        f"{_kind}_dequant_launch": (Status, [c_void_p, c_void_p, Dtype, Stream]),
        f"{_kind}_dequant_cpu": (Status, [c_void_p, c_void_p, Dtype, c_int32]),
        f"{_kind}_matmul_batch_workspace_size": (Status, [c_void_p, c_void_p, c_size_t, _SIZE]),
        f"{_kind}_matmul_batch_launch": (
            Status,
            [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, Stream],
        ),
        f"{_kind}_matmul_batch_cpu": (Status, [c_void_p, c_void_p, c_size_t, c_int32]),
        f"{_kind}_matmul_plan": (
            Status,
            [c_void_p, c_void_p, c_size_t, c_int32, POINTER(c_int32), POINTER(c_char_p)],
        ),
    }
# Each product has these functions.
for _product in (
    *("nf4_matmul", "nf4_matmul_grad", "nf4_matmul_grouped", "nf4_matmul_grouped_grad"),
    *("nf4_int4_matmul", "nf4_int4_matmul_grouped"),
):
    FUNCTIONS |= {
        f"{_product}_workspace_size": (Status, [c_void_p, c_void_p, _SIZE]),
        f"{_product}_launch": (Status, [c_void_p, c_void_p, c_void_p, c_size_t, Stream]),
        f"{_product}_cpu": (Status, [c_void_p, c_void_p, c_int32]),
        f"{_product}_path": (Status, [c_void_p, c_void_p, c_int32, POINTER(Path)]),
    }


def bind(library: CDLL) -> CDLL:
    """Declares every function on a loaded library; AttributeError names a missing one."""
    for name, (restype, argtypes) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = restype
        function.argtypes = argtypes
    return library
