/* A libnf4 that computes nothing: launches return the status that a test chose and record
 * their arguments, so that what the bindings pass is seen without a GPU. */
#include <string.h>

#include "nf4/nf4.h"

enum { FAKE_PRODUCTS = 4 };

typedef struct fake_call {
  int32_t count;
  nf4_tensor weight;
  const void *in;
  void *out;
  nf4_dtype dtype;
  void *workspace;
  size_t workspace_bytes;
  nf4_stream stream;
  nf4_matmul_args matmul;
  int32_t threads;
  size_t products; /* of a batch, and the first of them */
  nf4_tensor weights[FAKE_PRODUCTS];
  nf4_matmul_args matmuls[FAKE_PRODUCTS];
  nf4_int4_tensor int4[FAKE_PRODUCTS]; /* the integer weights of any call */
  int32_t symmetric;
  int32_t gradient;
  nf4_lora lora; /* of a matmul that has one */
  nf4_grouped_args grouped;
  nf4_lora_grad_args lora_grad;
} fake_call;

NF4_API fake_call fake_last;
NF4_API nf4_status fake_status = NF4_STATUS_OK;
NF4_API size_t fake_workspace_per_row = 0; /* that a matmul needs */
NF4_API int32_t fake_version = NF4_VERSION_MAJOR * 10000 + NF4_VERSION_MINOR * 100;

static const float table[256];

const char *nf4_status_string(nf4_status status) {
  return status == NF4_STATUS_OK ? "fake OK" : "fake failure";
}
const char *nf4_last_error(void) { return "what the fake says is wrong"; }
int32_t nf4_version(void) { return fake_version; }
const char *nf4_version_string(void) { return "9.9.9"; }
const char *nf4_build_info(void) { return "compiler: none\ncuda: none"; }
const float *nf4_codebook(nf4_format format) { return format ? table : NULL; }
const float *nf4_scale_code(void) { return table; }
const char *nf4_cpu_variant(void) { return "fake"; }

nf4_status nf4_tensor_sizes(const nf4_tensor *tensor, nf4_sizes *sizes) {
  sizes->elements = tensor->rows * tensor->cols;
  sizes->blocks = (sizes->elements + tensor->blocksize - 1) / tensor->blocksize;
  sizes->nested_blocks = 0;
  if (tensor->nested_blocksize != 0)
    sizes->nested_blocks =
        (sizes->blocks + tensor->nested_blocksize - 1) / tensor->nested_blocksize;
  sizes->packed_bytes = (sizes->elements + 1) / 2;
  sizes->absmax_bytes = sizes->blocks * (tensor->nested_blocksize ? 1 : 4);
  return NF4_STATUS_OK;
}

nf4_status nf4_quantize_workspace_size(const nf4_tensor *tensor, size_t *bytes) {
  *bytes = tensor->nested_blocksize ? 160 : 0;
  return NF4_STATUS_OK;
}

static nf4_status record(fake_call call) {
  if (call.matmul.lora != NULL) call.lora = *call.matmul.lora;
  call.count = fake_last.count + 1;
  fake_last = call;
  return fake_status;
}

nf4_status nf4_dequant_launch(const nf4_tensor *weight, void *out, nf4_dtype out_dtype,
                              nf4_stream stream) {
  fake_call call = {.weight = *weight, .out = out, .dtype = out_dtype, .stream = stream};
  return record(call);
}

nf4_status nf4_quantize_launch(const void *in, nf4_dtype in_dtype, const nf4_tensor *weight,
                               void *workspace, size_t workspace_bytes, nf4_stream stream) {
  fake_call call = {.weight = *weight,
                    .in = in,
                    .dtype = in_dtype,
                    .workspace = workspace,
                    .workspace_bytes = workspace_bytes,
                    .stream = stream};
  return record(call);
}

nf4_status nf4_dequant_cpu(const nf4_tensor *weight, void *out, nf4_dtype out_dtype,
                           int32_t threads) {
  (void)threads;
  return nf4_dequant_launch(weight, out, out_dtype, NULL);
}

nf4_status nf4_quantize_cpu(const void *in, nf4_dtype in_dtype, const nf4_tensor *weight,
                            void *workspace, size_t workspace_bytes, int32_t threads) {
  (void)threads;
  return nf4_quantize_launch(in, in_dtype, weight, workspace, workspace_bytes, NULL);
}

nf4_status nf4_matmul_workspace_size(const nf4_tensor *weight, const nf4_matmul_args *args,
                                     size_t *bytes) {
  (void)weight;
  *bytes = (size_t)args->m * fake_workspace_per_row;
  return NF4_STATUS_OK;
}

