/* libnf4: 4-bit weights on the GPU and the CPU. The formats are NormalFloat (NF4) and FP4 as
 * bitsandbytes stores them, MXFP4 and NVFP4 (E2M1 floats with scales of 8 bits), and integers as
 * GPTQ, AWQ and compressed-tensors store them.
 *
 * This header is the whole interface and its manual. It includes only <stddef.h> and
 * <stdint.h>, and compiles as C99 and as C++11.
 *
 * THE DATA
 *   A weight has rows x cols (N x K) elements in row-major order, divided into blocks of
 *   `blocksize` elements. A block may continue in the next row, and the last block may be
 *   shorter. Each element has a 4-bit code, which selects an entry of a codebook of 16
 *   floats. Its value is this entry times the scale (absmax) of its block. The bytes are
 *   those that bitsandbytes stores, for n = rows * cols elements:
 *     packed          uint8 [ceil(n / 2)]; element 2i is the HIGH nibble of byte
 *                     i, element 2i + 1 the LOW nibble; if n is odd, the last low
 *                     nibble is unused (quantize writes 0 there).
 *     absmax          flat: float [nb], nb = ceil(n / blocksize).
 *                     nested (double quantization): uint8 [nb], which select entries
 *                     of nested_code.
 *     nested_absmax   float [ceil(nb / nested_blocksize)]
 *     nested_code     float [256], ascending; bitsandbytes' is nf4_scale_code()
 *     nested_offset   float [1], in the same memory as the other parts
 *
 *   MXFP4 and NVFP4 are stored as gpt-oss, compressed-tensors and ModelOpt store them. cols is a
 *   multiple of blocksize, so that a block lies inside a row:
 *     packed          uint8 [rows, cols / 2]; element 2i is the LOW nibble of byte i, element
 *                     2i + 1 the HIGH nibble
 *     absmax          uint8 [rows, cols / blocksize]: MXFP4: E8M0, 2^(b - 127), and 255 is NaN;
 *                     NVFP4: E4M3, and 0x7f and 0xff are NaN
 *     nested_absmax   NVFP4: float [ceil(rows / nested_blocksize)], the global scales. Each
 *                     belongs to nested_blocksize rows, such as those of an expert or of a part
 *                     of a fused weight; if nested_blocksize is 0, one belongs to all rows
 *
 * THE ARITHMETIC
 *   For an element of block b, with integer division:
 *   scale = absmax[b]                                  (flat)
 *   scale = RN(RN(nested_code[absmax[b]] * nested_absmax[b / nested_blocksize])
 *              + nested_offset[0])                     (nested)
 *   scale = E8M0(absmax[b])                            (MXFP4)
 *   scale = RN(E4M3(absmax[b]) * global), or RN(E4M3(absmax[b]) / global) if scale_rule is
 *           NF4_GLOBAL_DIVISOR                         (NVFP4)
 *   value = RN_dtype(RN(codebook[code] * scale))
 *   RN rounds to nearest even in IEEE 754 binary32; multiply and add are never
 *   fused. Dequantize is therefore bit-equal to bitsandbytes' CUDA kernels, signed
 *   zeros included, and to compressed-tensors (docs/formats.md names the exceptions); a
 *   NaN stays a NaN, with an unspecified payload. Scales are used
 *   unchanged, whether NaN, infinite, negative or subnormal.
 *
 * WHICH MEMORY
 *   nf4_*_launch take device pointers and enqueue work on `stream`; nf4_*_cpu take
 *   host pointers and return when the work is done. The library never keeps a
 *   pointer: the caller owns all memory and keeps it alive until the work on the
 *   stream has finished.
 *   A launch does not synchronise, print, throw or exit. It allocates nothing, except
 *   512 bytes for the text of a thread's first failure. It leaves the current device
 *   unchanged and can be captured in a CUDA graph. Workspace memory comes from the
 *   caller. CUDA itself adds two costs. The first use of a kernel in a process loads it;
 *   nf4_device_info does that in advance. If the memory belongs to a device other than
 *   the current one, a launch makes that device current for its duration, which may
 *   initialise either device.
 *   A launch waits for all earlier work on the stream. On compute capability 9.0 and
 *   later it supports programmatic dependent launch: a kernel that was itself launched
 *   with programmatic stream serialization may start early, and must wait
 *   (griddepcontrol.wait) before it touches the operands, as CUDA requires. All other
 *   kernels start after it as usual.
 *
 * ERRORS
 *   Every function that can fail returns nf4_status. If it is not NF4_STATUS_OK,
 *   nothing was enqueued and no output byte was written, with two exceptions:
 *     - Launches that enqueue several kernels leave the outputs unspecified after
 *       NF4_STATUS_CUDA_ERROR. They are nf4_quantize_launch, nf4_int4_reorder_launch,
 *       every nf4_*matmul_batch_launch, every launch with a lora, every launch of experts
 *       with x_index (nf4_*matmul_grouped*_launch), and nf4_int4_matmul_launch of a
 *       weight with a permutation.
 *     - nf4_device_info always fills in what it knows.
 *   nf4_last_error() names the argument and the value. nf4_*_cpu do not depend on memory
 *   of their own: if an allocation fails, only the text of nf4_last_error() is lost.
 *   dlclose() does not unload the library. nf4_*_launch and nf4_device_info call the CUDA
 *   runtime, which allocates host memory for each thread that first uses it; if there is
 *   none, the C library may abort the process.
 *
 * THREADS
 *   Every function may be called from any number of threads at once, on outputs
 *   that do not overlap. nf4_*_cpu use up to 192 KiB of the calling thread's stack. They
 *   start worker threads. A worker's stack has the default size, or 256 KiB if that is
 *   more. A worker has the nice value and scheduling policy of the thread whose call
 *   started it, and blocks all signals except those of faults (SIGSEGV, SIGBUS, SIGFPE,
 *   SIGILL, SIGTRAP). If the system refuses to start a worker, the other threads do its
 *   work. The library keeps one worker fewer than there are processors, and at least one.
 *   An idle worker spins for a millisecond, yielding to other threads, and then sleeps.
 *   Workers beyond that number end with their call. A child of fork() starts its own
 *   workers. If a thread is cancelled (pthread_cancel) during such a call, the cancellation
 *   takes effect after the call.
 *
 * ALIGNMENT
 *   packed of an nf4_tensor and uint8 absmax need no alignment. Everything else needs the
 *   alignment of its element type. 16-byte aligned outputs and 4-byte aligned packed are
 *   fastest.
 *
 * STABILITY
 *   Within the SONAME libnf4.so.0 nothing that worked stops working: functions and values of
 *   constants stay, struct fields are only ever appended, and struct_size tells the library
 *   which fields the caller has. A program runs on the library of its header's version and on
 *   any later one of the same major version (docs/abi.md).
 */
#ifndef NF4_NF4_H
#define NF4_NF4_H

#include <stddef.h>
#include <stdint.h>

#define NF4_VERSION_MAJOR 0
#define NF4_VERSION_MINOR 1
#define NF4_VERSION_PATCH 0

