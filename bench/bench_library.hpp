// A library of its own for the benchmarks, which call it through ctypes: the rooflines, and the
// library's own kernels in any configuration. Functions that enqueue return a CUDA error.
//
// `pdl`: launched so that it may start while its predecessor ends (programmatic dependent
// launch), which is an error where nf4_bench_has_pdl says 0; else plainly.
#pragma once

#include <cstdint>

#include "nf4/nf4.h"

extern "C" {

// Do the kernels that this build has for the current device wait for their predecessor? The
// library launches them with PDL then.
NF4_API int nf4_bench_has_pdl(void);

// Dequantize's traffic: reads `words` words of 4 bytes and scale_bytes, a multiple of 4;
// writes `stores` (1 or 2) vectors of 16 bytes for each word.
NF4_API int nf4_bench_dequant_traffic_variants(void);
NF4_API int nf4_bench_dequant_traffic(int variant, const void *packed, int64_t words,
                                      const void *scales, int64_t scale_bytes, void *out,
                                      int stores, int pdl, nf4_stream stream);

// Quantize's: reads in_bytes, a multiple of 16, and writes out_bytes, a quarter or an eighth.
NF4_API int nf4_bench_quantize_traffic_variants(void);
NF4_API int nf4_bench_quantize_traffic(int variant, const void *in, int64_t in_bytes, void *out,
                                       int64_t out_bytes, int pdl, nf4_stream stream);

// Reads alone; `sink` is 4 bytes that it may write.
NF4_API int nf4_bench_read_variants(void);
NF4_API int nf4_bench_read(int variant, const void *in, int64_t bytes, void *sink, int pdl,
                           nf4_stream stream);

NF4_API int nf4_bench_write_variants(void);
NF4_API int nf4_bench_write(int variant, void *out, int64_t bytes, int pdl, nf4_stream stream);

// The launch configurations of dequantize, for nested weights and aligned buffers; a name has
// the word "pdl" where it is launched so. Which of them the library itself takes; -1: none.
NF4_API int nf4_bench_dequant_configurations(void);
NF4_API const char *nf4_bench_dequant_configuration(int configuration);
NF4_API int nf4_bench_dequant_chosen(const nf4_tensor *weight, void *out, nf4_dtype out_dtype);

// Dequantize in a configuration; -1 is the library's own choice launched plainly. A status.
NF4_API nf4_status nf4_bench_dequant(int configuration, const nf4_tensor *weight, void *out,
                                     nf4_dtype out_dtype, nf4_stream stream);

// The library's own choice launched plainly, with stores that evict first or, `keep`, with
// normal ones. A status.
NF4_API nf4_status nf4_bench_dequant_stores(const nf4_tensor *weight, void *out,
                                            nf4_dtype out_dtype, int keep, nf4_stream stream);

// nf4_quantize_launch. A status.
NF4_API nf4_status nf4_bench_quantize(const void *in, nf4_dtype in_dtype, const nf4_tensor *weight,
                                      void *workspace, size_t workspace_bytes, int pdl,
                                      nf4_stream stream);

// nf4_matmul_launch. A status.
NF4_API nf4_status nf4_bench_matmul(const nf4_tensor *weight, const nf4_matmul_args *args,
                                    void *workspace, size_t workspace_bytes, int pdl,
                                    nf4_stream stream);

// nf4_matmul_batch_launch. A status.
NF4_API nf4_status nf4_bench_matmul_batch(const nf4_tensor *const *weights,
                                          const nf4_matmul_args *args, size_t count,
                                          void *workspace, size_t workspace_bytes, int pdl,
                                          nf4_stream stream);

// The kernel configurations of matmul. Which of them the library itself takes; -1: the arguments
// are wrong. workspace_bytes: as many as nf4_matmul_workspace_size says.
NF4_API int nf4_bench_matmul_configurations(void);
NF4_API const char *nf4_bench_matmul_configuration(int configuration);
NF4_API int nf4_bench_matmul_chosen(const nf4_tensor *weight, const nf4_matmul_args *args,
                                    void *workspace, size_t workspace_bytes, nf4_stream stream);

// nf4_matmul_launch in a kernel configuration. INVALID_ARGUMENT, too, where that cannot do the
// problem.
NF4_API nf4_status nf4_bench_matmul_as(int configuration, const nf4_tensor *weight,
                                       const nf4_matmul_args *args, void *workspace,
                                       size_t workspace_bytes, int pdl, nf4_stream stream);

// nf4_int4_dequant_launch and nf4_int4_matmul_launch; and the kernel of one product, as
// nf4_int4_matmul_plan says. Statuses, and a name that is empty where there is none.
NF4_API nf4_status nf4_bench_int4_dequant(const nf4_int4_tensor *weight, void *out,
                                          nf4_dtype out_dtype, int pdl, nf4_stream stream);
NF4_API nf4_status nf4_bench_int4_matmul(const nf4_int4_tensor *weight, const nf4_matmul_args *args,
                                         void *workspace, size_t workspace_bytes, int pdl,
                                         nf4_stream stream);
NF4_API const char *nf4_bench_int4_matmul_kernel(const nf4_int4_tensor *weight,
                                                 const nf4_matmul_args *args);

}  // extern "C"
