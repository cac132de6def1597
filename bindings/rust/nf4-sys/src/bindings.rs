// Made from include/nf4/nf4.h by bindgen; do not edit. To remake it:
// NF4_BLESS=1 cargo test -p nf4-sys --test bindings

pub const NF4_VERSION_MAJOR: i32 = 0;
pub const NF4_VERSION_MINOR: i32 = 1;
pub const NF4_VERSION_PATCH: i32 = 0;
pub const NF4_STATUS_OK: i32 = 0;
pub const NF4_STATUS_INVALID_ARGUMENT: i32 = 1;
pub const NF4_STATUS_NO_CUDA: i32 = 2;
pub const NF4_STATUS_NO_DEVICE: i32 = 3;
pub const NF4_STATUS_UNSUPPORTED_DEVICE: i32 = 4;
pub const NF4_STATUS_CUDA_ERROR: i32 = 5;
pub const NF4_FORMAT_FP4: i32 = 1;
pub const NF4_FORMAT_NF4: i32 = 2;
pub const NF4_FORMAT_MXFP4: i32 = 3;
pub const NF4_FORMAT_NVFP4: i32 = 4;
pub const NF4_SCALE_FLOOR: i32 = 0;
pub const NF4_SCALE_EVEN: i32 = 1;
pub const NF4_SCALE_CEIL: i32 = 2;
pub const NF4_GLOBAL_FACTOR: i32 = 0;
pub const NF4_GLOBAL_DIVISOR: i32 = 1;
pub const NF4_DTYPE_FP32: i32 = 1;
pub const NF4_DTYPE_FP16: i32 = 2;
pub const NF4_DTYPE_BF16: i32 = 3;
pub const NF4_MATMUL_BATCH_MAX: i32 = 64;
pub const NF4_INT4_GPTQ: i32 = 1;
pub const NF4_INT4_AWQ: i32 = 2;
pub const NF4_INT4_COMPRESSED_TENSORS: i32 = 3;
pub const NF4_PATH_FUSED: i32 = 1;
pub const NF4_PATH_DENSE: i32 = 2;
pub const NF4_DEVICE_CPU: i32 = -1;
/// ---- Status -------------------------------------------------------------
pub type nf4_status = i32;
/** The 4-bit format. It selects the codebook if nf4_tensor.codebook is NULL. The values
 are the same as in bitsandbytes' C library.*/
pub type nf4_format = i32;
/// Element types of dense data.
pub type nf4_dtype = i32;
#[repr(C)]
#[derive(Debug)]
pub struct CUstream_st {
    _unused: [u8; 0],
}
/** cudaStream_t (and CUstream) without their headers. The stream belongs to the device that
 has the memory. NULL is the legacy default stream of that device, or of the current device
 if all memory is managed memory or host memory.*/