#if defined(__GNUC__)
#define NF4_API __attribute__((visibility("default")))
#else
#define NF4_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status ------------------------------------------------------------- */

typedef int32_t nf4_status;
#define NF4_STATUS_OK 0
/* An argument is wrong; nf4_last_error() names it. */
#define NF4_STATUS_INVALID_ARGUMENT 1
/* The library was built without CUDA. */
#define NF4_STATUS_NO_CUDA 2
/* No usable GPU: no driver, a driver that is too old, or no device. */
#define NF4_STATUS_NO_DEVICE 3
/* There is a GPU, but this build has no kernel for it. */
#define NF4_STATUS_UNSUPPORTED_DEVICE 4
/* The CUDA runtime returned an error, possibly from an earlier launch. The error is not
 * cleared. */
#define NF4_STATUS_CUDA_ERROR 5

/* The name of a status, such as "NF4_STATUS_OK"; never NULL. */
NF4_API const char *nf4_status_string(nf4_status status);

/* Describes the last call that failed on this thread: the argument and its value. The text
 * is empty before any failure, never NULL, and valid until the next failure on the same
 * thread. */
NF4_API const char *nf4_last_error(void);

/* ---- Version and build -------------------------------------------------- */

/* major * 10000 + minor * 100 + patch of the loaded library. */
NF4_API int32_t nf4_version(void);

/* The same as text, such as "0.1.0". */
NF4_API const char *nf4_version_string(void);

/* How the library was built, for reports: lines of "key: value" (compiler, cuda,
 * cuda_archs, cpu_variants). */
NF4_API const char *nf4_build_info(void);

/* ---- Types -------------------------------------------------------------- */

/* The 4-bit format. It selects the codebook if nf4_tensor.codebook is NULL. The values
 * are the same as in bitsandbytes' C library. */
typedef int32_t nf4_format;
#define NF4_FORMAT_FP4 1
#define NF4_FORMAT_NF4 2
#define NF4_FORMAT_MXFP4 3
#define NF4_FORMAT_NVFP4 4

/* nf4_tensor.scale_rule of MXFP4: the power of two that quantize chooses for a block whose largest
 * magnitude is a, where m is floor(log2(a)). */
#define NF4_SCALE_FLOOR 0 /* 2^(m - 2) */
#define NF4_SCALE_EVEN 1  /* 2^(m - 2), or 2^(m - 1) from 1.75 * 2^m on */
#define NF4_SCALE_CEIL 2  /* the least power of two that is not below a / 6 */
/* nf4_tensor.scale_rule of NVFP4: what the global scale does to the scale of a block. */
#define NF4_GLOBAL_FACTOR 0  /* multiplies it, as in ModelOpt */
#define NF4_GLOBAL_DIVISOR 1 /* divides it, as in compressed-tensors */

/* Element types of dense data. */
typedef int32_t nf4_dtype;
#define NF4_DTYPE_FP32 1
#define NF4_DTYPE_FP16 2
#define NF4_DTYPE_BF16 3

/* cudaStream_t (and CUstream) without their headers. The stream belongs to the device that
 * has the memory. NULL is the legacy default stream of that device, or of the current device
 * if all memory is managed memory or host memory. */
typedef struct CUstream_st *nf4_stream;

/* A quantized weight. It borrows all pointers and owns nothing. Dequantize and
 * matmul read packed, absmax, nested_absmax and nested_offset; quantize writes them, except the
 * nested_absmax of NVFP4. */
typedef struct nf4_tensor {
  size_t struct_size;       /* sizeof(nf4_tensor) */
  nf4_format format;
  int32_t blocksize;        /* elements: a power of two, 32..4096; MXFP4: 32; NVFP4: 16 or 32 */
  int32_t nested_blocksize; /* scales: a power of two, 1..2^30; 0 means flat. MXFP4: 0. NVFP4: the
                               rows that share a global scale, >= 0; 0 means all */
  int32_t scale_rule;       /* MXFP4 and NVFP4: see above; otherwise 0 */
  int64_t rows;             /* >= 0; rows * cols <= 2^60 */
  int64_t cols;             /* >= 0 */
  void *packed;
  void *absmax;             /* float if flat; uint8_t if nested, and in MXFP4 and NVFP4 */
  float *nested_absmax;     /* this and the next two: NULL if and only if flat or MXFP4; NVFP4 has
                               this one alone */
  const float *nested_code;
  float *nested_offset;
  const float *codebook;    /* 16 floats that replace the format's, or NULL; MXFP4 and NVFP4:
                               NULL */
} nf4_tensor;

/* Sizes of the parts of a tensor. */
typedef struct nf4_sizes {
  size_t struct_size;       /* sizeof(nf4_sizes), set by the caller */
  int64_t elements;         /* rows * cols */
  int64_t blocks;           /* elements of absmax */
  int64_t nested_blocks;    /* elements of nested_absmax; 0 if flat or MXFP4 */
  int64_t packed_bytes;
  int64_t absmax_bytes;
} nf4_sizes;

/* ---- Tables (host memory, static, never NULL for a known format) --------- */

/* The 16 floats of a format, indexed by code; NULL if the format is unknown.
 * NF4: QLoRA (arXiv:2305.14314), appendix E. FP4: a sign bit and the magnitudes
 * {0, 1/192, 2/3, 1, 1/3, 1/2, 1/6, 1/4}, as in bitsandbytes. MXFP4 and NVFP4: E2M1, a
 * sign bit and the magnitudes {0, 1/2, 1, 3/2, 2, 3, 4, 6}. */
NF4_API const float *nf4_codebook(nf4_format format);

/* The 256 floats, ascending, to which bitsandbytes quantizes scales: its signed dynamic map
 * (create_dynamic_map). */
NF4_API const float *nf4_scale_code(void);

/* ---- Sizes --------------------------------------------------------------- */

/* Fills *sizes from the format, blocksizes, rows and cols of *tensor; its pointers
 * are not read. The nested_blocks of NVFP4 are the number of its global scales. */
NF4_API nf4_status nf4_tensor_sizes(const nf4_tensor *tensor, nf4_sizes *sizes);

/* The bytes of workspace that nf4_quantize_launch and nf4_quantize_cpu need for
 * *tensor; 0 unless nested. The pointers of *tensor are not read. */
NF4_API nf4_status nf4_quantize_workspace_size(const nf4_tensor *tensor, size_t *bytes);

/* ---- Dequantize ---------------------------------------------------------- */

/* Writes the weight to out[rows * cols] in out_dtype. `out` must not overlap any part of
 * the weight. A tensor without elements is valid, also with NULL pointers: nothing is read
 * or written.
 *
 * INVALID_ARGUMENT: weight or a needed pointer is NULL; struct_size, format,
 * blocksize, nested_blocksize, scale_rule, rows, cols or out_dtype is out of range;
 * some but not all nested pointers are NULL, or they contradict format or nested_blocksize;
 * cols of MXFP4 or NVFP4 is not a multiple of blocksize, or its codebook is not NULL; a
 * pointer is misaligned for its type; out overlaps an input; a pointer is host memory
 * that the GPU cannot reach; the pointers belong to different devices, or the stream
 * belongs to another device (during capture neither this nor host memory is detected). */
