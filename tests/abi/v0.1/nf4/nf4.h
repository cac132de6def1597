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

typedef int32_t nf4_status;
#define NF4_STATUS_OK 0

#define NF4_STATUS_INVALID_ARGUMENT 1

#define NF4_STATUS_NO_CUDA 2

#define NF4_STATUS_NO_DEVICE 3

#define NF4_STATUS_UNSUPPORTED_DEVICE 4

#define NF4_STATUS_CUDA_ERROR 5

NF4_API const char *nf4_status_string(nf4_status status);

NF4_API const char *nf4_last_error(void);

NF4_API int32_t nf4_version(void);

NF4_API const char *nf4_version_string(void);

NF4_API const char *nf4_build_info(void);

typedef int32_t nf4_format;
#define NF4_FORMAT_FP4 1
#define NF4_FORMAT_NF4 2

typedef int32_t nf4_dtype;
#define NF4_DTYPE_FP32 1
#define NF4_DTYPE_FP16 2
#define NF4_DTYPE_BF16 3

typedef struct CUstream_st *nf4_stream;

typedef struct nf4_tensor {
  size_t struct_size;
  nf4_format format;
  int32_t blocksize;
  int32_t nested_blocksize;
  int32_t scale_rule;
  int64_t rows;
  int64_t cols;
  void *packed;
  void *absmax;
  float *nested_absmax;
  const float *nested_code;
  float *nested_offset;
  const float *codebook;
} nf4_tensor;

typedef struct nf4_sizes {
  size_t struct_size;
  int64_t elements;
  int64_t blocks;
  int64_t nested_blocks;
  int64_t packed_bytes;
  int64_t absmax_bytes;
} nf4_sizes;

NF4_API const float *nf4_codebook(nf4_format format);

NF4_API const float *nf4_scale_code(void);

NF4_API nf4_status nf4_tensor_sizes(const nf4_tensor *tensor, nf4_sizes *sizes);

NF4_API nf4_status nf4_quantize_workspace_size(const nf4_tensor *tensor, size_t *bytes);

NF4_API nf4_status nf4_dequant_launch(const nf4_tensor *weight, void *out, nf4_dtype out_dtype,
                                      nf4_stream stream);

NF4_API nf4_status nf4_dequant_cpu(const nf4_tensor *weight, void *out, nf4_dtype out_dtype,
                                   int32_t threads);

NF4_API nf4_status nf4_quantize_launch(const void *in, nf4_dtype in_dtype, const nf4_tensor *weight,
                                       void *workspace, size_t workspace_bytes, nf4_stream stream);

NF4_API nf4_status nf4_quantize_cpu(const void *in, nf4_dtype in_dtype, const nf4_tensor *weight,
                                    void *workspace, size_t workspace_bytes, int32_t threads);

typedef struct nf4_lora {
  size_t struct_size;
  nf4_dtype dtype;
  int32_t rank;
  float scale;
  int32_t reserved;
  const void *a;
  int64_t a_stride;
  const void *b;
  int64_t b_stride;
  void *product;
} nf4_lora;

typedef struct nf4_matmul_args {
  size_t struct_size;
  nf4_dtype dtype;
  int32_t reserved;
  int64_t m;
  const void *x;
  int64_t x_stride;
  const void *bias;
  void *y;
  int64_t y_stride;
  const nf4_lora *lora;
} nf4_matmul_args;

NF4_API nf4_status nf4_matmul_workspace_size(const nf4_tensor *weight, const nf4_matmul_args *args,
                                             size_t *bytes);

NF4_API nf4_status nf4_matmul_launch(const nf4_tensor *weight, const nf4_matmul_args *args,
                                     void *workspace, size_t workspace_bytes, nf4_stream stream);

NF4_API nf4_status nf4_matmul_cpu(const nf4_tensor *weight, const nf4_matmul_args *args,
                                  int32_t threads);

NF4_API nf4_status nf4_matmul_grad_workspace_size(const nf4_tensor *weight,
                                                  const nf4_matmul_args *args, size_t *bytes);
NF4_API nf4_status nf4_matmul_grad_launch(const nf4_tensor *weight, const nf4_matmul_args *args,
                                          void *workspace, size_t workspace_bytes,
                                          nf4_stream stream);
NF4_API nf4_status nf4_matmul_grad_cpu(const nf4_tensor *weight, const nf4_matmul_args *args,
                                       int32_t threads);

typedef struct nf4_lora_grad_args {
  size_t struct_size;
  nf4_dtype dtype;
  nf4_dtype grad_dtype;
  int32_t rank;
  float scale;
  int64_t m;
  int64_t rows;
  int64_t cols;
  const void *x;
  int64_t x_stride;
  const void *dy;
  int64_t dy_stride;
  const void *p;
  const void *q;
  void *da;
  int64_t da_stride;
  void *db;
  int64_t db_stride;
} nf4_lora_grad_args;

NF4_API nf4_status nf4_lora_grad_launch(const nf4_lora_grad_args *args, nf4_stream stream);

NF4_API nf4_status nf4_lora_grad_cpu(const nf4_lora_grad_args *args, int32_t threads);

#define NF4_MATMUL_BATCH_MAX 64

NF4_API nf4_status nf4_matmul_batch_workspace_size(const nf4_tensor *const *weights,
                                                   const nf4_matmul_args *args, size_t count,
                                                   size_t *bytes);