pub type nf4_stream = *mut CUstream_st;
/** A quantized weight. It borrows all pointers and owns nothing. Dequantize and
 matmul read packed, absmax, nested_absmax and nested_offset; quantize writes them, except the
 nested_absmax of NVFP4.*/
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nf4_tensor {
    /// sizeof(nf4_tensor)
    pub struct_size: usize,
    pub format: nf4_format,
    /// elements: a power of two, 32..4096; MXFP4: 32; NVFP4: 16 or 32
    pub blocksize: i32,
    /** scales: a power of two, 1..2^30; 0 means flat. MXFP4: 0. NVFP4: the
rows that share a global scale, >= 0; 0 means all*/
    pub nested_blocksize: i32,
    /// MXFP4 and NVFP4: see above; otherwise 0
    pub scale_rule: i32,
    /// >= 0; rows * cols <= 2^60
    pub rows: i64,
    /// >= 0
    pub cols: i64,
    pub packed: *mut ::core::ffi::c_void,
    /// float if flat; uint8_t if nested, and in MXFP4 and NVFP4
    pub absmax: *mut ::core::ffi::c_void,
    /** this and the next two: NULL if and only if flat or MXFP4; NVFP4 has
this one alone*/
    pub nested_absmax: *mut f32,
    pub nested_code: *const f32,
    pub nested_offset: *mut f32,
    /** 16 floats that replace the format's, or NULL; MXFP4 and NVFP4:
NULL*/
    pub codebook: *const f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of nf4_tensor"][::core::mem::size_of::<nf4_tensor>() - 88usize];
    ["Alignment of nf4_tensor"][::core::mem::align_of::<nf4_tensor>() - 8usize];
    [
        "Offset of field: nf4_tensor::struct_size",
    ][::core::mem::offset_of!(nf4_tensor, struct_size) - 0usize];
    [
        "Offset of field: nf4_tensor::format",
    ][::core::mem::offset_of!(nf4_tensor, format) - 8usize];
    [
        "Offset of field: nf4_tensor::blocksize",
    ][::core::mem::offset_of!(nf4_tensor, blocksize) - 12usize];
    [
        "Offset of field: nf4_tensor::nested_blocksize",
    ][::core::mem::offset_of!(nf4_tensor, nested_blocksize) - 16usize];
    [
        "Offset of field: nf4_tensor::scale_rule",
    ][::core::mem::offset_of!(nf4_tensor, scale_rule) - 20usize];
    [
        "Offset of field: nf4_tensor::rows",
    ][::core::mem::offset_of!(nf4_tensor, rows) - 24usize];
    [
        "Offset of field: nf4_tensor::cols",
    ][::core::mem::offset_of!(nf4_tensor, cols) - 32usize];
    [
        "Offset of field: nf4_tensor::packed",
    ][::core::mem::offset_of!(nf4_tensor, packed) - 40usize];
    [
        "Offset of field: nf4_tensor::absmax",
    ][::core::mem::offset_of!(nf4_tensor, absmax) - 48usize];
    [
        "Offset of field: nf4_tensor::nested_absmax",
    ][::core::mem::offset_of!(nf4_tensor, nested_absmax) - 56usize];
    [
        "Offset of field: nf4_tensor::nested_code",
    ][::core::mem::offset_of!(nf4_tensor, nested_code) - 64usize];
    [
        "Offset of field: nf4_tensor::nested_offset",
    ][::core::mem::offset_of!(nf4_tensor, nested_offset) - 72usize];
    [
        "Offset of field: nf4_tensor::codebook",
    ][::core::mem::offset_of!(nf4_tensor, codebook) - 80usize];
};
/// Sizes of the parts of a tensor.
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nf4_sizes {
    /// sizeof(nf4_sizes), set by the caller
    pub struct_size: usize,
    /// rows * cols
    pub elements: i64,
    /// elements of absmax
    pub blocks: i64,
    /// elements of nested_absmax; 0 if flat or MXFP4
    pub nested_blocks: i64,
    pub packed_bytes: i64,
    pub absmax_bytes: i64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of nf4_sizes"][::core::mem::size_of::<nf4_sizes>() - 48usize];
    ["Alignment of nf4_sizes"][::core::mem::align_of::<nf4_sizes>() - 8usize];
    [
        "Offset of field: nf4_sizes::struct_size",
    ][::core::mem::offset_of!(nf4_sizes, struct_size) - 0usize];
    [
        "Offset of field: nf4_sizes::elements",
    ][::core::mem::offset_of!(nf4_sizes, elements) - 8usize];
    [
        "Offset of field: nf4_sizes::blocks",
    ][::core::mem::offset_of!(nf4_sizes, blocks) - 16usize];
    [
        "Offset of field: nf4_sizes::nested_blocks",
    ][::core::mem::offset_of!(nf4_sizes, nested_blocks) - 24usize];
    [
        "Offset of field: nf4_sizes::packed_bytes",
    ][::core::mem::offset_of!(nf4_sizes, packed_bytes) - 32usize];
    [
        "Offset of field: nf4_sizes::absmax_bytes",
    ][::core::mem::offset_of!(nf4_sizes, absmax_bytes) - 40usize];
};
/** A low-rank adapter (LoRA, arXiv:2106.09685) of a weight W [rows, cols]. The product uses
 W + scale B A, with A [rank, cols] and B [rows, rank], both row-major.*/
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nf4_lora {
    /// sizeof(nf4_lora)
    pub struct_size: usize,
    /** of a and b: the dtype of nf4_matmul_args, or fp32, which may be
rounded to that dtype*/
    pub dtype: nf4_dtype,
    /// 1..128
    pub rank: i32,
    /// finite
    pub scale: f32,
    /// 0
    pub reserved: i32,
    pub a: *const ::core::ffi::c_void,
    /// >= cols
    pub a_stride: i64,
    pub b: *const ::core::ffi::c_void,
    /// >= rank
    pub b_stride: i64,
    /** output [m, rank], contiguous, in the dtype of nf4_matmul_args:
x A^T, or dy B in the gradient, without the scale. The
gradients of B and A need it. On a GPU it may be NULL, if it
is not wanted; the CPU functions refuse NULL*/
    pub product: *mut ::core::ffi::c_void,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of nf4_lora"][::core::mem::size_of::<nf4_lora>() - 64usize];
    ["Alignment of nf4_lora"][::core::mem::align_of::<nf4_lora>() - 8usize];
    [
        "Offset of field: nf4_lora::struct_size",
    ][::core::mem::offset_of!(nf4_lora, struct_size) - 0usize];
    [
        "Offset of field: nf4_lora::dtype",
    ][::core::mem::offset_of!(nf4_lora, dtype) - 8usize];
    [
        "Offset of field: nf4_lora::rank",
    ][::core::mem::offset_of!(nf4_lora, rank) - 12usize];
    [
        "Offset of field: nf4_lora::scale",
    ][::core::mem::offset_of!(nf4_lora, scale) - 16usize];
    [
        "Offset of field: nf4_lora::reserved",
    ][::core::mem::offset_of!(nf4_lora, reserved) - 20usize];
    ["Offset of field: nf4_lora::a"][::core::mem::offset_of!(nf4_lora, a) - 24usize];
    [
        "Offset of field: nf4_lora::a_stride",
    ][::core::mem::offset_of!(nf4_lora, a_stride) - 32usize];
    ["Offset of field: nf4_lora::b"][::core::mem::offset_of!(nf4_lora, b) - 40usize];
    [
        "Offset of field: nf4_lora::b_stride",
    ][::core::mem::offset_of!(nf4_lora, b_stride) - 48usize];
    [
        "Offset of field: nf4_lora::product",
    ][::core::mem::offset_of!(nf4_lora, product) - 56usize];
};
/** y = x W^T + bias, for activations x [m, cols], a weight W [rows, cols], an output
 y [m, rows] and a bias [rows]. Matrices are row-major; a stride is the distance
 from one row to the next, in elements.*/
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nf4_matmul_args {
    /// sizeof(nf4_matmul_args), or 64 if it ends before lora
    pub struct_size: usize,
    /** of x, bias and y. On a GPU, fp32 needs an nf4_tensor and m <= 16;
nf4_matmul_grad_launch takes any m*/
    pub dtype: nf4_dtype,
    /// 0
    pub reserved: i32,
    /// >= 0
    pub m: i64,
    pub x: *const ::core::ffi::c_void,
    /// >= cols
    pub x_stride: i64,
    /// or NULL
    pub bias: *const ::core::ffi::c_void,
    pub y: *mut ::core::ffi::c_void,
    /// >= rows
    pub y_stride: i64,
    /// or NULL; NULL for an nf4_int4_tensor
    pub lora: *const nf4_lora,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of nf4_matmul_args"][::core::mem::size_of::<nf4_matmul_args>() - 72usize];
    [
        "Alignment of nf4_matmul_args",
    ][::core::mem::align_of::<nf4_matmul_args>() - 8usize];
    [
        "Offset of field: nf4_matmul_args::struct_size",
    ][::core::mem::offset_of!(nf4_matmul_args, struct_size) - 0usize];
    [
        "Offset of field: nf4_matmul_args::dtype",
    ][::core::mem::offset_of!(nf4_matmul_args, dtype) - 8usize];
    [
        "Offset of field: nf4_matmul_args::reserved",
    ][::core::mem::offset_of!(nf4_matmul_args, reserved) - 12usize];
    [
        "Offset of field: nf4_matmul_args::m",
    ][::core::mem::offset_of!(nf4_matmul_args, m) - 16usize];
    [
        "Offset of field: nf4_matmul_args::x",
    ][::core::mem::offset_of!(nf4_matmul_args, x) - 24usize];
    [
        "Offset of field: nf4_matmul_args::x_stride",
    ][::core::mem::offset_of!(nf4_matmul_args, x_stride) - 32usize];
    [
        "Offset of field: nf4_matmul_args::bias",
    ][::core::mem::offset_of!(nf4_matmul_args, bias) - 40usize];
    [
        "Offset of field: nf4_matmul_args::y",
    ][::core::mem::offset_of!(nf4_matmul_args, y) - 48usize];
    [
        "Offset of field: nf4_matmul_args::y_stride",
    ][::core::mem::offset_of!(nf4_matmul_args, y_stride) - 56usize];
    [
        "Offset of field: nf4_matmul_args::lora",
    ][::core::mem::offset_of!(nf4_matmul_args, lora) - 64usize];
};
/** For y = x (W + scale B A)^T, with dy the gradient of y:
   da = scale q^T x, [rank, cols], for q = dy B
   db = scale dy^T p, [rows, rank], for p = x A^T
 p and q are the products that nf4_matmul_* and nf4_matmul_grad_* write with a lora. Matrices
 are row-major; a stride is the distance from one row to the next, in elements.*/
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nf4_lora_grad_args {
    /// sizeof(nf4_lora_grad_args)
    pub struct_size: usize,
    /// of x, dy, p and q
    pub dtype: nf4_dtype,
    /// of da and db: dtype, or fp32
    pub grad_dtype: nf4_dtype,
    /// 1..128
    pub rank: i32,
    /// finite
    pub scale: f32,
    /// >= 0
    pub m: i64,
    /// >= 0
    pub rows: i64,
    /// >= 0
    pub cols: i64,
    /// [m, cols]
    pub x: *const ::core::ffi::c_void,
    /// >= cols
    pub x_stride: i64,
    /// [m, rows]
    pub dy: *const ::core::ffi::c_void,
    /// >= rows
    pub dy_stride: i64,
    /// [m, rank], contiguous
    pub p: *const ::core::ffi::c_void,
    /// [m, rank], contiguous
    pub q: *const ::core::ffi::c_void,
    /// NULL if it is not wanted; x and q are then not read
    pub da: *mut ::core::ffi::c_void,
    /// >= cols
    pub da_stride: i64,
    /// NULL if it is not wanted; dy and p are then not read
    pub db: *mut ::core::ffi::c_void,
    /// >= rank
    pub db_stride: i64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of nf4_lora_grad_args",
    ][::core::mem::size_of::<nf4_lora_grad_args>() - 128usize];
    [
        "Alignment of nf4_lora_grad_args",
    ][::core::mem::align_of::<nf4_lora_grad_args>() - 8usize];
    [
        "Offset of field: nf4_lora_grad_args::struct_size",
    ][::core::mem::offset_of!(nf4_lora_grad_args, struct_size) - 0usize];
    [
        "Offset of field: nf4_lora_grad_args::dtype",
    ][::core::mem::offset_of!(nf4_lora_grad_args, dtype) - 8usize];
    [
        "Offset of field: nf4_lora_grad_args::grad_dtype",
    ][::core::mem::offset_of!(nf4_lora_grad_args, grad_dtype) - 12usize];
    [
        "Offset of field: nf4_lora_grad_args::rank",
    ][::core::mem::offset_of!(nf4_lora_grad_args, rank) - 16usize];
    [
        "Offset of field: nf4_lora_grad_args::scale",
    ][::core::mem::offset_of!(nf4_lora_grad_args, scale) - 20usize];
    [
        "Offset of field: nf4_lora_grad_args::m",
    ][::core::mem::offset_of!(nf4_lora_grad_args, m) - 24usize];
    [
        "Offset of field: nf4_lora_grad_args::rows",
    ][::core::mem::offset_of!(nf4_lora_grad_args, rows) - 32usize];
    [
        "Offset of field: nf4_lora_grad_args::cols",
    ][::core::mem::offset_of!(nf4_lora_grad_args, cols) - 40usize];
    [
        "Offset of field: nf4_lora_grad_args::x",
    ][::core::mem::offset_of!(nf4_lora_grad_args, x) - 48usize];
    [
        "Offset of field: nf4_lora_grad_args::x_stride",
    ][::core::mem::offset_of!(nf4_lora_grad_args, x_stride) - 56usize];
    [
        "Offset of field: nf4_lora_grad_args::dy",
    ][::core::mem::offset_of!(nf4_lora_grad_args, dy) - 64usize];
    [
        "Offset of field: nf4_lora_grad_args::dy_stride",
    ][::core::mem::offset_of!(nf4_lora_grad_args, dy_stride) - 72usize];
    [
        "Offset of field: nf4_lora_grad_args::p",
    ][::core::mem::offset_of!(nf4_lora_grad_args, p) - 80usize];
    [
        "Offset of field: nf4_lora_grad_args::q",
    ][::core::mem::offset_of!(nf4_lora_grad_args, q) - 88usize];
    [
        "Offset of field: nf4_lora_grad_args::da",
    ][::core::mem::offset_of!(nf4_lora_grad_args, da) - 96usize];
    [
        "Offset of field: nf4_lora_grad_args::da_stride",
    ][::core::mem::offset_of!(nf4_lora_grad_args, da_stride) - 104usize];
    [
        "Offset of field: nf4_lora_grad_args::db",
    ][::core::mem::offset_of!(nf4_lora_grad_args, db) - 112usize];
    [
        "Offset of field: nf4_lora_grad_args::db_stride",
    ][::core::mem::offset_of!(nf4_lora_grad_args, db_stride) - 120usize];
};
/** E experts of N x K elements (mixture of experts) are one weight with rows = E * N and
 cols = K: expert e has rows e * N to (e + 1) * N - 1. If E is more than 1, N * K is a
 multiple of blocksize, so that each expert begins with a block. A nested block may span
 experts.

 The rows of y are sorted by expert, and `ends` assigns them to the experts: the rows of
 expert e begin where those of the previous expert end, and end before ends[e], like the
 offs of torch.nn.functional.grouped_mm. An expert may have no rows. The host does not read
 the ends, x_index or row_scale of a launch, so a CUDA graph may be replayed with other
 values in their place.
   end(e)   = min(m, max(0, ends[0], ..., ends[e])): an expert whose end decreases has no
              rows, and an end beyond m counts as m.
   y[i, n]  = row_scale[i] * (the sum over k of x[x_index[i], k] * W[e * N + n, k]
                              + bias[e, n]), for the expert e of row i.
 Rows of y from end(E - 1) on belong to no expert. Their contents afterwards are
 unspecified.*/
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nf4_grouped_args {
    /// sizeof(nf4_grouped_args)
    pub struct_size: usize,
    /// of x, bias and y; on a GPU fp16 or bf16
    pub dtype: nf4_dtype,
    /** E >= 0; divides the rows of an nf4_tensor, which has none if E
is 0*/
    pub experts: i32,
    /// rows of y: 0..2^31-1
    pub m: i64,
    /// [x_rows, K]
    pub x: *const ::core::ffi::c_void,
    /// >= K
    pub x_stride: i64,
    /// >= 0; at least m if x_index is NULL
    pub x_rows: i64,
    /// [m, N]
    pub y: *mut ::core::ffi::c_void,
    /// >= N
    pub y_stride: i64,
    /// [E]
    pub ends: *const i32,
    /** [m], the row of x for each row of y; a row may be used several
times. An index outside 0..x_rows-1 stands for a row of zeros.
NULL: row i of x for row i of y*/
    pub x_index: *const i32,
    /// [E, N], or NULL
    pub bias: *const ::core::ffi::c_void,
    /// >= N, from one expert to the next; not read if bias is NULL
    pub bias_stride: i64,
    /// [m], such as the router's weights, or NULL: 1
    pub row_scale: *const f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of nf4_grouped_args"][::core::mem::size_of::<nf4_grouped_args>() - 104usize];
    [
        "Alignment of nf4_grouped_args",
    ][::core::mem::align_of::<nf4_grouped_args>() - 8usize];
    [
        "Offset of field: nf4_grouped_args::struct_size",
    ][::core::mem::offset_of!(nf4_grouped_args, struct_size) - 0usize];
    [
        "Offset of field: nf4_grouped_args::dtype",
    ][::core::mem::offset_of!(nf4_grouped_args, dtype) - 8usize];
    [
        "Offset of field: nf4_grouped_args::experts",
    ][::core::mem::offset_of!(nf4_grouped_args, experts) - 12usize];
    [
        "Offset of field: nf4_grouped_args::m",
    ][::core::mem::offset_of!(nf4_grouped_args, m) - 16usize];
    [
        "Offset of field: nf4_grouped_args::x",
    ][::core::mem::offset_of!(nf4_grouped_args, x) - 24usize];
    [
        "Offset of field: nf4_grouped_args::x_stride",
    ][::core::mem::offset_of!(nf4_grouped_args, x_stride) - 32usize];
    [
        "Offset of field: nf4_grouped_args::x_rows",
    ][::core::mem::offset_of!(nf4_grouped_args, x_rows) - 40usize];
    [
        "Offset of field: nf4_grouped_args::y",
    ][::core::mem::offset_of!(nf4_grouped_args, y) - 48usize];
    [
        "Offset of field: nf4_grouped_args::y_stride",
    ][::core::mem::offset_of!(nf4_grouped_args, y_stride) - 56usize];
    [
        "Offset of field: nf4_grouped_args::ends",
    ][::core::mem::offset_of!(nf4_grouped_args, ends) - 64usize];
    [
        "Offset of field: nf4_grouped_args::x_index",
    ][::core::mem::offset_of!(nf4_grouped_args, x_index) - 72usize];
    [
        "Offset of field: nf4_grouped_args::bias",
    ][::core::mem::offset_of!(nf4_grouped_args, bias) - 80usize];
    [
        "Offset of field: nf4_grouped_args::bias_stride",
    ][::core::mem::offset_of!(nf4_grouped_args, bias_stride) - 88usize];
    [
        "Offset of field: nf4_grouped_args::row_scale",
    ][::core::mem::offset_of!(nf4_grouped_args, row_scale) - 96usize];
};
/** GPTQ, AWQ and compressed-tensors store a weight of rows x cols (N x K) elements as 4-bit
 codes q. Each row has, for each group of columns, a scale s and a zero point z, 0..15:
   value = RN_dtype(s * (q - z)),
 which is rounded once, because the product is exact in binary32.
 Group g of a row has columns g * group_size to (g + 1) * group_size - 1 or, with g_idx, the
 columns whose g_idx is g. There are G = cols / group_size groups.

 A 32-bit word has eight codes; code i is in bits 4 i to 4 i + 3. The words of codes and of
 zeros, and the scales, lie as in checkpoints, row-major. r and c are the row and the column of
 a word in its matrix; the codes of a word of packed differ in k, a column of the weight, or in n,
 a row of the weight:
   layout               packed             code i of a word     zeros           scales
   GPTQ                 [K / 8][N]         k = 8 r + i          [G][ceil(N/8)]  [G][N]
   AWQ                  [K][N / 8]         n = 8 c + order[i]   [G][N / 8]      [G][N]
   COMPRESSED_TENSORS   [N][ceil(K / 8)]   k = 8 c + i          [ceil(N/8)][G]  [N][G]
 order = 0 2 4 6 1 3 5 7. A word of zeros has the zero points of 8 rows: code i belongs to row
 8 c + i, in AWQ to row 8 c + order[i]. In GPTQ cols must be a multiple of 8, in AWQ rows.
 Codes past the last column or row are not used; quantize writes 0 there, before it subtracts
 zero_offset.*/