NF4_API nf4_status nf4_dequant_launch(const nf4_tensor *weight, void *out, nf4_dtype out_dtype,
                                      nf4_stream stream);

/* The same on host memory. threads is the most threads to use, >= 1. 0 means one for each
 * processor that the process may run on, or fewer if its container has a quota of processor
 * time (cgroup); the quota is read at the first such call. */
NF4_API nf4_status nf4_dequant_cpu(const nf4_tensor *weight, void *out, nf4_dtype out_dtype,
                                   int32_t threads);

/* ---- Quantize ------------------------------------------------------------ */

/* Quantizes in[rows * cols] into the buffers of *weight (and reads its
 * nested_code and codebook, and in NVFP4 its nested_absmax). The result is deterministic, and
 * the GPU and the CPU write the same bytes:
 *   absmax   the largest finite |x| of the block.
 *   code     the codebook entry nearest to v = RN(x * RN(1 / max(absmax, 2^-126))):
 *            between two neighbours a < b, b if v > RN((a + b) / 2), else a. Among
 *            equal entries the lowest code is used; a NaN entry never is. A codebook of
 *            your own should span [-1, 1]. A NaN x gets the code nearest to 0; +Inf
 *            and -Inf get the codes nearest to +1 and -1. An element that is not finite
 *            never affects another one.
 *   nested   offset = the sum of the block scales over nb, both in binary64, then
 *            rounded to binary32; the sum is taken over the complete binary tree of
 *            the scales. Then RN(scale - offset) are quantized to nested_code, which
 *            must be strictly ascending, in blocks of nested_blocksize by the same
 *            rule.
 *
 * MXFP4 and NVFP4, where a is the largest finite |x| of the block:
 *   absmax   MXFP4: the power of two that scale_rule says, at least 2^-127.
 *            NVFP4: the E4M3 number nearest to RN(RN(a / 6) * global) if the global scale
 *            divides, else to RN(a / RN(6 * global)); a tie goes to the even number, and a
 *            value above 448 becomes 448. If the result is 0, it is replaced by 2^-3 if the
 *            global scale divides, else by 1.
 *   code     the codebook entry nearest to RN(x / scale); a tie goes to the even code, and a
 *            magnitude above 6 becomes 6. A NaN x and -0 get code 0.
 * The bytes are those of compressed-tensors, whose rules are NF4_SCALE_EVEN and, with 2688
 * over the largest |x| of the weight as the global scale, NF4_GLOBAL_DIVISOR.
 *
 * workspace: at least nf4_quantize_workspace_size() bytes, 16-byte aligned, in the
 * same memory as the other buffers; may be NULL if that size is 0.
 *
 * INVALID_ARGUMENT: the cases of nf4_dequant_launch; the workspace is NULL, misaligned
 * or too small; any two of in, workspace and the outputs overlap. */
NF4_API nf4_status nf4_quantize_launch(const void *in, nf4_dtype in_dtype, const nf4_tensor *weight,
                                       void *workspace, size_t workspace_bytes, nf4_stream stream);

/* The same on host memory; threads as in nf4_dequant_cpu. */
NF4_API nf4_status nf4_quantize_cpu(const void *in, nf4_dtype in_dtype, const nf4_tensor *weight,
                                    void *workspace, size_t workspace_bytes, int32_t threads);

/* ---- Matmul -------------------------------------------------------------- */

/* A low-rank adapter (LoRA, arXiv:2106.09685) of a weight W [rows, cols]. The product uses
 * W + scale B A, with A [rank, cols] and B [rows, rank], both row-major. */
typedef struct nf4_lora {
  size_t struct_size;         /* sizeof(nf4_lora) */
  nf4_dtype dtype;            /* of a and b: the dtype of nf4_matmul_args, or fp32, which may be
                                 rounded to that dtype */
  int32_t rank;               /* 1..128 */
  float scale;                /* finite */
  int32_t reserved;           /* 0 */
  const void *a;
  int64_t a_stride;           /* >= cols */
  const void *b;
  int64_t b_stride;           /* >= rank */
  void *product;              /* output [m, rank], contiguous, in the dtype of nf4_matmul_args:
                                 x A^T, or dy B in the gradient, without the scale. The
                                 gradients of B and A need it. On a GPU it may be NULL, if it
                                 is not wanted; the CPU functions refuse NULL */
} nf4_lora;

/* y = x W^T + bias, for activations x [m, cols], a weight W [rows, cols], an output
 * y [m, rows] and a bias [rows]. Matrices are row-major; a stride is the distance
 * from one row to the next, in elements. */
typedef struct nf4_matmul_args {
  size_t struct_size;         /* sizeof(nf4_matmul_args), or 64 if it ends before lora */
  nf4_dtype dtype;            /* of x, bias and y. On a GPU, fp32 needs an nf4_tensor and m <= 16;
                                 nf4_matmul_grad_launch takes any m */
  int32_t reserved;           /* 0 */
  int64_t m;                  /* >= 0 */
  const void *x;
  int64_t x_stride;           /* >= cols */
  const void *bias;           /* or NULL */
  void *y;
  int64_t y_stride;           /* >= rows */
  const nf4_lora *lora;       /* or NULL; NULL for an nf4_int4_tensor */
} nf4_matmul_args;

/* The bytes of workspace that nf4_matmul_launch needs; often 0. They depend on the
 * weight's shape and blocksize, m, dtype and the lora's rank, not on the GPU. They do not
 * decrease as m increases: the size for the largest m is enough for all. The only pointer in
 * the structs that is followed is lora. */
NF4_API nf4_status nf4_matmul_workspace_size(const nf4_tensor *weight, const nf4_matmul_args *args,
                                             size_t *bytes);

