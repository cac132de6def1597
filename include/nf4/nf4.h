/* libnf4: 4-bit NormalFloat (NF4) and FP4 weights, on the GPU and the CPU.
 *
 * This header is the whole interface and its manual. It needs nothing but
 * <stddef.h> and <stdint.h>, and compiles as C99 and as C++11.
 *
 * THE DATA
 *   A weight of rows x cols numbers is read in row-major order as one run of
 *   n = rows * cols elements, cut into blocks of `blocksize` elements (the last
 *   block may be shorter). Each element is a 4-bit code into a codebook of 16
 *   floats, times the scale (absmax) of its block. The bytes are those that
 *   bitsandbytes stores:
 *     packed          uint8 [ceil(n / 2)]; element 2i is the HIGH nibble of byte
 *                     i, element 2i + 1 the LOW nibble; an odd n leaves the last
 *                     low nibble unused (quantize writes 0 there).
 *     absmax          flat: float [nb], nb = ceil(n / blocksize).
 *                     nested (double quantization): uint8 [nb], codes into
 *                     nested_code.
 *     nested_absmax   float [ceil(nb / nested_blocksize)]
 *     nested_code     float [256], ascending; bitsandbytes' own is
 *                     nf4_scale_code()
 *     nested_offset   float [1], in the same memory as the rest
 *
 * THE ARITHMETIC
 *   scale = RN(RN(nested_code[q] * nested_absmax[b / nested_blocksize])
 *              + nested_offset)                        (nested)
 *   value = RN_dtype(RN(codebook[code] * scale))
 *   RN is IEEE-754 round-to-nearest-even in binary32; a multiply and an add are
 *   never fused. Dequantize is therefore bit-equal to bitsandbytes' CUDA kernels,
 *   signed zeros included; a NaN stays a NaN of unspecified payload. The scales
 *   are used as they are, whether NaN, infinite, negative or subnormal.
 *
 * WHICH MEMORY
 *   nf4_*_launch take device pointers and enqueue on `stream`; nf4_*_cpu take
 *   host pointers and return when the work is done. The library never keeps a
 *   pointer: the caller owns all memory and keeps it alive until the work on the
 *   stream has finished.
 *   A launch does not synchronise, allocate, print, throw or exit, leaves the
 *   current device as it was, and can be captured in a CUDA graph. Scratch memory
 *   comes from the caller. Two costs are CUDA's own: the first use of a kernel in a
 *   process loads it (nf4_device_info does that beforehand), and where the memory is
 *   of another device than the current one, a launch makes that one current for its
 *   duration, which may initialise either.
 *   A launch waits for all that is before it on the stream. On compute capability 9.0
 *   and later it lets a successor start early that was itself launched with
 *   programmatic stream serialization: such a kernel waits (griddepcontrol.wait) before
 *   it touches the operands, as CUDA asks of it. Nobody else needs to know.
 *
 * ERRORS
 *   Every function that can fail returns nf4_status. On anything but
 *   NF4_STATUS_OK nothing was enqueued and no output byte was written, with two
 *   exceptions: after NF4_STATUS_CUDA_ERROR from nf4_quantize_launch or
 *   nf4_matmul_batch_launch, which enqueue several kernels, the outputs are
 *   unspecified; nf4_device_info fills in what it knows in any case. nf4_last_error()
 *   names the argument and the value. nf4_*_cpu need no memory of their own; where
 *   there is none, only the text of nf4_last_error() is lost. nf4_*_launch and
 *   nf4_device_info call the CUDA runtime, which allocates host memory for each thread
 *   that first uses it, where the C library may abort the process if there is none.
 *
 * THREADS
 *   Every function may be called from any number of threads at once, on outputs
 *   that do not overlap. nf4_*_cpu use up to 192 KiB of the calling thread's stack. The
 *   threads that they start have stacks of the default size, or 256 KiB if that is more,
 *   and have ended when they return; where the system refuses one, the others do its
 *   work. A thread that is cancelled (pthread_cancel) acts on it after such a call.
 *
 * ALIGNMENT
 *   packed and uint8 absmax: none. Everything else: that of its element type.
 *   16-byte aligned outputs and 4-byte aligned packed are the fastest.
 *
 * STABILITY
 *   Values of constants never change; struct fields are only ever appended, and
 *   struct_size tells which the caller knows. Until 1.0 the SONAME is
 *   libnf4.so.0 and a minor version may break the interface.
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
/* There is a GPU, but no kernel in this build runs on it. */
#define NF4_STATUS_UNSUPPORTED_DEVICE 4
/* The CUDA runtime returned an error, one of an earlier launch included; it is
 * returned and not cleared. */
