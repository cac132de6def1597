// The extern "C" functions of codebook weights: each checks its arguments, then calls a backend.
#include <cstddef>
#include <cstring>

#include "api_calls.hpp"
#include "core/formats.hpp"
#include "cpu/backend.hpp"
#include "cuda/backend.hpp"
#include "nf4/nf4.h"
#include "nf4_config.hpp"
#include "status.hpp"
#include "validate.hpp"
#include "validate_parts.hpp"

#define NF4_TEXT_(x) #x
#define NF4_TEXT(x) NF4_TEXT_(x)

extern "C" {

int32_t nf4_version(void) {
  return NF4_VERSION_MAJOR * 10000 + NF4_VERSION_MINOR * 100 + NF4_VERSION_PATCH;
}

const char *nf4_version_string(void) {
  return NF4_TEXT(NF4_VERSION_MAJOR) "." NF4_TEXT(NF4_VERSION_MINOR) "." NF4_TEXT(
      NF4_VERSION_PATCH);
}

const char *nf4_build_info(void) { return NF4_BUILD_INFO; }

const float *nf4_codebook(nf4_format format) {
  const int row = nf4::format_row(format);
  return row < 0 ? nullptr : nf4::kFormats[row].codebook.data();
}

const float *nf4_scale_code(void) { return nf4::kScaleCode.data(); }

nf4_status nf4_tensor_sizes(const nf4_tensor *tensor, nf4_sizes *sizes) {
  nf4::Weight weight;
  if (const nf4_status status = nf4::validate_shape(tensor, weight)) return status;
  if (sizes == nullptr) return nf4::fail(NF4_STATUS_INVALID_ARGUMENT, "sizes is NULL");
  if (const nf4_status status =
          nf4::validate_struct_size("nf4_sizes", sizes->struct_size, sizeof(nf4_sizes)))
    return status;
  sizes->elements = weight.elements;
  sizes->blocks = weight.blocks;
  sizes->nested_blocks = weight.nested_blocks;
  sizes->packed_bytes = (weight.elements + 1) / 2;
  sizes->absmax_bytes = weight.blocks * weight.scale_size();
  return NF4_STATUS_OK;
}

nf4_status nf4_quantize_workspace_size(const nf4_tensor *tensor, size_t *bytes) {
  nf4::Weight weight;
  if (const nf4_status status = nf4::validate_shape(tensor, weight)) return status;
  if (bytes == nullptr) return nf4::fail(NF4_STATUS_INVALID_ARGUMENT, "bytes is NULL");
  *bytes = static_cast<size_t>(nf4::QuantizeWorkspace(weight).bytes());
  return NF4_STATUS_OK;
}

nf4_status nf4_dequant_launch(const nf4_tensor *weight, void *out, nf4_dtype out_dtype,
                              nf4_stream stream) {
  return nf4::dequant_launch<nf4::Weight>(weight, out, out_dtype, stream);
}

nf4_status nf4_dequant_cpu(const nf4_tensor *weight, void *out, nf4_dtype out_dtype,
                           int32_t threads) {
  return nf4::dequant_cpu<nf4::Weight>(weight, out, out_dtype, threads);
}

nf4_status nf4_quantize_launch(const void *in, nf4_dtype in_dtype, const nf4_tensor *weight,
                               void *workspace, size_t workspace_bytes, nf4_stream stream) {
  return nf4::quantize_launch<nf4::QuantizeProblem>(stream, in, in_dtype, weight, workspace,
                                                    workspace_bytes);
}

nf4_status nf4_quantize_cpu(const void *in, nf4_dtype in_dtype, const nf4_tensor *weight,
                            void *workspace, size_t workspace_bytes, int32_t threads) {
  return nf4::quantize_cpu<nf4::QuantizeProblem>(threads, in, in_dtype, weight, workspace,
                                                 workspace_bytes);
}

nf4_status nf4_matmul_workspace_size(const nf4_tensor *weight, const nf4_matmul_args *args,
                                     size_t *bytes) {
  return nf4::matmul_workspace_size<nf4::Weight>(weight, args, bytes);
}

nf4_status nf4_matmul_launch(const nf4_tensor *weight, const nf4_matmul_args *args, void *workspace,
                             size_t workspace_bytes, nf4_stream stream) {
  return nf4::matmul_launch<nf4::Weight>(weight, args, workspace, workspace_bytes, stream);
}

nf4_status nf4_matmul_cpu(const nf4_tensor *weight, const nf4_matmul_args *args, int32_t threads) {
  return nf4::matmul_cpu<nf4::Weight>(weight, args, threads);
}

nf4_status nf4_matmul_grad_workspace_size(const nf4_tensor *weight, const nf4_matmul_args *args,
                                          size_t *bytes) {
  return nf4::matmul_workspace_size<nf4::Weight>(weight, args, bytes, true);
}

nf4_status nf4_matmul_grad_launch(const nf4_tensor *weight, const nf4_matmul_args *args,
                                  void *workspace, size_t workspace_bytes, nf4_stream stream) {
  return nf4::matmul_launch<nf4::Weight>(weight, args, workspace, workspace_bytes, stream, true);
}

nf4_status nf4_matmul_grad_cpu(const nf4_tensor *weight, const nf4_matmul_args *args,
                               int32_t threads) {
  return nf4::matmul_cpu<nf4::Weight>(weight, args, threads, true);
}

nf4_status nf4_lora_grad_launch(const nf4_lora_grad_args *args, nf4_stream stream) {
  nf4::LoraGradProblem problem;
  if (const nf4_status status = nf4::validate_lora_grad(args, problem)) return status;
  return problem.empty() ? NF4_STATUS_OK : nf4::cuda::lora_grad(problem, stream);
}

nf4_status nf4_lora_grad_cpu(const nf4_lora_grad_args *args, int32_t threads) {
  nf4::LoraGradProblem problem;
  if (const nf4_status status = nf4::validate_lora_grad(args, problem)) return status;
  if (const nf4_status status = nf4::validate_threads(threads)) return status;
  nf4::cpu::lora_grad(problem, threads);
  return NF4_STATUS_OK;
}

nf4_status nf4_matmul_batch_workspace_size(const nf4_tensor *const *weights,
                                           const nf4_matmul_args *args, size_t count,
                                           size_t *bytes) {
  return nf4::matmul_batch_workspace_size<nf4::Weight>(weights, args, count, bytes);
}

nf4_status nf4_matmul_batch_launch(const nf4_tensor *const *weights, const nf4_matmul_args *args,
                                   size_t count, void *workspace, size_t workspace_bytes,
                                   nf4_stream stream) {
  return nf4::matmul_batch_launch<nf4::Weight>(weights, args, count, workspace, workspace_bytes,
                                               stream);
}

nf4_status nf4_matmul_batch_cpu(const nf4_tensor *const *weights, const nf4_matmul_args *args,
                                size_t count, int32_t threads) {
  return nf4::matmul_batch_cpu<nf4::Weight>(weights, args, count, threads);
}

nf4_status nf4_matmul_plan(const nf4_tensor *const *weights, const nf4_matmul_args *args,
                           size_t count, int32_t device, int32_t *launches, const char **kernels) {
  return nf4::matmul_plan<nf4::Weight>(weights, args, count, device, launches, kernels);
}

nf4_status nf4_matmul_grouped_workspace_size(const nf4_tensor *weight, const nf4_grouped_args *args,
                                             size_t *bytes) {
  return nf4::matmul_grouped_workspace_size<nf4::Weight>(weight, args, bytes);
}

nf4_status nf4_matmul_grouped_launch(const nf4_tensor *weight, const nf4_grouped_args *args,
                                     void *workspace, size_t workspace_bytes, nf4_stream stream) {
  return nf4::matmul_grouped_launch<nf4::Weight>(weight, args, workspace, workspace_bytes, stream);
}

nf4_status nf4_matmul_grouped_cpu(const nf4_tensor *weight, const nf4_grouped_args *args,
                                  int32_t threads) {
  return nf4::matmul_grouped_cpu<nf4::Weight>(weight, args, threads);
}

nf4_status nf4_matmul_grouped_grad_workspace_size(const nf4_tensor *weight,
                                                  const nf4_grouped_args *args, size_t *bytes) {
  return nf4::matmul_grouped_workspace_size<nf4::Weight>(weight, args, bytes, true);
}

nf4_status nf4_matmul_grouped_grad_launch(const nf4_tensor *weight, const nf4_grouped_args *args,
                                          void *workspace, size_t workspace_bytes,
                                          nf4_stream stream) {
  return nf4::matmul_grouped_launch<nf4::Weight>(weight, args, workspace, workspace_bytes, stream,
                                                 true);
}

nf4_status nf4_matmul_grouped_grad_cpu(const nf4_tensor *weight, const nf4_grouped_args *args,
                                       int32_t threads) {
  return nf4::matmul_grouped_cpu<nf4::Weight>(weight, args, threads, true);
}

nf4_status nf4_matmul_path(const nf4_tensor *weight, const nf4_matmul_args *args, int32_t device,
                           nf4_path *path) {
  return nf4::matmul_path<nf4::Weight>(weight, args, device, path);
}

nf4_status nf4_matmul_grad_path(const nf4_tensor *weight, const nf4_matmul_args *args,
                                int32_t device, nf4_path *path) {
  return nf4::matmul_path<nf4::Weight>(weight, args, device, path, true);
}

nf4_status nf4_matmul_grouped_path(const nf4_tensor *weight, const nf4_grouped_args *args,
                                   int32_t device, nf4_path *path) {
  return nf4::matmul_grouped_path<nf4::Weight>(weight, args, device, path);
}

nf4_status nf4_matmul_grouped_grad_path(const nf4_tensor *weight, const nf4_grouped_args *args,
                                        int32_t device, nf4_path *path) {
  return nf4::matmul_grouped_path<nf4::Weight>(weight, args, device, path, true);
}

nf4_status nf4_lora_grad_path(const nf4_lora_grad_args *args, int32_t device, nf4_path *path) {
  nf4::LoraGradProblem problem;
  if (const nf4_status status = nf4::validate_lora_grad_shape(args, problem)) return status;
  return nf4::find_path(
      problem.empty(), false, device, path, [] { return NF4_PATH_FUSED; },
      [&](nf4_path &found) { return nf4::cuda::lora_grad_path(problem, device, found); });
}

nf4_status nf4_set_costs(const char *text, size_t bytes) {
  return nf4::cuda::set_costs(text, bytes);
}

nf4_status nf4_device_info(int32_t device, nf4_device *info) {
  if (info == nullptr) return nf4::fail(NF4_STATUS_INVALID_ARGUMENT, "info is NULL");
  // Callers compiled before shared_memory_bytes was appended pass this size.
  const size_t size = info->struct_size;
  if (size != offsetof(nf4_device, shared_memory_bytes))
    if (const nf4_status status = nf4::validate_struct_size("nf4_device", size, sizeof(nf4_device)))
      return status;
  nf4_device found{};
  found.struct_size = size;
  const nf4_status status = nf4::cuda::device_info(device, found);
  std::memcpy(info, &found, size);
  return status;
}

const char *nf4_cpu_variant(void) { return nf4::cpu::variant_in_use().name; }

}  // extern "C"