nf4_status nf4_matmul_launch(const nf4_tensor *weight, const nf4_matmul_args *args, void *workspace,
                             size_t workspace_bytes, nf4_stream stream) {
  fake_call call = {.weight = *weight,
                    .matmul = *args,
                    .workspace = workspace,
                    .workspace_bytes = workspace_bytes,
                    .stream = stream};
  return record(call);
}

nf4_status nf4_matmul_cpu(const nf4_tensor *weight, const nf4_matmul_args *args, int32_t threads) {
  fake_call call = {.weight = *weight, .matmul = *args, .threads = threads};
  return record(call);
}

nf4_status nf4_matmul_batch_workspace_size(const nf4_tensor *const *weights,
                                           const nf4_matmul_args *args, size_t count,
                                           size_t *bytes) {
  (void)weights;
  *bytes = 0;
  for (size_t i = 0; i < count; i++) *bytes += (size_t)args[i].m * fake_workspace_per_row;
  return NF4_STATUS_OK;
}

nf4_status nf4_matmul_grad_workspace_size(const nf4_tensor *weight, const nf4_matmul_args *args,
                                          size_t *bytes) {
  nf4_matmul_workspace_size(weight, args, bytes);
  *bytes += args->lora ? (size_t)args->lora->rank : 0;
  return NF4_STATUS_OK;
}

nf4_status nf4_matmul_grad_launch(const nf4_tensor *weight, const nf4_matmul_args *args,
                                  void *workspace, size_t workspace_bytes, nf4_stream stream) {
  fake_call call = {.weight = *weight,
                    .matmul = *args,
                    .workspace = workspace,
                    .workspace_bytes = workspace_bytes,
                    .stream = stream,
                    .gradient = 1};
  return record(call);
}

nf4_status nf4_matmul_grad_cpu(const nf4_tensor *weight, const nf4_matmul_args *args,
                               int32_t threads) {
  fake_call call = {.weight = *weight, .matmul = *args, .threads = threads, .gradient = 1};
  return record(call);
}

nf4_status nf4_lora_grad_launch(const nf4_lora_grad_args *args, nf4_stream stream) {
  fake_call call = {.lora_grad = *args, .stream = stream};
  return record(call);
}

nf4_status nf4_lora_grad_cpu(const nf4_lora_grad_args *args, int32_t threads) {
  fake_call call = {.lora_grad = *args, .threads = threads};
  return record(call);
}

nf4_status nf4_matmul_grouped_workspace_size(const nf4_tensor *weight, const nf4_grouped_args *args,
                                             size_t *bytes) {
  (void)weight;
  *bytes = (size_t)args->m * fake_workspace_per_row;
  return NF4_STATUS_OK;
}

nf4_status nf4_matmul_grouped_launch(const nf4_tensor *weight, const nf4_grouped_args *args,
                                     void *workspace, size_t workspace_bytes, nf4_stream stream) {
  fake_call call = {.weight = *weight,
                    .grouped = *args,
                    .workspace = workspace,
                    .workspace_bytes = workspace_bytes,
                    .stream = stream};
  return record(call);
}

nf4_status nf4_matmul_grouped_cpu(const nf4_tensor *weight, const nf4_grouped_args *args,
                                  int32_t threads) {
  fake_call call = {.weight = *weight, .grouped = *args, .threads = threads};
  return record(call);
}

nf4_status nf4_matmul_grouped_grad_workspace_size(const nf4_tensor *weight,
                                                  const nf4_grouped_args *args, size_t *bytes) {
  return nf4_matmul_grouped_workspace_size(weight, args, bytes);
}

nf4_status nf4_matmul_grouped_grad_launch(const nf4_tensor *weight, const nf4_grouped_args *args,
                                          void *workspace, size_t workspace_bytes,
                                          nf4_stream stream) {
  const nf4_status status =
      nf4_matmul_grouped_launch(weight, args, workspace, workspace_bytes, stream);
  fake_last.gradient = 1;
  return status;
}

nf4_status nf4_matmul_grouped_grad_cpu(const nf4_tensor *weight, const nf4_grouped_args *args,
                                       int32_t threads) {
  const nf4_status status = nf4_matmul_grouped_cpu(weight, args, threads);
  fake_last.gradient = 1;
  return status;
}

static fake_call batch_call(const nf4_tensor *const *weights, const nf4_matmul_args *args,
                            size_t count) {
  fake_call call = {.products = count};
  for (size_t i = 0; i < count && i < FAKE_PRODUCTS; i++) {
    call.weights[i] = *weights[i];
    call.matmuls[i] = args[i];
  }
  return call;
}