/* Each element of y is the sum of the products x * (codebook entry * scale) and the
 * bias, summed in binary32 and rounded once. The order of the sum is unspecified, so
 * bits differ between the GPU and the CPU, and between machines, shapes and versions, but
 * not from call to call. An x that is not finite affects only its own row of y. Memory
 * between the rows of y is not written. If y is empty, nothing is read or written,
 * and pointers may be NULL. If cols is 0, y is the bias or 0, and no other pointer is
 * read.
 *
 * With a lora, y = x W^T + bias + scale p B^T, where p is x A^T, summed in binary32 and
 * rounded to dtype. On a GPU in 16 bits, y is not computed from p, but from scale times the
 * binary32 sum, rounded once to dtype. All terms of y belong to one sum, which is rounded
 * once. If the weight has no elements, the lora's matrices are not read and its product is
 * not written.
 *
 * Further differences from exact arithmetic:
 *   rounding    u is the largest relative error of a rounding to the dtype: 2^-8 in bf16 and
 *               2^-11 in fp16. Rounding y changes it by up to u |y|. In 16 bits the entries, or
 *               the entries times the scale, may first be rounded to the dtype. If the scaled
 *               entries are, an entry may be off by up to u / 6 before it is scaled. Each product
 *               x * (entry * scale) is thus off by up to 7/6 u of itself and, in fp16, by up to
 *               2^-24 |x| (1 + |scale| times the largest entry) more, because small numbers
 *               are subnormal. Roundings of the sum in binary32 are additional. If the scaled
 *               entries are rounded, the errors are those of a dense weight of that dtype.
 *               They have a nonzero mean in each block; if a row of x has a nonzero mean too,
 *               they add up, and they add up more the larger the blocks are.
 *   overflow    x may be multiplied by the entries (in 16 bits, and in fp32 on a GPU, by
 *               up to twice the entries) and summed before the scale is applied: a sum
 *               that exceeds binary32 is infinite, even if the scale would bring it back,
 *               as 1e-3 does with 2e38 + 2e38. With a lora, a p that exceeds the dtype is
 *               infinite, even if B would bring it back. So is a scale * p that exceeds the
 *               dtype (on a GPU in 16 bits) or binary32 (elsewhere). y is then infinite
 *               or NaN. In fp16 on a GPU, the contribution of a block whose scale is more
 *               than 8e37 may be NaN.
 *   scales      in fp16 on a GPU, a scale of MXFP4 below 2^-22 may be taken as 0. A global
 *               scale may multiply the sum of x times the entries and the other scales,
 *               which may overflow as above.
 *   fp32        on a GPU, an x is represented to within 2^-23 of itself or 2^-40 of the
 *               largest of 256 neighbours, whichever is more; an entry likewise, where the
 *               largest is that of the codebook. A result that is infinite because of an
 *               infinite x or entry may be NaN.
 *   subnormals  bf16 with AVX512-BF16 instructions flushes numbers, products and sums
 *               below 2^-126 to 0.
 *
 * workspace: at least nf4_matmul_workspace_size() bytes, 16-byte aligned, in the same
 * memory as the other operands; may be NULL if that size is 0. Its contents do not matter,
 * and calls on one stream may share it. Calls that may run at the same time must not share
 * it: y is then undefined, and they may never end.
 *
 * INVALID_ARGUMENT: the cases of nf4_dequant_launch; the struct_size, dtype, reserved, m or
 * a stride of *args is out of range; dtype is fp32 in nf4_matmul_launch and m is more than
 * 16; m times a stride is more than 2^60; the workspace is NULL, misaligned or too small;
 * y (from its first to its last element), the lora's product or the workspace overlaps
 * anything else; struct_size, dtype, rank, scale, reserved or a stride of the lora is out of
 * range; there is a lora and m, rows or cols is more than 2^53. */
NF4_API nf4_status nf4_matmul_launch(const nf4_tensor *weight, const nf4_matmul_args *args,
                                     void *workspace, size_t workspace_bytes, nf4_stream stream);

/* The same on host memory, without workspace; threads as in nf4_dequant_cpu. The number of
 * threads changes no bit of the result. */
NF4_API nf4_status nf4_matmul_cpu(const nf4_tensor *weight, const nf4_matmul_args *args,
                                  int32_t threads);

/* The gradient of y = x W^T with respect to x: dx = dy W, for dy [m, rows] and dx [m, cols].
 * args->x is dy, and x_stride is at least rows; args->y is dx, and y_stride is at least cols;
 * bias is NULL. With a lora, dx = dy W + scale p A, and p = dy B. Everything else is as in the
 * functions above with rows and cols exchanged: dx is empty if m or cols is 0, and 0 if rows
 * is 0. In 16 bits the entries times the scale may be rounded to the dtype; before that they may
 * be off by up to 3/8 u, and each product thus by up to 11/8 u of itself. fp32 may have any m.
 *
 * INVALID_ARGUMENT: the cases of those functions; bias is not NULL. */
NF4_API nf4_status nf4_matmul_grad_workspace_size(const nf4_tensor *weight,
                                                  const nf4_matmul_args *args, size_t *bytes);
NF4_API nf4_status nf4_matmul_grad_launch(const nf4_tensor *weight, const nf4_matmul_args *args,
                                          void *workspace, size_t workspace_bytes,
                                          nf4_stream stream);
NF4_API nf4_status nf4_matmul_grad_cpu(const nf4_tensor *weight, const nf4_matmul_args *args,
                                       int32_t threads);

/* ---- Gradients of an adapter ---------------------------------------------- */

/* For y = x (W + scale B A)^T, with dy the gradient of y:
 *   da = scale q^T x, [rank, cols], for q = dy B
 *   db = scale dy^T p, [rows, rank], for p = x A^T
 * p and q are the products that nf4_matmul_* and nf4_matmul_grad_* write with a lora. Matrices
 * are row-major; a stride is the distance from one row to the next, in elements. */
typedef struct nf4_lora_grad_args {
  size_t struct_size;         /* sizeof(nf4_lora_grad_args) */
  nf4_dtype dtype;            /* of x, dy, p and q */
  nf4_dtype grad_dtype;       /* of da and db: dtype, or fp32 */
  int32_t rank;               /* 1..128 */
  float scale;                /* finite */
  int64_t m;                  /* >= 0 */
  int64_t rows;               /* >= 0 */
  int64_t cols;               /* >= 0 */
  const void *x;              /* [m, cols] */
  int64_t x_stride;           /* >= cols */
  const void *dy;             /* [m, rows] */
  int64_t dy_stride;          /* >= rows */
  const void *p;              /* [m, rank], contiguous */
  const void *q;              /* [m, rank], contiguous */
  void *da;                   /* NULL if it is not wanted; x and q are then not read */
  int64_t da_stride;          /* >= cols */
  void *db;                   /* NULL if it is not wanted; dy and p are then not read */
  int64_t db_stride;          /* >= rank */
} nf4_lora_grad_args;

/* Each element is summed and multiplied by the scale in binary32, then rounded to grad_dtype. The
 * order of the sum is unspecified, so bits differ between the GPU and the CPU, and between
 * machines, shapes and versions, but not from call to call. An element of x or dy that is not
 * finite affects only its own column, and an element of p or q only its own rank. Memory between
 * the rows of da and db is not written. If m is 0, da and db are 0 (with the sign of the scale),
 * and no other pointer is read. A gradient without elements (cols or rows is 0) is treated as one
 * that is not wanted: the strides and pointers that it alone needs are not checked.
 *
 * INVALID_ARGUMENT: args is NULL; the struct_size, a dtype, the rank, the scale, m, rows, cols or
 * a stride is out of range; a stride, or the rank of p and q, times the number of rows of its
 * matrix is more than 2^60; a needed pointer is NULL or misaligned; da or db, from its first to
 * its last element, overlaps the other or an input; memory or the stream is of the wrong device,
 * as for nf4_dequant_launch. */
NF4_API nf4_status nf4_lora_grad_launch(const nf4_lora_grad_args *args, nf4_stream stream);

