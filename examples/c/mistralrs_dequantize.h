/* The NF4 and FP4 functions that mistral.rs links (mistralrs-quant, src/bitsandbytes/ffi.rs),
 * implemented with libnf4. Include this header in one C or C++ file of the build, in place of the
 * kernels of those names; mistral.rs keeps its own 8-bit functions. The functions enqueue on the
 * stream and return nothing. If libnf4 refuses a call, they pass its error text to
 * NF4_MISTRALRS_FAILED, which by default prints the text and aborts the process. */
#ifndef NF4_MISTRALRS_DEQUANTIZE_H
#define NF4_MISTRALRS_DEQUANTIZE_H

#include <nf4/nf4.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef NF4_MISTRALRS_FAILED
#define NF4_MISTRALRS_FAILED(words) (fprintf(stderr, "libnf4: %s\n", words), abort())
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* out[n] = the n codes of `a`, two in a byte, times absmax[n / blocksize], in dtype. */
static void nf4_mistralrs_dequantize(nf4_format format, nf4_dtype dtype, const uint8_t *a,
                                     const float *absmax, void *out, int32_t blocksize, int32_t n,
                                     nf4_stream stream) {
  nf4_tensor weight;
  memset(&weight, 0, sizeof weight);
  weight.struct_size = sizeof weight;
  weight.format = format;
  weight.blocksize = blocksize;
  weight.rows = 1;
  weight.cols = n;
  /* Only read; the members are not const for nf4_quantize_launch. */
  weight.packed = (void *)(uintptr_t)a;
  weight.absmax = (void *)(uintptr_t)absmax;
  if (nf4_dequant_launch(&weight, out, dtype, stream) != NF4_STATUS_OK)
    NF4_MISTRALRS_FAILED(nf4_last_error());
}

/* `code` is the codebook of the 8-bit functions. */
#define NF4_MISTRALRS_DEFINE(name, format, dtype)                                  \
  void name(const float *code, const uint8_t *a, const float *absmax, void *out,   \
            int32_t blocksize, int32_t n, nf4_stream stream);                      \
  void name(const float *code, const uint8_t *a, const float *absmax, void *out,   \
            int32_t blocksize, int32_t n, nf4_stream stream) {                     \
    (void)code;                                                                    \
    nf4_mistralrs_dequantize(format, dtype, a, absmax, out, blocksize, n, stream); \
  }

NF4_MISTRALRS_DEFINE(dequantize_blockwise_f32_nf4, NF4_FORMAT_NF4, NF4_DTYPE_FP32)
NF4_MISTRALRS_DEFINE(dequantize_blockwise_f16_nf4, NF4_FORMAT_NF4, NF4_DTYPE_FP16)
NF4_MISTRALRS_DEFINE(dequantize_blockwise_bf16_nf4, NF4_FORMAT_NF4, NF4_DTYPE_BF16)
NF4_MISTRALRS_DEFINE(dequantize_blockwise_f32_fp4, NF4_FORMAT_FP4, NF4_DTYPE_FP32)
NF4_MISTRALRS_DEFINE(dequantize_blockwise_f16_fp4, NF4_FORMAT_FP4, NF4_DTYPE_FP16)
NF4_MISTRALRS_DEFINE(dequantize_blockwise_bf16_fp4, NF4_FORMAT_FP4, NF4_DTYPE_BF16)

#ifdef __cplusplus
}
#endif

#endif