nf4_status nf4_matmul_batch_launch(const nf4_tensor *const *weights, const nf4_matmul_args *args,
                                   size_t count, void *workspace, size_t workspace_bytes,
                                   nf4_stream stream) {
  fake_call call = batch_call(weights, args, count);
  call.workspace = workspace;
  call.workspace_bytes = workspace_bytes;
  call.stream = stream;
  return record(call);
}

nf4_status nf4_matmul_plan(const nf4_tensor *const *weights, const nf4_matmul_args *args,
                           size_t count, int32_t device, int32_t *launches, const char **kernels) {
  (void)weights, (void)args, (void)device;
  for (size_t i = 0; i < count; ++i) {
    launches[i] = -1;
    kernels[i] = NULL;
  }
  return fake_status;
}

nf4_status nf4_matmul_batch_cpu(const nf4_tensor *const *weights, const nf4_matmul_args *args,
                                size_t count, int32_t threads) {
  fake_call call = batch_call(weights, args, count);
  call.threads = threads;
  return record(call);
}

/* ---- Integer weights ------------------------------------------------------ */

nf4_status nf4_int4_tensor_sizes(const nf4_int4_tensor *tensor, nf4_int4_sizes *sizes) {
  const int64_t group_size = tensor->group_size == -1 ? tensor->cols : tensor->group_size;
  sizes->groups = tensor->cols == 0 ? 0 : tensor->cols / group_size;
  sizes->packed_bytes = tensor->rows * tensor->cols / 2;
  sizes->scales_bytes = tensor->rows * sizes->groups * 2;
  sizes->zeros_bytes = (tensor->rows + 7) / 8 * sizes->groups * 4;
  return NF4_STATUS_OK;
}

nf4_status nf4_int4_dequant_launch(const nf4_int4_tensor *weight, void *out, nf4_dtype out_dtype,
                                   nf4_stream stream) {
  fake_call call = {.int4 = {*weight}, .out = out, .dtype = out_dtype, .stream = stream};
  return record(call);
}

nf4_status nf4_int4_dequant_cpu(const nf4_int4_tensor *weight, void *out, nf4_dtype out_dtype,
                                int32_t threads) {
  fake_call call = {.int4 = {*weight}, .out = out, .dtype = out_dtype, .threads = threads};
  return record(call);
}

nf4_status nf4_int4_quantize_launch(const void *in, nf4_dtype in_dtype,
                                    const nf4_int4_tensor *weight, int32_t symmetric,
                                    nf4_stream stream) {
  fake_call call = {
      .int4 = {*weight}, .in = in, .dtype = in_dtype, .symmetric = symmetric, .stream = stream};
  return record(call);
}

nf4_status nf4_int4_quantize_cpu(const void *in, nf4_dtype in_dtype, const nf4_int4_tensor *weight,
                                 int32_t symmetric, int32_t threads) {
  (void)threads;
  return nf4_int4_quantize_launch(in, in_dtype, weight, symmetric, NULL);
}

nf4_status nf4_int4_reorder_launch(const nf4_int4_tensor *from, const nf4_int4_tensor *to,
                                   nf4_stream stream) {
  fake_call call = {.int4 = {*from, *to}, .stream = stream};
  return record(call);
}

nf4_status nf4_int4_reorder_cpu(const nf4_int4_tensor *from, const nf4_int4_tensor *to,
                                int32_t threads) {
  (void)threads;
  return nf4_int4_reorder_launch(from, to, NULL);
}

nf4_status nf4_int4_matmul_workspace_size(const nf4_int4_tensor *weight,
                                          const nf4_matmul_args *args, size_t *bytes) {
  (void)weight;
  return nf4_matmul_workspace_size(NULL, args, bytes);
}

nf4_status nf4_int4_matmul_batch_workspace_size(const nf4_int4_tensor *const *weights,
                                                const nf4_matmul_args *args, size_t count,
                                                size_t *bytes) {
  (void)weights;
  return nf4_matmul_batch_workspace_size(NULL, args, count, bytes);
}

nf4_status nf4_int4_matmul_batch_launch(const nf4_int4_tensor *const *weights,
                                        const nf4_matmul_args *args, size_t count, void *workspace,
                                        size_t workspace_bytes, nf4_stream stream) {
  fake_call call = {.products = count,
                    .matmul = args[0],
                    .workspace = workspace,
                    .workspace_bytes = workspace_bytes,
                    .stream = stream};
  for (size_t i = 0; i < count && i < FAKE_PRODUCTS; i++) {
    call.int4[i] = *weights[i];
    call.matmuls[i] = args[i];
  }
  return record(call);
}