#define NF4_STATUS_CUDA_ERROR 5

/* The name of a status, such as "NF4_STATUS_OK"; never NULL. */
NF4_API const char *nf4_status_string(nf4_status status);

/* What was wrong in the last call that failed on this thread, in words that name
 * the argument and its value. Empty before any failure; never NULL. Valid until
 * the next failure on the same thread. */
NF4_API const char *nf4_last_error(void);

/* ---- Version and build -------------------------------------------------- */

/* major * 10000 + minor * 100 + patch of the library that is loaded. */
NF4_API int32_t nf4_version(void);

/* The same as text, such as "0.1.0". */
NF4_API const char *nf4_version_string(void);

/* How the library was built: lines of "key: value" (compiler, cuda, cuda_archs,
 * cpu_variants), for reports. */
NF4_API const char *nf4_build_info(void);

/* ---- Types -------------------------------------------------------------- */

/* The 4-bit format. It chooses the codebook where nf4_tensor.codebook is NULL.
 * The values are those of bitsandbytes' C library. */
typedef int32_t nf4_format;
#define NF4_FORMAT_FP4 1
#define NF4_FORMAT_NF4 2

/* Element types of dense data. */
typedef int32_t nf4_dtype;
#define NF4_DTYPE_FP32 1
#define NF4_DTYPE_FP16 2
#define NF4_DTYPE_BF16 3

/* cudaStream_t (and CUstream) without their headers, of the device that the memory
 * is of. NULL is the legacy default stream of that device, or of the current one
 * where all memory is managed or the host's. */
typedef struct CUstream_st *nf4_stream;

/* A quantized weight. It borrows every pointer and owns nothing. Dequantize and
 * matmul read packed, absmax, nested_absmax and nested_offset; quantize writes them. */
typedef struct nf4_tensor {
  size_t struct_size;       /* sizeof(nf4_tensor) */
  nf4_format format;
  int32_t blocksize;        /* elements: a power of two, 32..4096 */
  int32_t nested_blocksize; /* scales: a power of two, 1..2^30; 0 means flat */
  int32_t reserved;         /* 0 */
  int64_t rows;             /* >= 0; rows * cols <= 2^60 */
  int64_t cols;             /* >= 0 */
  void *packed;
  void *absmax;             /* float if flat, uint8_t if nested */
  float *nested_absmax;     /* this and the next two: NULL if and only if flat */
  const float *nested_code;
  float *nested_offset;
  const float *codebook;    /* 16 floats that replace the format's, or NULL */
} nf4_tensor;

/* Sizes of the parts of a tensor. */
typedef struct nf4_sizes {
  size_t struct_size;       /* sizeof(nf4_sizes), set by the caller */
  int64_t elements;         /* rows * cols */
  int64_t blocks;           /* elements of absmax */
  int64_t nested_blocks;    /* elements of nested_absmax; 0 if flat */
  int64_t packed_bytes;
  int64_t absmax_bytes;
} nf4_sizes;

/* ---- Tables (host memory, static, never NULL for a known format) --------- */