/* The same on host memory; threads as in nf4_dequant_cpu. The number of threads changes no bit of
 * the result. */
NF4_API nf4_status nf4_lora_grad_cpu(const nf4_lora_grad_args *args, int32_t threads);

/* ---- Matmul of several weights -------------------------------------------- */

/* The most matmuls of one call. */
#define NF4_MATMUL_BATCH_MAX 64

/* The functions below compute `count` matmuls ("products"), weights[i] with args[i], such as
 * q, k and v, or gate and up. The results are bit-equal to those of as many calls of the
 * functions without "batch". Elements of args are args[0].struct_size bytes apart, and all
 * have that struct_size. Neither array is kept. If count is 0, both may be NULL and nothing
 * is done.
 *
 * Products may share their inputs: x, a weight, a bias, a lora's matrices. A y or a lora's
 * product must not overlap anything that another product reads or writes. There is one
 * exception: if two y have strides of the same number of bytes, the rows of one may lie
 * between the rows of the other, as if both were columns of one matrix.
 *
 * INVALID_ARGUMENT: the cases of the functions without "batch", for any product; count is
 * more than NF4_MATMUL_BATCH_MAX; the struct_sizes of args differ; weights or args is NULL;
 * products overlap, or their memory belongs to different devices. nf4_last_error() counts
 * products from 0. All products are checked before any is enqueued. */

/* The bytes of workspace that nf4_matmul_batch_launch needs: the largest size that one of
 * the products needs. They do not decrease as the m of any product increases. */
NF4_API nf4_status nf4_matmul_batch_workspace_size(const nf4_tensor *const *weights,
                                                   const nf4_matmul_args *args, size_t count,
                                                   size_t *bytes);

/* Products with few rows of x may share a kernel launch, which saves the fixed cost of
 * separate launches; the other products are launched one by one. The order of launches is
 * unspecified. */
NF4_API nf4_status nf4_matmul_batch_launch(const nf4_tensor *const *weights,
                                           const nf4_matmul_args *args, size_t count,
                                           void *workspace, size_t workspace_bytes,
                                           nf4_stream stream);

/* The same on host memory, without workspace; the threads share the rows of all weights. */
NF4_API nf4_status nf4_matmul_batch_cpu(const nf4_tensor *const *weights,
                                        const nf4_matmul_args *args, size_t count,
                                        int32_t threads);

/* Reports which kernels nf4_matmul_batch_launch would run on GPU `device`, for tests,
 * benchmarks and profiles. launches[i] gets the number of product i's kernel launch, counted
 * from 0, or -1 if it needs none; products may share a launch. kernels[i] gets the kernel's
 * name, such as "skinny_8", or NULL. The strings are static. Choices and names differ between
 * versions.
 *
 * The only pointers of the products that are followed are their loras. The answer depends on
 * the alignment of packed, the scales of the weight, x, and the a and b of a lora, and on
 * whether codebook is NULL. The function may load kernels; nf4_device_info loads them all.
 *
 * INVALID_ARGUMENT: the cases of nf4_matmul_batch_launch, except those of the products'
 * pointers; launches or kernels is NULL; device is out of range. NO_CUDA, NO_DEVICE,
 * UNSUPPORTED_DEVICE, CUDA_ERROR: as for nf4_device_info. */
NF4_API nf4_status nf4_matmul_plan(const nf4_tensor *const *weights, const nf4_matmul_args *args,
                                   size_t count, int32_t device, int32_t *launches,
                                   const char **kernels);

/* ---- Matmul of experts ----------------------------------------------------- */

/* E experts of N x K elements (mixture of experts) are one weight with rows = E * N and
 * cols = K: expert e has rows e * N to (e + 1) * N - 1. If E is more than 1, N * K is a
 * multiple of blocksize, so that each expert begins with a block. A nested block may span
 * experts.
 *
 * The rows of y are sorted by expert, and `ends` assigns them to the experts: the rows of
 * expert e begin where those of the previous expert end, and end before ends[e], like the
 * offs of torch.nn.functional.grouped_mm. An expert may have no rows. The host does not read
 * the ends, x_index or row_scale of a launch, so a CUDA graph may be replayed with other
 * values in their place.
 *   end(e)   = min(m, max(0, ends[0], ..., ends[e])): an expert whose end decreases has no
 *              rows, and an end beyond m counts as m.
 *   y[i, n]  = row_scale[i] * (the sum over k of x[x_index[i], k] * W[e * N + n, k]
 *                              + bias[e, n]), for the expert e of row i.
 * Rows of y from end(E - 1) on belong to no expert. Their contents afterwards are
 * unspecified. */
typedef struct nf4_grouped_args {
  size_t struct_size;         /* sizeof(nf4_grouped_args) */
  nf4_dtype dtype;            /* of x, bias and y; on a GPU fp16 or bf16 */
  int32_t experts;            /* E >= 0; divides the rows of an nf4_tensor, which has none if E
                                 is 0 */
  int64_t m;                  /* rows of y: 0..2^31-1 */
  const void *x;              /* [x_rows, K] */
  int64_t x_stride;           /* >= K */
  int64_t x_rows;             /* >= 0; at least m if x_index is NULL */
  void *y;                    /* [m, N] */
  int64_t y_stride;           /* >= N */
  const int32_t *ends;        /* [E] */
  const int32_t *x_index;     /* [m], the row of x for each row of y; a row may be used several
                                 times. An index outside 0..x_rows-1 stands for a row of zeros.
                                 NULL: row i of x for row i of y */
  const void *bias;           /* [E, N], or NULL */
  int64_t bias_stride;        /* >= N, from one expert to the next; not read if bias is NULL */
  const float *row_scale;     /* [m], such as the router's weights, or NULL: 1 */
} nf4_grouped_args;

/* The bytes of workspace that nf4_matmul_grouped_launch needs. They are 0 if x_index is NULL.
 * Otherwise they depend on the weight's shape and blocksize, experts, m and dtype, and do not
 * decrease as m increases. No pointer in the structs is followed; only whether x_index is NULL
 * matters. */
NF4_API nf4_status nf4_matmul_grouped_workspace_size(const nf4_tensor *weight,
                                                     const nf4_grouped_args *args,
                                                     size_t *bytes);

/* Sums, rounding, workspace and streams are as in nf4_matmul_launch, and so is an empty y. If
 * experts is 0, no row of y belongs to an expert: again nothing is read or written, and
 * pointers may be NULL. If K is 0, x is not read. row_scale multiplies the sum in binary32
 * before it is rounded to dtype.
 *
 * INVALID_ARGUMENT: the cases of nf4_matmul_launch; experts, m or x_rows is out of range;
 * experts does not divide rows; there are several experts and N * K is not a multiple of
 * blocksize; dtype is fp32 in nf4_matmul_grouped_launch. */
NF4_API nf4_status nf4_matmul_grouped_launch(const nf4_tensor *weight,
                                             const nf4_grouped_args *args, void *workspace,
                                             size_t workspace_bytes, nf4_stream stream);

