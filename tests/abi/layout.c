/* The ABI of nf4.h on 64-bit machines, pinned: an edit that moves a field, changes a value or
 * a signature does not compile here. Additions are appended; the rest never changes within
 * one SONAME. */
#include <nf4/nf4.h>

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), "size of " #type)
#define FIELD(type, field, offset, bytes)                                           \
  _Static_assert(offsetof(type, field) == (offset), "offset of " #type "." #field); \
  _Static_assert(sizeof(((type *)0)->field) == (bytes), "size of " #type "." #field)
#define VALUE(name, value) _Static_assert((name) == (value), #name)
#define SIGNED(type) _Static_assert((type) - 1 < (type)0, #type " is signed")

SIZE(size_t, 8);
SIZE(void *, 8);

SIZE(nf4_status, 4);
SIGNED(nf4_status);
VALUE(NF4_STATUS_OK, 0);
VALUE(NF4_STATUS_INVALID_ARGUMENT, 1);
VALUE(NF4_STATUS_NO_CUDA, 2);
VALUE(NF4_STATUS_NO_DEVICE, 3);
VALUE(NF4_STATUS_UNSUPPORTED_DEVICE, 4);
VALUE(NF4_STATUS_CUDA_ERROR, 5);

SIZE(nf4_format, 4);
SIGNED(nf4_format);
VALUE(NF4_FORMAT_FP4, 1);
VALUE(NF4_FORMAT_NF4, 2);
VALUE(NF4_FORMAT_MXFP4, 3);
VALUE(NF4_FORMAT_NVFP4, 4);
VALUE(NF4_SCALE_FLOOR, 0);
VALUE(NF4_SCALE_EVEN, 1);
VALUE(NF4_SCALE_CEIL, 2);
VALUE(NF4_GLOBAL_FACTOR, 0);
VALUE(NF4_GLOBAL_DIVISOR, 1);

SIZE(nf4_dtype, 4);
SIGNED(nf4_dtype);
VALUE(NF4_DTYPE_FP32, 1);
VALUE(NF4_DTYPE_FP16, 2);
VALUE(NF4_DTYPE_BF16, 3);

SIZE(nf4_stream, 8);

SIZE(nf4_tensor, 88);
FIELD(nf4_tensor, struct_size, 0, 8);
FIELD(nf4_tensor, format, 8, 4);
FIELD(nf4_tensor, blocksize, 12, 4);
FIELD(nf4_tensor, nested_blocksize, 16, 4);
FIELD(nf4_tensor, scale_rule, 20, 4);
FIELD(nf4_tensor, rows, 24, 8);
FIELD(nf4_tensor, cols, 32, 8);
FIELD(nf4_tensor, packed, 40, 8);
FIELD(nf4_tensor, absmax, 48, 8);
FIELD(nf4_tensor, nested_absmax, 56, 8);
FIELD(nf4_tensor, nested_code, 64, 8);
FIELD(nf4_tensor, nested_offset, 72, 8);
FIELD(nf4_tensor, codebook, 80, 8);

SIZE(nf4_sizes, 48);
FIELD(nf4_sizes, struct_size, 0, 8);
FIELD(nf4_sizes, elements, 8, 8);
FIELD(nf4_sizes, blocks, 16, 8);
FIELD(nf4_sizes, nested_blocks, 24, 8);
FIELD(nf4_sizes, packed_bytes, 32, 8);
FIELD(nf4_sizes, absmax_bytes, 40, 8);

SIZE(nf4_lora, 64);
FIELD(nf4_lora, struct_size, 0, 8);
FIELD(nf4_lora, dtype, 8, 4);
FIELD(nf4_lora, rank, 12, 4);
FIELD(nf4_lora, scale, 16, 4);
FIELD(nf4_lora, reserved, 20, 4);
FIELD(nf4_lora, a, 24, 8);
FIELD(nf4_lora, a_stride, 32, 8);
FIELD(nf4_lora, b, 40, 8);
FIELD(nf4_lora, b_stride, 48, 8);
FIELD(nf4_lora, product, 56, 8);

SIZE(nf4_matmul_args, 72);
FIELD(nf4_matmul_args, struct_size, 0, 8);
FIELD(nf4_matmul_args, dtype, 8, 4);
FIELD(nf4_matmul_args, reserved, 12, 4);
FIELD(nf4_matmul_args, m, 16, 8);
FIELD(nf4_matmul_args, x, 24, 8);
FIELD(nf4_matmul_args, x_stride, 32, 8);
FIELD(nf4_matmul_args, bias, 40, 8);
FIELD(nf4_matmul_args, y, 48, 8);
FIELD(nf4_matmul_args, y_stride, 56, 8);
FIELD(nf4_matmul_args, lora, 64, 8);

SIZE(nf4_lora_grad_args, 128);
FIELD(nf4_lora_grad_args, struct_size, 0, 8);
FIELD(nf4_lora_grad_args, dtype, 8, 4);
FIELD(nf4_lora_grad_args, grad_dtype, 12, 4);
FIELD(nf4_lora_grad_args, rank, 16, 4);
FIELD(nf4_lora_grad_args, scale, 20, 4);
FIELD(nf4_lora_grad_args, m, 24, 8);
FIELD(nf4_lora_grad_args, rows, 32, 8);
FIELD(nf4_lora_grad_args, cols, 40, 8);
FIELD(nf4_lora_grad_args, x, 48, 8);
FIELD(nf4_lora_grad_args, x_stride, 56, 8);
FIELD(nf4_lora_grad_args, dy, 64, 8);
FIELD(nf4_lora_grad_args, dy_stride, 72, 8);
FIELD(nf4_lora_grad_args, p, 80, 8);
FIELD(nf4_lora_grad_args, q, 88, 8);
FIELD(nf4_lora_grad_args, da, 96, 8);
FIELD(nf4_lora_grad_args, da_stride, 104, 8);
FIELD(nf4_lora_grad_args, db, 112, 8);
FIELD(nf4_lora_grad_args, db_stride, 120, 8);

VALUE(NF4_MATMUL_BATCH_MAX, 64);

SIZE(nf4_grouped_args, 104);
FIELD(nf4_grouped_args, struct_size, 0, 8);
FIELD(nf4_grouped_args, dtype, 8, 4);
FIELD(nf4_grouped_args, experts, 12, 4);
FIELD(nf4_grouped_args, m, 16, 8);
FIELD(nf4_grouped_args, x, 24, 8);
FIELD(nf4_grouped_args, x_stride, 32, 8);
FIELD(nf4_grouped_args, x_rows, 40, 8);
FIELD(nf4_grouped_args, y, 48, 8);
FIELD(nf4_grouped_args, y_stride, 56, 8);
FIELD(nf4_grouped_args, ends, 64, 8);
FIELD(nf4_grouped_args, x_index, 72, 8);
FIELD(nf4_grouped_args, bias, 80, 8);
FIELD(nf4_grouped_args, bias_stride, 88, 8);
FIELD(nf4_grouped_args, row_scale, 96, 8);

SIZE(nf4_int4_layout, 4);
SIGNED(nf4_int4_layout);
VALUE(NF4_INT4_GPTQ, 1);
VALUE(NF4_INT4_AWQ, 2);
VALUE(NF4_INT4_COMPRESSED_TENSORS, 3);

SIZE(nf4_int4_tensor, 80);
FIELD(nf4_int4_tensor, struct_size, 0, 8);
FIELD(nf4_int4_tensor, layout, 8, 4);
FIELD(nf4_int4_tensor, scales_dtype, 12, 4);
FIELD(nf4_int4_tensor, group_size, 16, 4);
FIELD(nf4_int4_tensor, zero_offset, 20, 4);
FIELD(nf4_int4_tensor, rows, 24, 8);
FIELD(nf4_int4_tensor, cols, 32, 8);
FIELD(nf4_int4_tensor, packed, 40, 8);
FIELD(nf4_int4_tensor, scales, 48, 8);
FIELD(nf4_int4_tensor, zeros, 56, 8);
FIELD(nf4_int4_tensor, g_idx, 64, 8);
FIELD(nf4_int4_tensor, permutation, 72, 8);

SIZE(nf4_int4_sizes, 40);
FIELD(nf4_int4_sizes, struct_size, 0, 8);
FIELD(nf4_int4_sizes, groups, 8, 8);
FIELD(nf4_int4_sizes, packed_bytes, 16, 8);
FIELD(nf4_int4_sizes, scales_bytes, 24, 8);
FIELD(nf4_int4_sizes, zeros_bytes, 32, 8);

SIZE(nf4_path, 4);
SIGNED(nf4_path);
VALUE(NF4_PATH_FUSED, 1);
VALUE(NF4_PATH_DENSE, 2);
VALUE(NF4_DEVICE_CPU, -1);

SIZE(nf4_device, 336);
FIELD(nf4_device, struct_size, 0, 8);
FIELD(nf4_device, device_count, 8, 4);
FIELD(nf4_device, compute_capability, 12, 4);
FIELD(nf4_device, multiprocessors, 16, 4);
FIELD(nf4_device, driver_version, 20, 4);
FIELD(nf4_device, runtime_version, 24, 4);
FIELD(nf4_device, reserved, 28, 4);
FIELD(nf4_device, memory_bytes, 32, 8);
FIELD(nf4_device, name, 40, 256);
FIELD(nf4_device, dequant_variant, 296, 32);
FIELD(nf4_device, shared_memory_bytes, 328, 4);
FIELD(nf4_device, timed, 332, 4);

/* A second declaration that differs from the header's is an error. */
const char *nf4_status_string(nf4_status status);
const char *nf4_last_error(void);
int32_t nf4_version(void);
const char *nf4_version_string(void);
const char *nf4_build_info(void);
const float *nf4_codebook(nf4_format format);
const float *nf4_scale_code(void);
nf4_status nf4_tensor_sizes(const nf4_tensor *tensor, nf4_sizes *sizes);
nf4_status nf4_quantize_workspace_size(const nf4_tensor *tensor, size_t *bytes);
nf4_status nf4_dequant_launch(const nf4_tensor *weight, void *out, nf4_dtype out_dtype,
                              nf4_stream stream);
nf4_status nf4_dequant_cpu(const nf4_tensor *weight, void *out, nf4_dtype out_dtype,
                           int32_t threads);
nf4_status nf4_quantize_launch(const void *in, nf4_dtype in_dtype, const nf4_tensor *weight,
                               void *workspace, size_t workspace_bytes, nf4_stream stream);
nf4_status nf4_quantize_cpu(const void *in, nf4_dtype in_dtype, const nf4_tensor *weight,
                            void *workspace, size_t workspace_bytes, int32_t threads);
nf4_status nf4_matmul_workspace_size(const nf4_tensor *weight, const nf4_matmul_args *args,
                                     size_t *bytes);
nf4_status nf4_matmul_launch(const nf4_tensor *weight, const nf4_matmul_args *args, void *workspace,
                             size_t workspace_bytes, nf4_stream stream);
nf4_status nf4_matmul_cpu(const nf4_tensor *weight, const nf4_matmul_args *args, int32_t threads);
nf4_status nf4_matmul_grad_workspace_size(const nf4_tensor *weight, const nf4_matmul_args *args,
                                          size_t *bytes);
nf4_status nf4_matmul_grad_launch(const nf4_tensor *weight, const nf4_matmul_args *args,
                                  void *workspace, size_t workspace_bytes, nf4_stream stream);
nf4_status nf4_matmul_grad_cpu(const nf4_tensor *weight, const nf4_matmul_args *args,
                               int32_t threads);
nf4_status nf4_lora_grad_launch(const nf4_lora_grad_args *args, nf4_stream stream);
nf4_status nf4_lora_grad_cpu(const nf4_lora_grad_args *args, int32_t threads);
nf4_status nf4_matmul_batch_workspace_size(const nf4_tensor *const *weights,
                                           const nf4_matmul_args *args, size_t count,
                                           size_t *bytes);
nf4_status nf4_matmul_batch_launch(const nf4_tensor *const *weights, const nf4_matmul_args *args,
                                   size_t count, void *workspace, size_t workspace_bytes,
                                   nf4_stream stream);
nf4_status nf4_matmul_batch_cpu(const nf4_tensor *const *weights, const nf4_matmul_args *args,
                                size_t count, int32_t threads);
nf4_status nf4_matmul_plan(const nf4_tensor *const *weights, const nf4_matmul_args *args,
                           size_t count, int32_t device, int32_t *launches, const char **kernels);
nf4_status nf4_matmul_grouped_workspace_size(const nf4_tensor *weight, const nf4_grouped_args *args,
                                             size_t *bytes);
nf4_status nf4_matmul_grouped_launch(const nf4_tensor *weight, const nf4_grouped_args *args,
                                     void *workspace, size_t workspace_bytes, nf4_stream stream);
nf4_status nf4_matmul_grouped_cpu(const nf4_tensor *weight, const nf4_grouped_args *args,
                                  int32_t threads);
nf4_status nf4_matmul_grouped_grad_workspace_size(const nf4_tensor *weight,
                                                  const nf4_grouped_args *args, size_t *bytes);
nf4_status nf4_matmul_grouped_grad_launch(const nf4_tensor *weight, const nf4_grouped_args *args,
                                          void *workspace, size_t workspace_bytes,
                                          nf4_stream stream);
nf4_status nf4_matmul_grouped_grad_cpu(const nf4_tensor *weight, const nf4_grouped_args *args,
                                       int32_t threads);
nf4_status nf4_int4_tensor_sizes(const nf4_int4_tensor *tensor, nf4_int4_sizes *sizes);
nf4_status nf4_int4_dequant_launch(const nf4_int4_tensor *weight, void *out, nf4_dtype out_dtype,
                                   nf4_stream stream);
nf4_status nf4_int4_dequant_cpu(const nf4_int4_tensor *weight, void *out, nf4_dtype out_dtype,
                                int32_t threads);
nf4_status nf4_int4_quantize_launch(const void *in, nf4_dtype in_dtype,
                                    const nf4_int4_tensor *weight, int32_t symmetric,
                                    nf4_stream stream);
nf4_status nf4_int4_quantize_cpu(const void *in, nf4_dtype in_dtype, const nf4_int4_tensor *weight,
                                 int32_t symmetric, int32_t threads);
nf4_status nf4_int4_reorder_launch(const nf4_int4_tensor *from, const nf4_int4_tensor *to,
                                   nf4_stream stream);
nf4_status nf4_int4_reorder_cpu(const nf4_int4_tensor *from, const nf4_int4_tensor *to,
                                int32_t threads);
nf4_status nf4_int4_matmul_workspace_size(const nf4_int4_tensor *weight,
                                          const nf4_matmul_args *args, size_t *bytes);
nf4_status nf4_int4_matmul_launch(const nf4_int4_tensor *weight, const nf4_matmul_args *args,
                                  void *workspace, size_t workspace_bytes, nf4_stream stream);
nf4_status nf4_int4_matmul_cpu(const nf4_int4_tensor *weight, const nf4_matmul_args *args,
                               int32_t threads);
nf4_status nf4_int4_matmul_batch_workspace_size(const nf4_int4_tensor *const *weights,
                                                const nf4_matmul_args *args, size_t count,
                                                size_t *bytes);
nf4_status nf4_int4_matmul_batch_launch(const nf4_int4_tensor *const *weights,
                                        const nf4_matmul_args *args, size_t count, void *workspace,
                                        size_t workspace_bytes, nf4_stream stream);
nf4_status nf4_int4_matmul_batch_cpu(const nf4_int4_tensor *const *weights,
                                     const nf4_matmul_args *args, size_t count, int32_t threads);
nf4_status nf4_int4_matmul_plan(const nf4_int4_tensor *const *weights, const nf4_matmul_args *args,
                                size_t count, int32_t device, int32_t *launches,
                                const char **kernels);
nf4_status nf4_int4_matmul_grouped_workspace_size(const nf4_int4_tensor *weight,
                                                  const nf4_grouped_args *args, size_t *bytes);
nf4_status nf4_int4_matmul_grouped_launch(const nf4_int4_tensor *weight,
                                          const nf4_grouped_args *args, void *workspace,
                                          size_t workspace_bytes, nf4_stream stream);
nf4_status nf4_int4_matmul_grouped_cpu(const nf4_int4_tensor *weight, const nf4_grouped_args *args,
                                       int32_t threads);
nf4_status nf4_matmul_path(const nf4_tensor *weight, const nf4_matmul_args *args, int32_t device,
                           nf4_path *path);
nf4_status nf4_matmul_grad_path(const nf4_tensor *weight, const nf4_matmul_args *args,
                                int32_t device, nf4_path *path);
nf4_status nf4_int4_matmul_path(const nf4_int4_tensor *weight, const nf4_matmul_args *args,
                                int32_t device, nf4_path *path);
nf4_status nf4_matmul_grouped_path(const nf4_tensor *weight, const nf4_grouped_args *args,
                                   int32_t device, nf4_path *path);
nf4_status nf4_matmul_grouped_grad_path(const nf4_tensor *weight, const nf4_grouped_args *args,
                                        int32_t device, nf4_path *path);
nf4_status nf4_int4_matmul_grouped_path(const nf4_int4_tensor *weight, const nf4_grouped_args *args,
                                        int32_t device, nf4_path *path);
nf4_status nf4_lora_grad_path(const nf4_lora_grad_args *args, int32_t device, nf4_path *path);
nf4_status nf4_set_costs(const char *text, size_t bytes);
nf4_status nf4_device_info(int32_t device, nf4_device *info);
const char *nf4_cpu_variant(void);