NF4_API nf4_status nf4_matmul_batch_launch(const nf4_tensor *const *weights,
                                           const nf4_matmul_args *args, size_t count,
                                           void *workspace, size_t workspace_bytes,
                                           nf4_stream stream);

NF4_API nf4_status nf4_matmul_batch_cpu(const nf4_tensor *const *weights,
                                        const nf4_matmul_args *args, size_t count,
                                        int32_t threads);

NF4_API nf4_status nf4_matmul_plan(const nf4_tensor *const *weights, const nf4_matmul_args *args,
                                   size_t count, int32_t device, int32_t *launches,
                                   const char **kernels);

typedef struct nf4_grouped_args {
  size_t struct_size;
  nf4_dtype dtype;
  int32_t experts;
  int64_t m;
  const void *x;
  int64_t x_stride;
  int64_t x_rows;
  void *y;
  int64_t y_stride;
  const int32_t *ends;
  const int32_t *x_index;
  const void *bias;
  int64_t bias_stride;
  const float *row_scale;
} nf4_grouped_args;

NF4_API nf4_status nf4_matmul_grouped_workspace_size(const nf4_tensor *weight,
                                                     const nf4_grouped_args *args,
                                                     size_t *bytes);

NF4_API nf4_status nf4_matmul_grouped_launch(const nf4_tensor *weight,
                                             const nf4_grouped_args *args, void *workspace,
                                             size_t workspace_bytes, nf4_stream stream);

NF4_API nf4_status nf4_matmul_grouped_cpu(const nf4_tensor *weight, const nf4_grouped_args *args,
                                          int32_t threads);

NF4_API nf4_status nf4_matmul_grouped_grad_workspace_size(const nf4_tensor *weight,
                                                          const nf4_grouped_args *args,
                                                          size_t *bytes);
NF4_API nf4_status nf4_matmul_grouped_grad_launch(const nf4_tensor *weight,
                                                  const nf4_grouped_args *args, void *workspace,
                                                  size_t workspace_bytes, nf4_stream stream);
NF4_API nf4_status nf4_matmul_grouped_grad_cpu(const nf4_tensor *weight,
                                               const nf4_grouped_args *args, int32_t threads);

typedef int32_t nf4_int4_layout;
#define NF4_INT4_GPTQ 1
#define NF4_INT4_AWQ 2
#define NF4_INT4_COMPRESSED_TENSORS 3

typedef struct nf4_int4_tensor {
  size_t struct_size;
  nf4_int4_layout layout;
  nf4_dtype scales_dtype;
  int32_t group_size;
  int32_t zero_offset;
  int64_t rows;
  int64_t cols;
  void *packed;
  void *scales;
  void *zeros;
  const int32_t *g_idx;
  const int32_t *permutation;
} nf4_int4_tensor;

typedef struct nf4_int4_sizes {
  size_t struct_size;
  int64_t groups;
  int64_t packed_bytes;
  int64_t scales_bytes;
  int64_t zeros_bytes;
} nf4_int4_sizes;

NF4_API nf4_status nf4_int4_tensor_sizes(const nf4_int4_tensor *tensor, nf4_int4_sizes *sizes);

NF4_API nf4_status nf4_int4_dequant_launch(const nf4_int4_tensor *weight, void *out,
                                           nf4_dtype out_dtype, nf4_stream stream);
NF4_API nf4_status nf4_int4_dequant_cpu(const nf4_int4_tensor *weight, void *out,
                                        nf4_dtype out_dtype, int32_t threads);

NF4_API nf4_status nf4_int4_quantize_launch(const void *in, nf4_dtype in_dtype,
                                            const nf4_int4_tensor *weight, int32_t symmetric,
                                            nf4_stream stream);
NF4_API nf4_status nf4_int4_quantize_cpu(const void *in, nf4_dtype in_dtype,
                                         const nf4_int4_tensor *weight, int32_t symmetric,
                                         int32_t threads);

NF4_API nf4_status nf4_int4_reorder_launch(const nf4_int4_tensor *from, const nf4_int4_tensor *to,
                                           nf4_stream stream);
NF4_API nf4_status nf4_int4_reorder_cpu(const nf4_int4_tensor *from, const nf4_int4_tensor *to,
                                        int32_t threads);

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

NF4_API nf4_status nf4_int4_matmul_grouped_workspace_size(const nf4_int4_tensor *weight,
                                                          const nf4_grouped_args *args,
                                                          size_t *bytes);
NF4_API nf4_status nf4_int4_matmul_grouped_launch(const nf4_int4_tensor *weight,
                                                  const nf4_grouped_args *args, void *workspace,
                                                  size_t workspace_bytes, nf4_stream stream);
NF4_API nf4_status nf4_int4_matmul_grouped_cpu(const nf4_int4_tensor *weight,
                                               const nf4_grouped_args *args, int32_t threads);

typedef struct nf4_device {
  size_t struct_size;
  int32_t device_count;
  int32_t compute_capability;
  int32_t multiprocessors;
  int32_t driver_version;
  int32_t runtime_version;
  int32_t reserved;
  int64_t memory_bytes;
  char name[256];
  char dequant_variant[32];
} nf4_device;

NF4_API nf4_status nf4_device_info(int32_t device, nf4_device *info);

NF4_API const char *nf4_cpu_variant(void);

#ifdef __cplusplus
}
#endif

#endif