/* The 16 floats of a format, by code; NULL if the format is unknown.
 * NF4: QLoRA (arXiv:2305.14314), appendix E. FP4: a sign bit and the magnitudes
 * {0, 1/192, 2/3, 1, 1/3, 1/2, 1/6, 1/4}, as in bitsandbytes. */
NF4_API const float *nf4_codebook(nf4_format format);

/* The 256 floats that bitsandbytes quantizes scales to: its signed dynamic map
 * (create_dynamic_map), ascending. */
NF4_API const float *nf4_scale_code(void);

/* ---- Sizes --------------------------------------------------------------- */

/* Fills *sizes from the format, blocksizes, rows and cols of *tensor; its
 * pointers are not looked at. */
NF4_API nf4_status nf4_tensor_sizes(const nf4_tensor *tensor, nf4_sizes *sizes);

/* Scratch that nf4_quantize_launch and nf4_quantize_cpu need for *tensor, in
 * bytes; 0 if flat. The pointers of *tensor are not looked at. */
NF4_API nf4_status nf4_quantize_workspace_size(const nf4_tensor *tensor, size_t *bytes);

/* ---- Dequantize ---------------------------------------------------------- */

/* out[rows * cols] = the weight, in out_dtype. `out` must not overlap any part of
 * the weight. A tensor of no elements is fine, with NULL pointers too: nothing is
 * read or written.
 *
 * INVALID_ARGUMENT: weight or a needed pointer is NULL; struct_size, format,
 * blocksize, nested_blocksize, reserved, rows, cols or out_dtype is out of range;
 * the nested pointers are partly NULL or contradict nested_blocksize; a pointer
 * is misaligned for its type; out overlaps an input; a pointer is host memory
 * that the GPU cannot reach; the pointers are of different devices, or the stream
 * is of another one (which cannot be told while it is being captured). */
NF4_API nf4_status nf4_dequant_launch(const nf4_tensor *weight, void *out, nf4_dtype out_dtype,
                                      nf4_stream stream);

/* The same on host memory. threads: how many to use at most, >= 1; 0 means one for
 * each processor that the process may run on. */
NF4_API nf4_status nf4_dequant_cpu(const nf4_tensor *weight, void *out, nf4_dtype out_dtype,
                                   int32_t threads);

/* ---- Quantize ------------------------------------------------------------ */

/* Quantizes in[rows * cols] into the buffers of *weight (and reads its
 * nested_code and codebook). Deterministic, and the same bytes from the GPU and
 * the CPU:
 *   absmax   the largest finite |x| of the block.
 *   code     the codebook entry nearest to v = RN(x * RN(1 / max(absmax, 2^-126))):
 *            between two neighbours a < b, b if v > RN((a + b) / 2), else a. Of equal
 *            entries the lowest code is used; a NaN entry never is. A codebook of
 *            your own should span [-1, 1]. A NaN x is stored as the code nearest to
 *            0, +Inf and -Inf as those nearest to +1 and -1: one bad element never
 *            spoils its neighbours.
 *   nested   offset = the sum of the block scales over nb, both in binary64, then
 *            rounded to binary32; the sum is taken over the complete binary tree of
 *            the scales. Then RN(scale - offset) are quantized to nested_code, which
 *            must be strictly ascending, in blocks of nested_blocksize by the same
 *            rule.
 *
 * workspace: scratch of at least nf4_quantize_workspace_size() bytes, 16-byte
 * aligned, in the same memory as the rest; may be NULL if that size is 0.
 *
 * INVALID_ARGUMENT: as for nf4_dequant_launch, and if the workspace is NULL,
 * misaligned or too small, or if any two of in, workspace and the outputs
 * overlap. */
NF4_API nf4_status nf4_quantize_launch(const void *in, nf4_dtype in_dtype, const nf4_tensor *weight,
                                       void *workspace, size_t workspace_bytes, nf4_stream stream);

/* The same on host memory; threads as in nf4_dequant_cpu. */
NF4_API nf4_status nf4_quantize_cpu(const void *in, nf4_dtype in_dtype, const nf4_tensor *weight,
                                    void *workspace, size_t workspace_bytes, int32_t threads);