pub type nf4_int4_layout = i32;
/** An integer weight. It borrows all pointers and owns nothing. Quantize writes packed, scales
 and zeros. The functions on host memory refuse a g_idx outside 0..G-1 and a permutation
 outside 0..cols-1. On a GPU these values are not checked, and behaviour is undefined if one is
 out of range. If a permutation names a column twice, the result is unspecified.*/
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nf4_int4_tensor {
    /// sizeof(nf4_int4_tensor)
    pub struct_size: usize,
    pub layout: nf4_int4_layout,
    /// fp16 or bf16
    pub scales_dtype: nf4_dtype,
    /// columns: a multiple of 8 that divides cols; -1: all
    pub group_size: i32,
    /** 1 for GPTQ v1 (checkpoint_format gptq), which stores each
word of zeros minus 0x11111111; else 0*/
    pub zero_offset: i32,
    /// >= 0; rows * cols <= 2^60
    pub rows: i64,
    /// >= 0
    pub cols: i64,
    /// words, 4-byte aligned
    pub packed: *mut ::core::ffi::c_void,
    pub scales: *mut ::core::ffi::c_void,
    /// words, or NULL: z is 8 everywhere, and zero_offset is 0
    pub zeros: *mut ::core::ffi::c_void,
    /** [cols], the group of each stored column, as in GPTQ with
act order; or NULL: column / group_size*/
    pub g_idx: *const i32,
    /** [cols], or NULL: stored column j is column permutation[j] of
the weight (nf4_int4_reorder_launch)*/
    pub permutation: *const i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of nf4_int4_tensor"][::core::mem::size_of::<nf4_int4_tensor>() - 80usize];
    [
        "Alignment of nf4_int4_tensor",
    ][::core::mem::align_of::<nf4_int4_tensor>() - 8usize];
    [
        "Offset of field: nf4_int4_tensor::struct_size",
    ][::core::mem::offset_of!(nf4_int4_tensor, struct_size) - 0usize];
    [
        "Offset of field: nf4_int4_tensor::layout",
    ][::core::mem::offset_of!(nf4_int4_tensor, layout) - 8usize];
    [
        "Offset of field: nf4_int4_tensor::scales_dtype",
    ][::core::mem::offset_of!(nf4_int4_tensor, scales_dtype) - 12usize];
    [
        "Offset of field: nf4_int4_tensor::group_size",
    ][::core::mem::offset_of!(nf4_int4_tensor, group_size) - 16usize];
    [
        "Offset of field: nf4_int4_tensor::zero_offset",
    ][::core::mem::offset_of!(nf4_int4_tensor, zero_offset) - 20usize];
    [
        "Offset of field: nf4_int4_tensor::rows",
    ][::core::mem::offset_of!(nf4_int4_tensor, rows) - 24usize];
    [
        "Offset of field: nf4_int4_tensor::cols",
    ][::core::mem::offset_of!(nf4_int4_tensor, cols) - 32usize];
    [
        "Offset of field: nf4_int4_tensor::packed",
    ][::core::mem::offset_of!(nf4_int4_tensor, packed) - 40usize];
    [
        "Offset of field: nf4_int4_tensor::scales",
    ][::core::mem::offset_of!(nf4_int4_tensor, scales) - 48usize];
    [
        "Offset of field: nf4_int4_tensor::zeros",
    ][::core::mem::offset_of!(nf4_int4_tensor, zeros) - 56usize];
    [
        "Offset of field: nf4_int4_tensor::g_idx",
    ][::core::mem::offset_of!(nf4_int4_tensor, g_idx) - 64usize];
    [
        "Offset of field: nf4_int4_tensor::permutation",
    ][::core::mem::offset_of!(nf4_int4_tensor, permutation) - 72usize];
};
/// Sizes of the parts of a tensor.
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nf4_int4_sizes {
    /// sizeof(nf4_int4_sizes), set by the caller
    pub struct_size: usize,
    /// groups of a row
    pub groups: i64,
    pub packed_bytes: i64,
    pub scales_bytes: i64,
    pub zeros_bytes: i64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of nf4_int4_sizes"][::core::mem::size_of::<nf4_int4_sizes>() - 40usize];
    ["Alignment of nf4_int4_sizes"][::core::mem::align_of::<nf4_int4_sizes>() - 8usize];
    [
        "Offset of field: nf4_int4_sizes::struct_size",
    ][::core::mem::offset_of!(nf4_int4_sizes, struct_size) - 0usize];
    [
        "Offset of field: nf4_int4_sizes::groups",
    ][::core::mem::offset_of!(nf4_int4_sizes, groups) - 8usize];
    [
        "Offset of field: nf4_int4_sizes::packed_bytes",
    ][::core::mem::offset_of!(nf4_int4_sizes, packed_bytes) - 16usize];
    [
        "Offset of field: nf4_int4_sizes::scales_bytes",
    ][::core::mem::offset_of!(nf4_int4_sizes, scales_bytes) - 24usize];
    [
        "Offset of field: nf4_int4_sizes::zeros_bytes",
    ][::core::mem::offset_of!(nf4_int4_sizes, zeros_bytes) - 32usize];
};
/** There are two ways to compute a product. Fused: libnf4's function for it reads the packed
 weight. Dense: nf4_dequant_launch or nf4_int4_dequant_launch, or its _cpu function on
 host memory, writes the weight to memory of the caller, and a dense matrix product, such as
 that of cuBLAS, follows. The functions below say which way is expected to take less time on
 a device. Both ways give the same numbers within the errors that nf4_matmul_launch lists.

 The answers for NVIDIA Hopper GPUs are measured. On all GPUs the gradients of MXFP4 and NVFP4,
 and their products in fp32, are dense; gradients of their experts are fused for up to half a row
 an expert on average. The answers for a GPU on which nobody has timed libnf4 (nf4_device.timed is
 0) are conservative:
   - Up to 16 rows of x are fused if the GPU has a kernel for few rows of that kind of weight. A
     GPU with 99 KiB of shared memory for a thread block has none for NF4 and FP4 with x in fp32.
     A GPU of compute capability 7.5 has none for integers, for x in other dtypes than fp16, or
     with a lora.
   - More rows are fused on GPUs of compute capability 8.x and 12.x that have a kernel for them:
     up to 32, 64 or 128 rows of x for a weight of at least 2^23, 2^24 or 2^25 elements. For
     gradients of NF4 and FP4, and with a lora, the weight needs at least 2^24 elements; a
     gradient with a lora has half the limit. On 7.5, up to 32 or 64 rows of x are fused for a
     weight of at least 2^24 or 2^25 elements if x is in fp16, without a lora, except for AWQ.
   - Experts with few rows, and integers that have few columns or are slow to dequantize, are
     fused.
 A product that the launch refuses on a GPU, such as fp32 with more than 16 rows of x, is dense.

 For one device and the same shapes, dtypes, strides and alignments, the answer stays the same
 until nf4_set_costs is called, so a caller that calls it before the first product, or never, may
 keep the answer. Other versions of the library may answer differently.*/