/* The same on host memory, without workspace; threads as in nf4_dequant_cpu. The number of
 * threads changes no bit of the result. */
NF4_API nf4_status nf4_matmul_grouped_cpu(const nf4_tensor *weight, const nf4_grouped_args *args,
                                          int32_t threads);

/* The gradient with respect to the rows of x from which the experts' rows of y were computed:
 *   dx[i, k] = row_scale[i] * the sum over n of dy[x_index[i], n] * W[e * N + n, k],
 * for the expert e of row i, dy [x_rows, N] and dx [m, K]. args->x is dy, and x_stride is at
 * least N; args->y is dx, and y_stride is at least K; bias is NULL. x_index holds rows of dy; it
 * is NULL if dy is in the order of y. It is not the x_index of the forward product: dx has a row
 * for each row of y, which the caller adds to row x_index[i] of the gradient of x. Everything
 * else is as in the functions above with N and K exchanged: dx is empty if m or K is 0, and 0
 * if N is 0. Weights times their scales may be rounded to the dtype, as dequantize does.
 *
 * INVALID_ARGUMENT: the cases of those functions; bias is not NULL. */
NF4_API nf4_status nf4_matmul_grouped_grad_workspace_size(const nf4_tensor *weight,
                                                          const nf4_grouped_args *args,
                                                          size_t *bytes);
NF4_API nf4_status nf4_matmul_grouped_grad_launch(const nf4_tensor *weight,
                                                  const nf4_grouped_args *args, void *workspace,
                                                  size_t workspace_bytes, nf4_stream stream);
NF4_API nf4_status nf4_matmul_grouped_grad_cpu(const nf4_tensor *weight,
                                               const nf4_grouped_args *args, int32_t threads);

/* ---- 4-bit integer weights ----------------------------------------------- */

/* GPTQ, AWQ and compressed-tensors store a weight of rows x cols (N x K) elements as 4-bit
 * codes q. Each row has, for each group of columns, a scale s and a zero point z, 0..15:
 *   value = RN_dtype(s * (q - z)),
 * which is rounded once, because the product is exact in binary32.
 * Group g of a row has columns g * group_size to (g + 1) * group_size - 1 or, with g_idx, the
 * columns whose g_idx is g. There are G = cols / group_size groups.
 *
 * A 32-bit word has eight codes; code i is in bits 4 i to 4 i + 3. The words of codes and of
 * zeros, and the scales, lie as in checkpoints, row-major. r and c are the row and the column of
 * a word in its matrix; the codes of a word of packed differ in k, a column of the weight, or in n,
 * a row of the weight:
 *   layout               packed             code i of a word     zeros           scales
 *   GPTQ                 [K / 8][N]         k = 8 r + i          [G][ceil(N/8)]  [G][N]
 *   AWQ                  [K][N / 8]         n = 8 c + order[i]   [G][N / 8]      [G][N]
 *   COMPRESSED_TENSORS   [N][ceil(K / 8)]   k = 8 c + i          [ceil(N/8)][G]  [N][G]
 * order = 0 2 4 6 1 3 5 7. A word of zeros has the zero points of 8 rows: code i belongs to row
 * 8 c + i, in AWQ to row 8 c + order[i]. In GPTQ cols must be a multiple of 8, in AWQ rows.
 * Codes past the last column or row are not used; quantize writes 0 there, before it subtracts
 * zero_offset. */
typedef int32_t nf4_int4_layout;
#define NF4_INT4_GPTQ 1               /* GPTQModel, AutoGPTQ: qweight, qzeros, scales */
#define NF4_INT4_AWQ 2                /* AutoAWQ, version GEMM: the same names */
#define NF4_INT4_COMPRESSED_TENSORS 3 /* pack-quantized: weight_packed, weight_zero_point */

/* An integer weight. It borrows all pointers and owns nothing. Quantize writes packed, scales
 * and zeros. The functions on host memory refuse a g_idx outside 0..G-1 and a permutation
 * outside 0..cols-1. On a GPU these values are not checked, and behaviour is undefined if one is
 * out of range. If a permutation names a column twice, the result is unspecified. */
typedef struct nf4_int4_tensor {
  size_t struct_size;         /* sizeof(nf4_int4_tensor) */
  nf4_int4_layout layout;
  nf4_dtype scales_dtype;     /* fp16 or bf16 */
  int32_t group_size;         /* columns: a multiple of 8 that divides cols; -1: all */
  int32_t zero_offset;        /* 1 for GPTQ v1 (checkpoint_format gptq), which stores each
                                 word of zeros minus 0x11111111; else 0 */
  int64_t rows;               /* >= 0; rows * cols <= 2^60 */
  int64_t cols;               /* >= 0 */
  void *packed;               /* words, 4-byte aligned */
  void *scales;
  void *zeros;                /* words, or NULL: z is 8 everywhere, and zero_offset is 0 */
  const int32_t *g_idx;       /* [cols], the group of each stored column, as in GPTQ with
                                 act order; or NULL: column / group_size */
  const int32_t *permutation; /* [cols], or NULL: stored column j is column permutation[j] of
                                 the weight (nf4_int4_reorder_launch) */
} nf4_int4_tensor;

/* Sizes of the parts of a tensor. */
typedef struct nf4_int4_sizes {
  size_t struct_size;       /* sizeof(nf4_int4_sizes), set by the caller */
  int64_t groups;           /* groups of a row */
  int64_t packed_bytes;
  int64_t scales_bytes;
  int64_t zeros_bytes;
} nf4_int4_sizes;

/* Fills *sizes from the layout, group_size, rows and cols of *tensor; its pointers are not
 * read. */
NF4_API nf4_status nf4_int4_tensor_sizes(const nf4_int4_tensor *tensor, nf4_int4_sizes *sizes);

/* Like nf4_dequant_launch and nf4_dequant_cpu.
 *
 * INVALID_ARGUMENT: the cases of those functions; layout, scales_dtype, group_size or zero_offset
 * is out of range; group_size does not divide cols; rows or cols is not a multiple of 8 where the
 * layout needs it. */
NF4_API nf4_status nf4_int4_dequant_launch(const nf4_int4_tensor *weight, void *out,
                                           nf4_dtype out_dtype, nf4_stream stream);
NF4_API nf4_status nf4_int4_dequant_cpu(const nf4_int4_tensor *weight, void *out,
                                        nf4_dtype out_dtype, int32_t threads);

/* Quantizes in[rows * cols] into packed, scales and zeros of *weight by rounding to nearest. The
 * result is deterministic, and the GPU and the CPU write the same bytes. For each group,
 * with the extremes of its finite elements (0 if there is none), in binary32 except for s:
 *   symmetric    s = 2 max|x| / 15, z = 8 (written to zeros, if that is not NULL)
 *   asymmetric   lo = min(x, 0), hi = max(x, 0), s = (hi - lo) / 15,
 *                z = clamp(rint(-lo / s), 0, 15); zeros is needed
 *   q            clamp(rint(x / s) + z, 0, 15)
 * s is first rounded to scales_dtype. If it becomes 0, it is replaced by the smallest positive
 * number of that dtype; if it becomes infinite, by the largest finite number. rint rounds halves
 * to even. A NaN x gets q = z; an infinite x gets the q nearest to it. g_idx and permutation must
 * be NULL.
 *
 * INVALID_ARGUMENT: the cases of nf4_int4_dequant_launch; symmetric is not 0 or 1; zeros is NULL
 * and symmetric is 0; g_idx or permutation is not NULL; in or a part overlaps another part. */