/* ---- Matmul -------------------------------------------------------------- */

/* y = x W^T + bias, for m rows of x and a weight of `rows` x `cols`: y is m x rows,
 * x is m x cols, bias has `rows` elements. Matrices are row-major; a stride is the
 * distance of two rows, in elements. */
typedef struct nf4_matmul_args {
  size_t struct_size;         /* sizeof(nf4_matmul_args) */
  nf4_dtype dtype;            /* of x, bias and y; fp32 on the CPU only */
  int32_t reserved;           /* 0 */
  int64_t m;                  /* >= 0 */
  const void *x;
  int64_t x_stride;           /* >= cols */
  const void *bias;           /* or NULL */
  void *y;
  int64_t y_stride;           /* >= rows */
} nf4_matmul_args;

/* Scratch that nf4_matmul_launch needs, in bytes: 0 for fp32, for up to 64 rows of x, for
 * cols that are no multiple of 64 and for blocksize 32, else up to 22.5 MB, whatever the GPU;
 * kernels for compute capability 9.0 alone use it. It depends on the weight's shape,
 * blocksize, m and dtype, and does not fall as m rises: what is enough for the most rows of x
 * is enough for fewer. No pointer but the structs' own is looked at. */
NF4_API nf4_status nf4_matmul_workspace_size(const nf4_tensor *weight, const nf4_matmul_args *args,
                                             size_t *bytes);

/* Each y is the sum of the products x * (codebook entry * scale) and the bias, summed
 * in binary32 and rounded once. The order of the sum is the library's own, so bits differ
 * between the GPU and the CPU, between machines, shapes and versions, but not from call
 * to call. An x that is not finite spoils its own row of y and no other. What lies
 * between the rows of y is not written. Where y is empty nothing is read or written, and
 * pointers may be NULL; where cols is 0, y is the bias or 0, and no other pointer is
 * looked at.
 *
 * What else y may differ by from exact numbers:
 *   16 bits     the entries, or the entries times the scale, may be rounded to the dtype
 *               first. The errors of the latter, a dense weight's of that dtype, have a
 *               mean in each block; where a row of x has one, too, they add up, the more
 *               the larger the blocks.
 *   the range   few rows of x may be multiplied with the entries (in 16 bits with up to
 *               twice the entries) and summed before the scale: such a sum is infinite
 *               beyond binary32, even if the scale would bring it back, as 1e-3 does
 *               2e38 and 2e38.
 *   subnormals  bf16 by AVX512-BF16 instructions takes numbers, products and sums below
 *               2^-126 for 0.
 *
 * workspace: scratch of at least nf4_matmul_workspace_size() bytes, 16-byte aligned,
 * in the same memory as the rest; may be NULL if that size is 0. What it holds does not
 * matter, and calls in one stream may share it. Calls that may run at the same time must
 * not: y is undefined then, and they may never end.
 *
 * INVALID_ARGUMENT: as for nf4_dequant_launch, and if the struct_size, dtype, reserved,
 * m or a stride of *args is out of range, dtype is fp32 in nf4_matmul_launch, m times
 * a stride is more than 2^60, the workspace is NULL, misaligned or too small, or y,
 * between its first and its last element, or the workspace overlaps anything else. */
NF4_API nf4_status nf4_matmul_launch(const nf4_tensor *weight, const nf4_matmul_args *args,
                                     void *workspace, size_t workspace_bytes, nf4_stream stream);

/* The same on host memory, without scratch; threads as in nf4_dequant_cpu, and their
 * number changes no bit. */
NF4_API nf4_status nf4_matmul_cpu(const nf4_tensor *weight, const nf4_matmul_args *args,
                                  int32_t threads);

/* ---- Matmul of several weights -------------------------------------------- */

/* The most products of one call. */
#define NF4_MATMUL_BATCH_MAX 64