pub type nf4_path = i32;
/// ---- The machine ----------------------------------------------------------
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nf4_device {
    /// sizeof(nf4_device), set by the caller
    pub struct_size: usize,
    /// GPUs that the CUDA driver shows
    pub device_count: i32,
    /// major * 10 + minor: 90 for an H200
    pub compute_capability: i32,
    pub multiprocessors: i32,
    /// CUDA version of the driver, 13000 for 13.0; 0: none
    pub driver_version: i32,
    /// CUDA version that the library was built with, as above
    pub runtime_version: i32,
    pub reserved: i32,
    pub memory_bytes: i64,
    pub name: [::core::ffi::c_char; 256usize],
    /// the kernels that would run, such as "sm90"
    pub dequant_variant: [::core::ffi::c_char; 32usize],
    /// the most that a thread block may have
    pub shared_memory_bytes: i32,
    /** 1: libnf4's products were timed on GPUs of this kind; 0: they
were not, and the answers of nf4_*_path are presumed*/
    pub timed: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of nf4_device"][::core::mem::size_of::<nf4_device>() - 336usize];
    ["Alignment of nf4_device"][::core::mem::align_of::<nf4_device>() - 8usize];
    [
        "Offset of field: nf4_device::struct_size",
    ][::core::mem::offset_of!(nf4_device, struct_size) - 0usize];
    [
        "Offset of field: nf4_device::device_count",
    ][::core::mem::offset_of!(nf4_device, device_count) - 8usize];
    [
        "Offset of field: nf4_device::compute_capability",
    ][::core::mem::offset_of!(nf4_device, compute_capability) - 12usize];
    [
        "Offset of field: nf4_device::multiprocessors",
    ][::core::mem::offset_of!(nf4_device, multiprocessors) - 16usize];
    [
        "Offset of field: nf4_device::driver_version",
    ][::core::mem::offset_of!(nf4_device, driver_version) - 20usize];
    [
        "Offset of field: nf4_device::runtime_version",
    ][::core::mem::offset_of!(nf4_device, runtime_version) - 24usize];
    [
        "Offset of field: nf4_device::reserved",
    ][::core::mem::offset_of!(nf4_device, reserved) - 28usize];
    [
        "Offset of field: nf4_device::memory_bytes",
    ][::core::mem::offset_of!(nf4_device, memory_bytes) - 32usize];
    [
        "Offset of field: nf4_device::name",
    ][::core::mem::offset_of!(nf4_device, name) - 40usize];
    [
        "Offset of field: nf4_device::dequant_variant",
    ][::core::mem::offset_of!(nf4_device, dequant_variant) - 296usize];
    [
        "Offset of field: nf4_device::shared_memory_bytes",
    ][::core::mem::offset_of!(nf4_device, shared_memory_bytes) - 328usize];
    [
        "Offset of field: nf4_device::timed",
    ][::core::mem::offset_of!(nf4_device, timed) - 332usize];
};
functions! {
    /// The name of a status, such as "NF4_STATUS_OK"; never NULL.
    pub fn nf4_status_string(status: nf4_status) -> *const ::core::ffi::c_char;
    /** Describes the last call that failed on this thread: the argument and its value. The text
 is empty before any failure, never NULL, and valid until the next failure on the same
 thread.*/
    pub fn nf4_last_error() -> *const ::core::ffi::c_char;
    /// major * 10000 + minor * 100 + patch of the loaded library.
    pub fn nf4_version() -> i32;
    /// The same as text, such as "0.1.0".
    pub fn nf4_version_string() -> *const ::core::ffi::c_char;
    /** How the library was built, for reports: lines of "key: value" (compiler, cuda,
 cuda_archs, cpu_variants).*/
    pub fn nf4_build_info() -> *const ::core::ffi::c_char;
    /** The 16 floats of a format, indexed by code; NULL if the format is unknown.
 NF4: QLoRA (arXiv:2305.14314), appendix E. FP4: a sign bit and the magnitudes
 {0, 1/192, 2/3, 1, 1/3, 1/2, 1/6, 1/4}, as in bitsandbytes. MXFP4 and NVFP4: E2M1, a
 sign bit and the magnitudes {0, 1/2, 1, 3/2, 2, 3, 4, 6}.*/
    pub fn nf4_codebook(format: nf4_format) -> *const f32;
    /** The 256 floats, ascending, to which bitsandbytes quantizes scales: its signed dynamic map
 (create_dynamic_map).*/
    pub fn nf4_scale_code() -> *const f32;
    /** Fills *sizes from the format, blocksizes, rows and cols of *tensor; its pointers
 are not read. The nested_blocks of NVFP4 are the number of its global scales.*/
    pub fn nf4_tensor_sizes(
        tensor: *const nf4_tensor,
        sizes: *mut nf4_sizes,
    ) -> nf4_status;
    /** The bytes of workspace that nf4_quantize_launch and nf4_quantize_cpu need for
 *tensor; 0 unless nested. The pointers of *tensor are not read.*/
    pub fn nf4_quantize_workspace_size(
        tensor: *const nf4_tensor,
        bytes: *mut usize,
    ) -> nf4_status;
    /** Writes the weight to out[rows * cols] in out_dtype. `out` must not overlap any part of
 the weight. A tensor without elements is valid, also with NULL pointers: nothing is read
 or written.

 INVALID_ARGUMENT: weight or a needed pointer is NULL; struct_size, format,
 blocksize, nested_blocksize, scale_rule, rows, cols or out_dtype is out of range;
 some but not all nested pointers are NULL, or they contradict format or nested_blocksize;
 cols of MXFP4 or NVFP4 is not a multiple of blocksize, or its codebook is not NULL; a
 pointer is misaligned for its type; out overlaps an input; a pointer is host memory
 that the GPU cannot reach; the pointers belong to different devices, or the stream
 belongs to another device (during capture neither this nor host memory is detected).*/
    pub fn nf4_dequant_launch(
        weight: *const nf4_tensor,
        out: *mut ::core::ffi::c_void,
        out_dtype: nf4_dtype,
        stream: nf4_stream,
    ) -> nf4_status;
    /** The same on host memory. threads is the most threads to use, >= 1. 0 means one for each
 processor that the process may run on, or fewer if its container has a quota of processor
 time (cgroup); the quota is read at the first such call.*/
    pub fn nf4_dequant_cpu(
        weight: *const nf4_tensor,
        out: *mut ::core::ffi::c_void,
        out_dtype: nf4_dtype,
        threads: i32,
    ) -> nf4_status;
    /** Quantizes in[rows * cols] into the buffers of *weight (and reads its
 nested_code and codebook, and in NVFP4 its nested_absmax). The result is deterministic, and
 the GPU and the CPU write the same bytes:
   absmax   the largest finite |x| of the block.
   code     the codebook entry nearest to v = RN(x * RN(1 / max(absmax, 2^-126))):
            between two neighbours a < b, b if v > RN((a + b) / 2), else a. Among
            equal entries the lowest code is used; a NaN entry never is. A codebook of
            your own should span [-1, 1]. A NaN x gets the code nearest to 0; +Inf
            and -Inf get the codes nearest to +1 and -1. An element that is not finite
            never affects another one.
   nested   offset = the sum of the block scales over nb, both in binary64, then
            rounded to binary32; the sum is taken over the complete binary tree of
            the scales. Then RN(scale - offset) are quantized to nested_code, which
            must be strictly ascending, in blocks of nested_blocksize by the same
            rule.

 MXFP4 and NVFP4, where a is the largest finite |x| of the block:
   absmax   MXFP4: the power of two that scale_rule says, at least 2^-127.
            NVFP4: the E4M3 number nearest to RN(RN(a / 6) * global) if the global scale
            divides, else to RN(a / RN(6 * global)); a tie goes to the even number, and a
            value above 448 becomes 448. If the result is 0, it is replaced by 2^-3 if the
            global scale divides, else by 1.
   code     the codebook entry nearest to RN(x / scale); a tie goes to the even code, and a
            magnitude above 6 becomes 6. A NaN x and -0 get code 0.
 The bytes are those of compressed-tensors, whose rules are NF4_SCALE_EVEN and, with 2688
 over the largest |x| of the weight as the global scale, NF4_GLOBAL_DIVISOR.

 workspace: at least nf4_quantize_workspace_size() bytes, 16-byte aligned, in the
 same memory as the other buffers; may be NULL if that size is 0.

 INVALID_ARGUMENT: the cases of nf4_dequant_launch; the workspace is NULL, misaligned
 or too small; any two of in, workspace and the outputs overlap.*/
    pub fn nf4_quantize_launch(
        in_: *const ::core::ffi::c_void,
        in_dtype: nf4_dtype,
        weight: *const nf4_tensor,
        workspace: *mut ::core::ffi::c_void,
        workspace_bytes: usize,
        stream: nf4_stream,
    ) -> nf4_status;
    /// The same on host memory; threads as in nf4_dequant_cpu.
    pub fn nf4_quantize_cpu(
        in_: *const ::core::ffi::c_void,
        in_dtype: nf4_dtype,
        weight: *const nf4_tensor,
        workspace: *mut ::core::ffi::c_void,
        workspace_bytes: usize,
        threads: i32,
    ) -> nf4_status;
    /** The bytes of workspace that nf4_matmul_launch needs; often 0. They depend on the
 weight's shape and blocksize, m, dtype and the lora's rank, not on the GPU. They do not
 decrease as m increases: the size for the largest m is enough for all. The only pointer in
 the structs that is followed is lora.*/
    pub fn nf4_matmul_workspace_size(
        weight: *const nf4_tensor,
        args: *const nf4_matmul_args,
        bytes: *mut usize,
    ) -> nf4_status;
    /** Each element of y is the sum of the products x * (codebook entry * scale) and the
 bias, summed in binary32 and rounded once. The order of the sum is unspecified, so
 bits differ between the GPU and the CPU, and between machines, shapes and versions, but
 not from call to call. An x that is not finite affects only its own row of y. Memory
 between the rows of y is not written. If y is empty, nothing is read or written,
 and pointers may be NULL. If cols is 0, y is the bias or 0, and no other pointer is
 read.

 With a lora, y = x W^T + bias + scale p B^T, where p is x A^T, summed in binary32 and
 rounded to dtype. On a GPU in 16 bits, y is not computed from p, but from scale times the
 binary32 sum, rounded once to dtype. All terms of y belong to one sum, which is rounded
 once. If the weight has no elements, the lora's matrices are not read and its product is
 not written.

 Further differences from exact arithmetic:
   rounding    u is the largest relative error of a rounding to the dtype: 2^-8 in bf16 and
               2^-11 in fp16. Rounding y changes it by up to u |y|. In 16 bits the entries, or
               the entries times the scale, may first be rounded to the dtype. If the scaled
               entries are, an entry may be off by up to u / 6 before it is scaled. Each product
               x * (entry * scale) is thus off by up to 7/6 u of itself and, in fp16, by up to
               2^-24 |x| (1 + |scale| times the largest entry) more, because small numbers
               are subnormal. Roundings of the sum in binary32 are additional. If the scaled
               entries are rounded, the errors are those of a dense weight of that dtype.
               They have a nonzero mean in each block; if a row of x has a nonzero mean too,
               they add up, and they add up more the larger the blocks are.
   overflow    x may be multiplied by the entries (in 16 bits, and in fp32 on a GPU, by
               up to twice the entries) and summed before the scale is applied: a sum
               that exceeds binary32 is infinite, even if the scale would bring it back,
               as 1e-3 does with 2e38 + 2e38. With a lora, a p that exceeds the dtype is
               infinite, even if B would bring it back. So is a scale * p that exceeds the
               dtype (on a GPU in 16 bits) or binary32 (elsewhere). y is then infinite
               or NaN. In fp16 on a GPU, the contribution of a block whose scale is more
               than 8e37 may be NaN.
   scales      in fp16 on a GPU, a scale of MXFP4 below 2^-22 may be taken as 0. A global
               scale may multiply the sum of x times the entries and the other scales,
               which may overflow as above.
   fp32        on a GPU, an x is represented to within 2^-23 of itself or 2^-40 of the
               largest of 256 neighbours, whichever is more; an entry likewise, where the
               largest is that of the codebook. A result that is infinite because of an
               infinite x or entry may be NaN.
   subnormals  bf16 with AVX512-BF16 instructions flushes numbers, products and sums
               below 2^-126 to 0.

 workspace: at least nf4_matmul_workspace_size() bytes, 16-byte aligned, in the same
 memory as the other operands; may be NULL if that size is 0. Its contents do not matter,
 and calls on one stream may share it. Calls that may run at the same time must not share
 it: y is then undefined, and they may never end.

 INVALID_ARGUMENT: the cases of nf4_dequant_launch; the struct_size, dtype, reserved, m or
 a stride of *args is out of range; dtype is fp32 in nf4_matmul_launch and m is more than
 16; m times a stride is more than 2^60; the workspace is NULL, misaligned or too small;
 y (from its first to its last element), the lora's product or the workspace overlaps
 anything else; struct_size, dtype, rank, scale, reserved or a stride of the lora is out of
 range; there is a lora and m, rows or cols is more than 2^53.*/
    pub fn nf4_matmul_launch(
        weight: *const nf4_tensor,
        args: *const nf4_matmul_args,
        workspace: *mut ::core::ffi::c_void,
        workspace_bytes: usize,
        stream: nf4_stream,
    ) -> nf4_status;
    /** The same on host memory, without workspace; threads as in nf4_dequant_cpu. The number of
 threads changes no bit of the result.*/
    pub fn nf4_matmul_cpu(
        weight: *const nf4_tensor,
        args: *const nf4_matmul_args,
        threads: i32,
    ) -> nf4_status;
    /** The gradient of y = x W^T with respect to x: dx = dy W, for dy [m, rows] and dx [m, cols].
 args->x is dy, and x_stride is at least rows; args->y is dx, and y_stride is at least cols;
 bias is NULL. With a lora, dx = dy W + scale p A, and p = dy B. Everything else is as in the
 functions above with rows and cols exchanged: dx is empty if m or cols is 0, and 0 if rows
 is 0. In 16 bits the entries times the scale may be rounded to the dtype; before that they may
 be off by up to 3/8 u, and each product thus by up to 11/8 u of itself. fp32 may have any m.

 INVALID_ARGUMENT: the cases of those functions; bias is not NULL.*/
    pub fn nf4_matmul_grad_workspace_size(
        weight: *const nf4_tensor,
        args: *const nf4_matmul_args,
        bytes: *mut usize,
    ) -> nf4_status;
    pub fn nf4_matmul_grad_launch(
        weight: *const nf4_tensor,
        args: *const nf4_matmul_args,
        workspace: *mut ::core::ffi::c_void,
        workspace_bytes: usize,
        stream: nf4_stream,
    ) -> nf4_status;
    pub fn nf4_matmul_grad_cpu(
        weight: *const nf4_tensor,
        args: *const nf4_matmul_args,
        threads: i32,
    ) -> nf4_status;
    /** Each element is summed and multiplied by the scale in binary32, then rounded to grad_dtype. The
 order of the sum is unspecified, so bits differ between the GPU and the CPU, and between
 machines, shapes and versions, but not from call to call. An element of x or dy that is not
 finite affects only its own column, and an element of p or q only its own rank. Memory between
 the rows of da and db is not written. If m is 0, da and db are 0 (with the sign of the scale),
 and no other pointer is read. A gradient without elements (cols or rows is 0) is treated as one
 that is not wanted: the strides and pointers that it alone needs are not checked.

 INVALID_ARGUMENT: args is NULL; the struct_size, a dtype, the rank, the scale, m, rows, cols or
 a stride is out of range; a stride, or the rank of p and q, times the number of rows of its
 matrix is more than 2^60; a needed pointer is NULL or misaligned; da or db, from its first to
 its last element, overlaps the other or an input; memory or the stream is of the wrong device,
 as for nf4_dequant_launch.*/
    pub fn nf4_lora_grad_launch(
        args: *const nf4_lora_grad_args,
        stream: nf4_stream,
    ) -> nf4_status;
    /** The same on host memory; threads as in nf4_dequant_cpu. The number of threads changes no bit of
 the result.*/
    pub fn nf4_lora_grad_cpu(
        args: *const nf4_lora_grad_args,
        threads: i32,
    ) -> nf4_status;
    /** The bytes of workspace that nf4_matmul_batch_launch needs: the largest size that one of
 the products needs. They do not decrease as the m of any product increases.*/
    pub fn nf4_matmul_batch_workspace_size(
        weights: *const *const nf4_tensor,
        args: *const nf4_matmul_args,
        count: usize,
        bytes: *mut usize,
    ) -> nf4_status;
    /** Products with few rows of x may share a kernel launch, which saves the fixed cost of
 separate launches; the other products are launched one by one. The order of launches is
 unspecified.*/
    pub fn nf4_matmul_batch_launch(
        weights: *const *const nf4_tensor,
        args: *const nf4_matmul_args,
        count: usize,
        workspace: *mut ::core::ffi::c_void,
        workspace_bytes: usize,
        stream: nf4_stream,
    ) -> nf4_status;
    /// The same on host memory, without workspace; the threads share the rows of all weights.
    pub fn nf4_matmul_batch_cpu(
        weights: *const *const nf4_tensor,
        args: *const nf4_matmul_args,
        count: usize,
        threads: i32,
    ) -> nf4_status;
    /** Reports which kernels nf4_matmul_batch_launch would run on GPU `device`, for tests,
 benchmarks and profiles. launches[i] gets the number of product i's kernel launch, counted
 from 0, or -1 if it needs none; products may share a launch. kernels[i] gets the kernel's
 name, such as "skinny_8", or NULL. The strings are static. Choices and names differ between
 versions.

 The only pointers of the products that are followed are their loras. The answer depends on
 the alignment of packed, the scales of the weight, x, and the a and b of a lora, and on
 whether codebook is NULL. The function may load kernels; nf4_device_info loads them all.

 INVALID_ARGUMENT: the cases of nf4_matmul_batch_launch, except those of the products'
 pointers; launches or kernels is NULL; device is out of range. NO_CUDA, NO_DEVICE,
 UNSUPPORTED_DEVICE, CUDA_ERROR: as for nf4_device_info.*/
    pub fn nf4_matmul_plan(
        weights: *const *const nf4_tensor,
        args: *const nf4_matmul_args,
        count: usize,
        device: i32,
        launches: *mut i32,
        kernels: *mut *const ::core::ffi::c_char,
    ) -> nf4_status;
    /** The bytes of workspace that nf4_matmul_grouped_launch needs. They are 0 if x_index is NULL.
 Otherwise they depend on the weight's shape and blocksize, experts, m and dtype, and do not
 decrease as m increases. No pointer in the structs is followed; only whether x_index is NULL
 matters.*/
    pub fn nf4_matmul_grouped_workspace_size(
        weight: *const nf4_tensor,
        args: *const nf4_grouped_args,
        bytes: *mut usize,
    ) -> nf4_status;
    /** Sums, rounding, workspace and streams are as in nf4_matmul_launch, and so is an empty y. If
 experts is 0, no row of y belongs to an expert: again nothing is read or written, and
 pointers may be NULL. If K is 0, x is not read. row_scale multiplies the sum in binary32
 before it is rounded to dtype.

 INVALID_ARGUMENT: the cases of nf4_matmul_launch; experts, m or x_rows is out of range;
 experts does not divide rows; there are several experts and N * K is not a multiple of
 blocksize; dtype is fp32 in nf4_matmul_grouped_launch.*/
    pub fn nf4_matmul_grouped_launch(
        weight: *const nf4_tensor,
        args: *const nf4_grouped_args,
        workspace: *mut ::core::ffi::c_void,
        workspace_bytes: usize,
        stream: nf4_stream,
    ) -> nf4_status;
    /** The same on host memory, without workspace; threads as in nf4_dequant_cpu. The number of
 threads changes no bit of the result.*/
    pub fn nf4_matmul_grouped_cpu(
        weight: *const nf4_tensor,
        args: *const nf4_grouped_args,
        threads: i32,
    ) -> nf4_status;
    /** The gradient with respect to the rows of x from which the experts' rows of y were computed:
   dx[i, k] = row_scale[i] * the sum over n of dy[x_index[i], n] * W[e * N + n, k],
 for the expert e of row i, dy [x_rows, N] and dx [m, K]. args->x is dy, and x_stride is at
 least N; args->y is dx, and y_stride is at least K; bias is NULL. x_index holds rows of dy; it
 is NULL if dy is in the order of y. It is not the x_index of the forward product: dx has a row
 for each row of y, which the caller adds to row x_index[i] of the gradient of x. Everything
 else is as in the functions above with N and K exchanged: dx is empty if m or K is 0, and 0
 if N is 0. Weights times their scales may be rounded to the dtype, as dequantize does.

 INVALID_ARGUMENT: the cases of those functions; bias is not NULL.*/
    pub fn nf4_matmul_grouped_grad_workspace_size(
        weight: *const nf4_tensor,
        args: *const nf4_grouped_args,
        bytes: *mut usize,
    ) -> nf4_status;
    pub fn nf4_matmul_grouped_grad_launch(
        weight: *const nf4_tensor,
        args: *const nf4_grouped_args,
        workspace: *mut ::core::ffi::c_void,
        workspace_bytes: usize,
        stream: nf4_stream,
    ) -> nf4_status;
    pub fn nf4_matmul_grouped_grad_cpu(
        weight: *const nf4_tensor,
        args: *const nf4_grouped_args,
        threads: i32,
    ) -> nf4_status;
    /** Fills *sizes from the layout, group_size, rows and cols of *tensor; its pointers are not
 read.*/
    pub fn nf4_int4_tensor_sizes(
        tensor: *const nf4_int4_tensor,
        sizes: *mut nf4_int4_sizes,
    ) -> nf4_status;
    /** Like nf4_dequant_launch and nf4_dequant_cpu.

 INVALID_ARGUMENT: the cases of those functions; layout, scales_dtype, group_size or zero_offset
 is out of range; group_size does not divide cols; rows or cols is not a multiple of 8 where the
 layout needs it.*/
    pub fn nf4_int4_dequant_launch(
        weight: *const nf4_int4_tensor,
        out: *mut ::core::ffi::c_void,
        out_dtype: nf4_dtype,
        stream: nf4_stream,
    ) -> nf4_status;
    pub fn nf4_int4_dequant_cpu(
        weight: *const nf4_int4_tensor,
        out: *mut ::core::ffi::c_void,
        out_dtype: nf4_dtype,
        threads: i32,
    ) -> nf4_status;
    /** Quantizes in[rows * cols] into packed, scales and zeros of *weight by rounding to nearest. The
 result is deterministic, and the GPU and the CPU write the same bytes. For each group,
 with the extremes of its finite elements (0 if there is none), in binary32 except for s:
   symmetric    s = 2 max|x| / 15, z = 8 (written to zeros, if that is not NULL)
   asymmetric   lo = min(x, 0), hi = max(x, 0), s = (hi - lo) / 15,
                z = clamp(rint(-lo / s), 0, 15); zeros is needed
   q            clamp(rint(x / s) + z, 0, 15)
 s is first rounded to scales_dtype. If it becomes 0, it is replaced by the smallest positive
 number of that dtype; if it becomes infinite, by the largest finite number. rint rounds halves
 to even. A NaN x gets q = z; an infinite x gets the q nearest to it. g_idx and permutation must
 be NULL.

 INVALID_ARGUMENT: the cases of nf4_int4_dequant_launch; symmetric is not 0 or 1; zeros is NULL
 and symmetric is 0; g_idx or permutation is not NULL; in or a part overlaps another part.*/
    pub fn nf4_int4_quantize_launch(
        in_: *const ::core::ffi::c_void,
        in_dtype: nf4_dtype,
        weight: *const nf4_int4_tensor,
        symmetric: i32,
        stream: nf4_stream,
    ) -> nf4_status;
    pub fn nf4_int4_quantize_cpu(
        in_: *const ::core::ffi::c_void,
        in_dtype: nf4_dtype,
        weight: *const nf4_int4_tensor,
        symmetric: i32,
        threads: i32,
    ) -> nf4_status;
    /** Sorts the columns of a weight with g_idx by their group, once, so that matmul reads whole
 groups. It writes packed and permutation of *to. The scales and zeros of *to are those of *from
 (the same pointers, or equal bytes). All other fields of *to are the same, except g_idx, which
 is NULL. Columns of one group keep their order. Each group must have group_size columns;
 otherwise *to is a different weight. cols is at most 2^31 - 1. If a weight has no elements,
 only its shape is checked.

 INVALID_ARGUMENT: the cases of nf4_int4_dequant_launch, for *from and for *to; g_idx of *from
 is NULL or its permutation is not; g_idx of *to is not NULL or its permutation is; another
 field differs; packed or permutation of *to overlaps a part of *from.*/
    pub fn nf4_int4_reorder_launch(
        from: *const nf4_int4_tensor,
        to: *const nf4_int4_tensor,
        stream: nf4_stream,
    ) -> nf4_status;
    pub fn nf4_int4_reorder_cpu(
        from: *const nf4_int4_tensor,
        to: *const nf4_int4_tensor,
        threads: i32,
    ) -> nf4_status;
    /** Like the functions without "int4", with the same x, y and bias; group_size takes the place of
 blocksize. With g_idx the GPU reads a scale for each element; nf4_int4_reorder_launch avoids
 that. args->lora is NULL. Workspace sizes and the choice of a kernel also depend on whether
 zeros, g_idx and permutation are NULL; the choice also depends on the alignment of scales. On a
 GPU dtype is not fp32. Differences from exact arithmetic, in addition to those of
 nf4_matmul_launch:
   rounding    the weights s * (q - z) may be rounded to x's dtype, as dequantize does. In
               fp16, a bf16 scale may first be rounded to fp16: a scale that is subnormal in
               fp16 loses bits, and a scale beyond 65504 becomes infinite.
   sums        the sum of x times q may be formed first, and z times the sum of the group's x
               subtracted; their terms are up to 143 times x. A sum that exceeds binary32 or
               has an infinite x is infinite or NaN, and its rounding is relative to
               143 |x|.*/
    pub fn nf4_int4_matmul_workspace_size(
        weight: *const nf4_int4_tensor,
        args: *const nf4_matmul_args,
        bytes: *mut usize,
    ) -> nf4_status;
    pub fn nf4_int4_matmul_launch(
        weight: *const nf4_int4_tensor,
        args: *const nf4_matmul_args,
        workspace: *mut ::core::ffi::c_void,
        workspace_bytes: usize,
        stream: nf4_stream,
    ) -> nf4_status;
    pub fn nf4_int4_matmul_cpu(
        weight: *const nf4_int4_tensor,
        args: *const nf4_matmul_args,
        threads: i32,
    ) -> nf4_status;
    pub fn nf4_int4_matmul_batch_workspace_size(
        weights: *const *const nf4_int4_tensor,
        args: *const nf4_matmul_args,
        count: usize,
        bytes: *mut usize,
    ) -> nf4_status;
    pub fn nf4_int4_matmul_batch_launch(
        weights: *const *const nf4_int4_tensor,
        args: *const nf4_matmul_args,
        count: usize,
        workspace: *mut ::core::ffi::c_void,
        workspace_bytes: usize,
        stream: nf4_stream,
    ) -> nf4_status;
    pub fn nf4_int4_matmul_batch_cpu(
        weights: *const *const nf4_int4_tensor,
        args: *const nf4_matmul_args,
        count: usize,
        threads: i32,
    ) -> nf4_status;
    pub fn nf4_int4_matmul_plan(
        weights: *const *const nf4_int4_tensor,
        args: *const nf4_matmul_args,
        count: usize,
        device: i32,
        launches: *mut i32,
        kernels: *mut *const ::core::ffi::c_char,
    ) -> nf4_status;
    /** The experts are weights of one shape and layout. `weight` is the weight of expert 0, with N rows
 and K columns. In memory, each of its parts (packed, scales, zeros, g_idx and permutation) is
 followed by the same part of the other experts, as if it had a first dimension of E: packed of
 expert e begins e times the packed_bytes of nf4_int4_tensor_sizes after packed of expert 0, and
 so on. Everything else is as in the functions without "int4" and in nf4_int4_matmul_launch. On a
 GPU g_idx and permutation are NULL.

 INVALID_ARGUMENT: the cases of those functions; E * N * K is more than 2^60; g_idx or
 permutation is not NULL in nf4_int4_matmul_grouped_launch.*/
    pub fn nf4_int4_matmul_grouped_workspace_size(
        weight: *const nf4_int4_tensor,
        args: *const nf4_grouped_args,
        bytes: *mut usize,
    ) -> nf4_status;
    pub fn nf4_int4_matmul_grouped_launch(
        weight: *const nf4_int4_tensor,
        args: *const nf4_grouped_args,
        workspace: *mut ::core::ffi::c_void,
        workspace_bytes: usize,
        stream: nf4_stream,
    ) -> nf4_status;
    pub fn nf4_int4_matmul_grouped_cpu(
        weight: *const nf4_int4_tensor,
        args: *const nf4_grouped_args,
        threads: i32,
    ) -> nf4_status;
    /** device is the index of a GPU or NF4_DEVICE_CPU. On success *path is one of the values above;
 for an empty product it is NF4_PATH_FUSED.

 The only pointer in the structs that is followed is the lora of args. The answer depends on the
 alignment of packed, the scales of the weight, x, and the a and b of a lora, and on whether
 codebook, zeros, g_idx, permutation, bias and x_index are NULL. The functions may load kernels,
 as nf4_device_info does.

 INVALID_ARGUMENT: the cases of the workspace_size function of the product; path is NULL; device
 is out of range. NO_CUDA, NO_DEVICE, UNSUPPORTED_DEVICE, CUDA_ERROR: as for nf4_device_info.*/
    pub fn nf4_matmul_path(
        weight: *const nf4_tensor,
        args: *const nf4_matmul_args,
        device: i32,
        path: *mut nf4_path,
    ) -> nf4_status;
    pub fn nf4_matmul_grad_path(
        weight: *const nf4_tensor,
        args: *const nf4_matmul_args,
        device: i32,
        path: *mut nf4_path,
    ) -> nf4_status;
    pub fn nf4_int4_matmul_path(
        weight: *const nf4_int4_tensor,
        args: *const nf4_matmul_args,
        device: i32,
        path: *mut nf4_path,
    ) -> nf4_status;
    /// The dense way of experts dequantizes all of them.
    pub fn nf4_matmul_grouped_path(
        weight: *const nf4_tensor,
        args: *const nf4_grouped_args,
        device: i32,
        path: *mut nf4_path,
    ) -> nf4_status;
    pub fn nf4_matmul_grouped_grad_path(
        weight: *const nf4_tensor,
        args: *const nf4_grouped_args,
        device: i32,
        path: *mut nf4_path,
    ) -> nf4_status;
    pub fn nf4_int4_matmul_grouped_path(
        weight: *const nf4_int4_tensor,
        args: *const nf4_grouped_args,
        device: i32,
        path: *mut nf4_path,
    ) -> nf4_status;
    /** The dense way of an adapter's gradients is two matrix products of the caller. The only pointers
 that matter are da and db, which are NULL for a gradient that is not wanted.*/
    pub fn nf4_lora_grad_path(
        args: *const nf4_lora_grad_args,
        device: i32,
        path: *mut nf4_path,
    ) -> nf4_status;
    /** Sets how long the kernels take on the caller's own GPUs, as `nf4 tune` of the Python package
 measures it. If the costs have figures for a product, they replace the library's rules: they
 decide what nf4_*matmul_path and nf4_matmul_grad_path answer, and which kernel computes the
 product. They change no promise about results, but another kernel may sum in another order: on
 one machine, the result of a product is determined by its operands, the version of the library
 and the costs. Workspace sizes do not depend on costs.

 text has `bytes` bytes, and is not kept. Each line ends with a newline. The first is
 "nf4-costs 1 " and the version of the library, and the last is "end". Between them are up to 8
 GPUs, each followed by its rows, up to 4096 rows in all:
   gpu <compute capability> <kernels> <multiprocessors> <shared memory> <driver> <name>
   <product> <dtype> <strategy> <rows of x> <start> <weights> <rows> <columns>
 A GPU has the values of nf4_device: compute_capability, dequant_variant, multiprocessors,
 shared_memory_bytes, driver_version, name. Its rows apply to GPUs with the same values. A product
 is codebook, codebook_lora, gradient, gradient_lora, gptq, awq or compressed_tensors, a dtype
 fp16 or bf16, and a strategy mma, skinny, wgmma, multistage or dense. The rows of a GPU are
 sorted by product, dtype and strategy in these orders, and then by the rows of x, which ascend
 from at least 1. A row says that a product of an N x K weight takes
   start + weights * N * K / 10^6 + rows * N / 10^3 + columns * K / 10^3
 microseconds; the four numbers are decimal fractions such as 0.25, without sign or exponent.
 Between two rows the time is linear in the number of rows of x. Beyond the last row it grows in
 proportion to that number, and below the first row the time of the strategy is not known.

 Costs replace all costs that were set before; text NULL removes those. Every build accepts costs.
 Costs of GPUs that are not in the machine have no effect. A call that runs at the same time in
 another thread uses the old costs or the new ones.

 INVALID_ARGUMENT: anything else in text, including costs of another version of the library; the
 costs that were set before remain.*/
    pub fn nf4_set_costs(text: *const ::core::ffi::c_char, bytes: usize) -> nf4_status;
    /** Checks whether this library can use GPU `device`. Returns OK if it can; otherwise NO_CUDA,
 NO_DEVICE, UNSUPPORTED_DEVICE, CUDA_ERROR, or INVALID_ARGUMENT for an index out of range, with
 the reason in nf4_last_error(). *info always gets what is known. The function initialises CUDA
 and loads the kernels for the device, which may take long, so that later launches need not do
 so.*/
    pub fn nf4_device_info(device: i32, info: *mut nf4_device) -> nf4_status;
    /** The CPU kernels that this machine runs: "avx512bf16", "avx512", "avx2", "neonbf16", "neon" or
 "scalar". Later versions may have others.*/
    pub fn nf4_cpu_variant() -> *const ::core::ffi::c_char;
}