NF4_API nf4_status nf4_int4_quantize_launch(const void *in, nf4_dtype in_dtype,
                                            const nf4_int4_tensor *weight, int32_t symmetric,
                                            nf4_stream stream);
NF4_API nf4_status nf4_int4_quantize_cpu(const void *in, nf4_dtype in_dtype,
                                         const nf4_int4_tensor *weight, int32_t symmetric,
                                         int32_t threads);

/* Sorts the columns of a weight with g_idx by their group, once, so that matmul reads whole
 * groups. It writes packed and permutation of *to. The scales and zeros of *to are those of *from
 * (the same pointers, or equal bytes). All other fields of *to are the same, except g_idx, which
 * is NULL. Columns of one group keep their order. Each group must have group_size columns;
 * otherwise *to is a different weight. cols is at most 2^31 - 1. If a weight has no elements,
 * only its shape is checked.
 *
 * INVALID_ARGUMENT: the cases of nf4_int4_dequant_launch, for *from and for *to; g_idx of *from
 * is NULL or its permutation is not; g_idx of *to is not NULL or its permutation is; another
 * field differs; packed or permutation of *to overlaps a part of *from. */
NF4_API nf4_status nf4_int4_reorder_launch(const nf4_int4_tensor *from, const nf4_int4_tensor *to,
                                           nf4_stream stream);
NF4_API nf4_status nf4_int4_reorder_cpu(const nf4_int4_tensor *from, const nf4_int4_tensor *to,
                                        int32_t threads);

/* Like the functions without "int4", with the same x, y and bias; group_size takes the place of
 * blocksize. With g_idx the GPU reads a scale for each element; nf4_int4_reorder_launch avoids
 * that. args->lora is NULL. Workspace sizes and the choice of a kernel also depend on whether
 * zeros, g_idx and permutation are NULL; the choice also depends on the alignment of scales. On a
 * GPU dtype is not fp32. Differences from exact arithmetic, in addition to those of
 * nf4_matmul_launch:
 *   rounding    the weights s * (q - z) may be rounded to x's dtype, as dequantize does. In
 *               fp16, a bf16 scale may first be rounded to fp16: a scale that is subnormal in
 *               fp16 loses bits, and a scale beyond 65504 becomes infinite.
 *   sums        the sum of x times q may be formed first, and z times the sum of the group's x
 *               subtracted; their terms are up to 143 times x. A sum that exceeds binary32 or
 *               has an infinite x is infinite or NaN, and its rounding is relative to
 *               143 |x|. */
NF4_API nf4_status nf4_int4_matmul_workspace_size(const nf4_int4_tensor *weight,
                                                  const nf4_matmul_args *args, size_t *bytes);
NF4_API nf4_status nf4_int4_matmul_launch(const nf4_int4_tensor *weight,
                                          const nf4_matmul_args *args, void *workspace,
                                          size_t workspace_bytes, nf4_stream stream);
NF4_API nf4_status nf4_int4_matmul_cpu(const nf4_int4_tensor *weight, const nf4_matmul_args *args,
                                       int32_t threads);
NF4_API nf4_status nf4_int4_matmul_batch_workspace_size(const nf4_int4_tensor *const *weights,
                                                        const nf4_matmul_args *args, size_t count,
                                                        size_t *bytes);
NF4_API nf4_status nf4_int4_matmul_batch_launch(const nf4_int4_tensor *const *weights,
                                                const nf4_matmul_args *args, size_t count,
                                                void *workspace, size_t workspace_bytes,
                                                nf4_stream stream);
NF4_API nf4_status nf4_int4_matmul_batch_cpu(const nf4_int4_tensor *const *weights,
                                             const nf4_matmul_args *args, size_t count,
                                             int32_t threads);
NF4_API nf4_status nf4_int4_matmul_plan(const nf4_int4_tensor *const *weights,
                                        const nf4_matmul_args *args, size_t count, int32_t device,
                                        int32_t *launches, const char **kernels);

/* The experts are weights of one shape and layout. `weight` is the weight of expert 0, with N rows
 * and K columns. In memory, each of its parts (packed, scales, zeros, g_idx and permutation) is
 * followed by the same part of the other experts, as if it had a first dimension of E: packed of
 * expert e begins e times the packed_bytes of nf4_int4_tensor_sizes after packed of expert 0, and
 * so on. Everything else is as in the functions without "int4" and in nf4_int4_matmul_launch. On a
 * GPU g_idx and permutation are NULL.
 *
 * INVALID_ARGUMENT: the cases of those functions; E * N * K is more than 2^60; g_idx or
 * permutation is not NULL in nf4_int4_matmul_grouped_launch. */
NF4_API nf4_status nf4_int4_matmul_grouped_workspace_size(const nf4_int4_tensor *weight,
                                                          const nf4_grouped_args *args,
                                                          size_t *bytes);
NF4_API nf4_status nf4_int4_matmul_grouped_launch(const nf4_int4_tensor *weight,
                                                  const nf4_grouped_args *args, void *workspace,
                                                  size_t workspace_bytes, nf4_stream stream);
NF4_API nf4_status nf4_int4_matmul_grouped_cpu(const nf4_int4_tensor *weight,
                                               const nf4_grouped_args *args, int32_t threads);

/* ---- Fused or dense -------------------------------------------------------- */

/* There are two ways to compute a product. Fused: libnf4's function for it reads the packed
 * weight. Dense: nf4_dequant_launch or nf4_int4_dequant_launch, or its _cpu function on
 * host memory, writes the weight to memory of the caller, and a dense matrix product, such as
 * that of cuBLAS, follows. The functions below say which way is expected to take less time on
 * a device. Both ways give the same numbers within the errors that nf4_matmul_launch lists.
 *
 * The answers for NVIDIA Hopper GPUs are measured. On all GPUs the gradients of MXFP4 and NVFP4,
 * and their products in fp32, are dense; gradients of their experts are fused for up to half a row
 * an expert on average. The answers for a GPU on which nobody has timed libnf4 (nf4_device.timed is
 * 0) are conservative:
 *   - Up to 16 rows of x are fused if the GPU has a kernel for few rows of that kind of weight. A
 *     GPU with 99 KiB of shared memory for a thread block has none for NF4 and FP4 with x in fp32.
 *     A GPU of compute capability 7.5 has none for integers, for x in other dtypes than fp16, or
 *     with a lora.
 *   - More rows are fused on GPUs of compute capability 8.x and 12.x that have a kernel for them:
 *     up to 32, 64 or 128 rows of x for a weight of at least 2^23, 2^24 or 2^25 elements. For
 *     gradients of NF4 and FP4, and with a lora, the weight needs at least 2^24 elements; a
 *     gradient with a lora has half the limit. On 7.5, up to 32 or 64 rows of x are fused for a
 *     weight of at least 2^24 or 2^25 elements if x is in fp16, without a lora, except for AWQ.
 *   - Experts with few rows, and integers that have few columns or are slow to dequantize, are
 *     fused.
 * A product that the launch refuses on a GPU, such as fp32 with more than 16 rows of x, is dense.
 *
 * For one device and the same shapes, dtypes, strides and alignments, the answer stays the same
 * until nf4_set_costs is called, so a caller that calls it before the first product, or never, may
 * keep the answer. Other versions of the library may answer differently. */