/* The functions below do `count` products, weights[i] with args[i], such as those of q, k
 * and v, or of gate and up: what as many calls of their namesakes without "batch" do, to
 * the bit. Elements of args are args[0].struct_size bytes apart, and have that struct_size,
 * all of them. Neither array is kept. Where count is 0 both may be NULL and nothing is done.
 *
 * Products may share what they read: x, a weight, a bias. A y overlaps nothing that another
 * product reads or writes; but if two y have strides of as many bytes, the rows of one may
 * lie between those of the other, as where y are columns of one matrix.
 *
 * INVALID_ARGUMENT: as for the namesakes, for any product; count is more than
 * NF4_MATMUL_BATCH_MAX; weights or args is NULL; products overlap, or are memory of different
 * devices. nf4_last_error() counts products from 0. All products are checked before any is
 * enqueued. */

/* Scratch that nf4_matmul_batch_launch needs, in bytes: as much as the product that needs
 * most. It does not fall as the m of any product rises. */
NF4_API nf4_status nf4_matmul_batch_workspace_size(const nf4_tensor *const *weights,
                                                   const nf4_matmul_args *args, size_t count,
                                                   size_t *bytes);

/* Up to 4 products go in one launch, which saves the fixed cost of the others', where they
 * are of one dtype, all nested or all flat, and all of 1 to 8 or all of 9 to 16 rows of x; where
 * rows are 64 times the GPU's multiprocessors or more, of 1 or 2, or of 3 to 8. Such a weight
 * has cols and a blocksize that are multiples of 64 (of 256, cols, with a codebook of its own),
 * and blocks of scales of up to 2^30 elements; packed and every row of x are 16-byte aligned;
 * the GPU lets a thread block have 160 KiB of shared memory, as compute capabilities 8.0, 9.0
 * and 10.0 do. All others are launched one by one, as separate calls would be, and so are large
 * weights with 9 to 16 rows of x on compute capability 9.0, which is faster. The order of
 * launches is the library's own. */
NF4_API nf4_status nf4_matmul_batch_launch(const nf4_tensor *const *weights,
                                           const nf4_matmul_args *args, size_t count,
                                           void *workspace, size_t workspace_bytes,
                                           nf4_stream stream);

/* On host memory; the threads share the rows of all products. */
NF4_API nf4_status nf4_matmul_batch_cpu(const nf4_tensor *const *weights,
                                        const nf4_matmul_args *args, size_t count,
                                        int32_t threads);

/* ---- The machine ---------------------------------------------------------- */

typedef struct nf4_device {
  size_t struct_size;         /* sizeof(nf4_device), set by the caller */
  int32_t device_count;       /* GPUs that the CUDA driver shows */
  int32_t compute_capability; /* major * 10 + minor: 90 for an H200 */
  int32_t multiprocessors;
  int32_t driver_version;     /* CUDA version of the driver, 13000 for 13.0; 0: none */
  int32_t runtime_version;    /* CUDA version that the library was built with */
  int32_t reserved;
  int64_t memory_bytes;
  char name[256];
  char dequant_variant[32];   /* the kernels that would run, such as "sm90" */
} nf4_device;

/* Is GPU `device` usable by this library? OK if so, else NO_CUDA, NO_DEVICE,
 * UNSUPPORTED_DEVICE, CUDA_ERROR, or INVALID_ARGUMENT for an index out of range,
 * with the reason in nf4_last_error(); what is known of it is filled in either
 * way. It initialises CUDA and loads the kernels for the device, which may take long;
 * what is launched afterwards is ready. */
NF4_API nf4_status nf4_device_info(int32_t device, nf4_device *info);

/* The CPU kernels that this machine runs: "avx512bf16", "avx512", "avx2" or "scalar"; later
 * versions may have others. */
NF4_API const char *nf4_cpu_variant(void);

#ifdef __cplusplus
}
#endif

#endif