nf4_status nf4_int4_matmul_launch(const nf4_int4_tensor *weight, const nf4_matmul_args *args,
                                  void *workspace, size_t workspace_bytes, nf4_stream stream) {
  return nf4_int4_matmul_batch_launch(&weight, args, 1, workspace, workspace_bytes, stream);
}

nf4_status nf4_int4_matmul_batch_cpu(const nf4_int4_tensor *const *weights,
                                     const nf4_matmul_args *args, size_t count, int32_t threads) {
  const nf4_status status = nf4_int4_matmul_batch_launch(weights, args, count, NULL, 0, NULL);
  fake_last.threads = threads;
  return status;
}

nf4_status nf4_int4_matmul_cpu(const nf4_int4_tensor *weight, const nf4_matmul_args *args,
                               int32_t threads) {
  return nf4_int4_matmul_batch_cpu(&weight, args, 1, threads);
}

nf4_status nf4_int4_matmul_plan(const nf4_int4_tensor *const *weights, const nf4_matmul_args *args,
                                size_t count, int32_t device, int32_t *launches,
                                const char **kernels) {
  (void)weights;
  return nf4_matmul_plan(NULL, args, count, device, launches, kernels);
}

nf4_status nf4_int4_matmul_grouped_workspace_size(const nf4_int4_tensor *weight,
                                                  const nf4_grouped_args *args, size_t *bytes) {
  (void)weight;
  return nf4_matmul_grouped_workspace_size(NULL, args, bytes);
}

nf4_status nf4_int4_matmul_grouped_launch(const nf4_int4_tensor *weight,
                                          const nf4_grouped_args *args, void *workspace,
                                          size_t workspace_bytes, nf4_stream stream) {
  fake_call call = {.int4 = {*weight},
                    .grouped = *args,
                    .workspace = workspace,
                    .workspace_bytes = workspace_bytes,
                    .stream = stream};
  return record(call);
}

nf4_status nf4_int4_matmul_grouped_cpu(const nf4_int4_tensor *weight, const nf4_grouped_args *args,
                                       int32_t threads) {
  fake_call call = {.int4 = {*weight}, .grouped = *args, .threads = threads};
  return record(call);
}

/* What the path functions answer, by nf4_path. */
nf4_path fake_path = NF4_PATH_FUSED;

static nf4_status answer_path(nf4_path *path) {
  *path = fake_path;
  return fake_status;
}

nf4_status nf4_matmul_path(const nf4_tensor *weight, const nf4_matmul_args *args, int32_t device,
                           nf4_path *path) {
  (void)weight, (void)args, (void)device;
  return answer_path(path);
}

nf4_status nf4_matmul_grad_path(const nf4_tensor *weight, const nf4_matmul_args *args,
                                int32_t device, nf4_path *path) {
  return nf4_matmul_path(weight, args, device, path);
}

nf4_status nf4_int4_matmul_path(const nf4_int4_tensor *weight, const nf4_matmul_args *args,
                                int32_t device, nf4_path *path) {
  (void)weight;
  return nf4_matmul_path(NULL, args, device, path);
}

nf4_status nf4_matmul_grouped_path(const nf4_tensor *weight, const nf4_grouped_args *args,
                                   int32_t device, nf4_path *path) {
  (void)weight, (void)args, (void)device;
  return answer_path(path);
}

nf4_status nf4_matmul_grouped_grad_path(const nf4_tensor *weight, const nf4_grouped_args *args,
                                        int32_t device, nf4_path *path) {
  return nf4_matmul_grouped_path(weight, args, device, path);
}

nf4_status nf4_int4_matmul_grouped_path(const nf4_int4_tensor *weight, const nf4_grouped_args *args,
                                        int32_t device, nf4_path *path) {
  (void)weight;
  return nf4_matmul_grouped_path(NULL, args, device, path);
}

nf4_status nf4_lora_grad_path(const nf4_lora_grad_args *args, int32_t device, nf4_path *path) {
  (void)args, (void)device;
  return answer_path(path);
}

nf4_status nf4_set_costs(const char *text, size_t bytes) {
  (void)text, (void)bytes;
  return NF4_STATUS_OK;
}

nf4_status nf4_device_info(int32_t device, nf4_device *info) {
  info->device_count = 3;
  info->compute_capability = 121;
  info->multiprocessors = device;
  info->driver_version = 13000;
  info->runtime_version = 13010;
  info->memory_bytes = (int64_t)5 << 32;
  strcpy(info->name, "A fake GPU");
  strcpy(info->dequant_variant, "sm90");
  info->shared_memory_bytes = 99 << 10;
  info->timed = 0;
  return fake_status;
}