typedef int32_t nf4_path;
#define NF4_PATH_FUSED 1
#define NF4_PATH_DENSE 2

/* Pass this as device to ask about the _cpu functions. */
#define NF4_DEVICE_CPU -1

/* device is the index of a GPU or NF4_DEVICE_CPU. On success *path is one of the values above;
 * for an empty product it is NF4_PATH_FUSED.
 *
 * The only pointer in the structs that is followed is the lora of args. The answer depends on the
 * alignment of packed, the scales of the weight, x, and the a and b of a lora, and on whether
 * codebook, zeros, g_idx, permutation, bias and x_index are NULL. The functions may load kernels,
 * as nf4_device_info does.
 *
 * INVALID_ARGUMENT: the cases of the workspace_size function of the product; path is NULL; device
 * is out of range. NO_CUDA, NO_DEVICE, UNSUPPORTED_DEVICE, CUDA_ERROR: as for nf4_device_info. */
NF4_API nf4_status nf4_matmul_path(const nf4_tensor *weight, const nf4_matmul_args *args,
                                   int32_t device, nf4_path *path);
NF4_API nf4_status nf4_matmul_grad_path(const nf4_tensor *weight, const nf4_matmul_args *args,
                                        int32_t device, nf4_path *path);
NF4_API nf4_status nf4_int4_matmul_path(const nf4_int4_tensor *weight, const nf4_matmul_args *args,
                                        int32_t device, nf4_path *path);

/* The dense way of experts dequantizes all of them. */
NF4_API nf4_status nf4_matmul_grouped_path(const nf4_tensor *weight, const nf4_grouped_args *args,
                                           int32_t device, nf4_path *path);
NF4_API nf4_status nf4_matmul_grouped_grad_path(const nf4_tensor *weight,
                                                const nf4_grouped_args *args, int32_t device,
                                                nf4_path *path);
NF4_API nf4_status nf4_int4_matmul_grouped_path(const nf4_int4_tensor *weight,
                                                const nf4_grouped_args *args, int32_t device,
                                                nf4_path *path);

/* The dense way of an adapter's gradients is two matrix products of the caller. The only pointers
 * that matter are da and db, which are NULL for a gradient that is not wanted. */
NF4_API nf4_status nf4_lora_grad_path(const nf4_lora_grad_args *args, int32_t device,
                                      nf4_path *path);

/* ---- Measured costs -------------------------------------------------------- */

/* Sets how long the kernels take on the caller's own GPUs, as `nf4 tune` of the Python package
 * measures it. If the costs have figures for a product, they replace the library's rules: they
 * decide what nf4_*matmul_path and nf4_matmul_grad_path answer, and which kernel computes the
 * product. They change no promise about results, but another kernel may sum in another order: on
 * one machine, the result of a product is determined by its operands, the version of the library
 * and the costs. Workspace sizes do not depend on costs.
 *
 * text has `bytes` bytes, and is not kept. Each line ends with a newline. The first is
 * "nf4-costs 1 " and the version of the library, and the last is "end". Between them are up to 8
 * GPUs, each followed by its rows, up to 4096 rows in all:
 *   gpu <compute capability> <kernels> <multiprocessors> <shared memory> <driver> <name>
 *   <product> <dtype> <strategy> <rows of x> <start> <weights> <rows> <columns>
 * A GPU has the values of nf4_device: compute_capability, dequant_variant, multiprocessors,
 * shared_memory_bytes, driver_version, name. Its rows apply to GPUs with the same values. A product
 * is codebook, codebook_lora, gradient, gradient_lora, gptq, awq or compressed_tensors, a dtype
 * fp16 or bf16, and a strategy mma, skinny, wgmma, multistage or dense. The rows of a GPU are
 * sorted by product, dtype and strategy in these orders, and then by the rows of x, which ascend
 * from at least 1. A row says that a product of an N x K weight takes
 *   start + weights * N * K / 10^6 + rows * N / 10^3 + columns * K / 10^3
 * microseconds; the four numbers are decimal fractions such as 0.25, without sign or exponent.
 * Between two rows the time is linear in the number of rows of x. Beyond the last row it grows in
 * proportion to that number, and below the first row the time of the strategy is not known.
 *
 * Costs replace all costs that were set before; text NULL removes those. Every build accepts costs.
 * Costs of GPUs that are not in the machine have no effect. A call that runs at the same time in
 * another thread uses the old costs or the new ones.
 *
 * INVALID_ARGUMENT: anything else in text, including costs of another version of the library; the
 * costs that were set before remain. */
NF4_API nf4_status nf4_set_costs(const char *text, size_t bytes);

/* ---- The machine ---------------------------------------------------------- */

typedef struct nf4_device {
  size_t struct_size;         /* sizeof(nf4_device), set by the caller */
  int32_t device_count;       /* GPUs that the CUDA driver shows */
  int32_t compute_capability; /* major * 10 + minor: 90 for an H200 */
  int32_t multiprocessors;
  int32_t driver_version;     /* CUDA version of the driver, 13000 for 13.0; 0: none */
  int32_t runtime_version;    /* CUDA version that the library was built with, as above */
  int32_t reserved;
  int64_t memory_bytes;
  char name[256];
  char dequant_variant[32];   /* the kernels that would run, such as "sm90" */
  int32_t shared_memory_bytes; /* the most that a thread block may have */
  int32_t timed;              /* 1: libnf4's products were timed on GPUs of this kind; 0: they
                                 were not, and the answers of nf4_*_path are presumed */
} nf4_device;

/* Checks whether this library can use GPU `device`. Returns OK if it can; otherwise NO_CUDA,
 * NO_DEVICE, UNSUPPORTED_DEVICE, CUDA_ERROR, or INVALID_ARGUMENT for an index out of range, with
 * the reason in nf4_last_error(). *info always gets what is known. The function initialises CUDA
 * and loads the kernels for the device, which may take long, so that later launches need not do
 * so. */
NF4_API nf4_status nf4_device_info(int32_t device, nf4_device *info);

/* The CPU kernels that this machine runs: "avx512bf16", "avx512", "avx2", "neonbf16", "neon" or
 * "scalar". Later versions may have others. */
NF4_API const char *nf4_cpu_variant(void);

#ifdef __cplusplus
}
#endif

#endif
