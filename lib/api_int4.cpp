// The extern "C" functions of integer weights.
#include "api_calls.hpp"
#include "cpu/backend.hpp"
#include "cuda/backend.hpp"
#include "nf4/nf4.h"
#include "status.hpp"
#include "validate.hpp"
#include "validate_parts.hpp"

extern "C" {

nf4_status nf4_int4_tensor_sizes(const nf4_int4_tensor *tensor, nf4_int4_sizes *sizes) {
  nf4::Int4Weight weight;
  if (const nf4_status status = nf4::validate_shape(tensor, weight)) return status;
  if (sizes == nullptr) return nf4::fail(NF4_STATUS_INVALID_ARGUMENT, "sizes is NULL");
  if (const nf4_status status =
          nf4::validate_struct_size("nf4_int4_sizes", sizes->struct_size, sizeof(nf4_int4_sizes)))
    return status;
  const nf4::Int4Bytes bytes = nf4::bytes_of(weight);
  sizes->groups = weight.groups;
  sizes->packed_bytes = bytes.packed;
  sizes->scales_bytes = bytes.scales;
  sizes->zeros_bytes = bytes.zeros;
  return NF4_STATUS_OK;
}

nf4_status nf4_int4_dequant_launch(const nf4_int4_tensor *weight, void *out, nf4_dtype out_dtype,
                                   nf4_stream stream) {
  return nf4::dequant_launch<nf4::Int4Weight>(weight, out, out_dtype, stream);
}

nf4_status nf4_int4_dequant_cpu(const nf4_int4_tensor *weight, void *out, nf4_dtype out_dtype,
                                int32_t threads) {
  return nf4::dequant_cpu<nf4::Int4Weight>(weight, out, out_dtype, threads);
}

nf4_status nf4_int4_quantize_launch(const void *in, nf4_dtype in_dtype,
                                    const nf4_int4_tensor *weight, int32_t symmetric,
                                    nf4_stream stream) {
  return nf4::quantize_launch<nf4::Int4QuantizeProblem>(stream, in, in_dtype, weight, symmetric);
}

nf4_status nf4_int4_quantize_cpu(const void *in, nf4_dtype in_dtype, const nf4_int4_tensor *weight,
                                 int32_t symmetric, int32_t threads) {
  return nf4::quantize_cpu<nf4::Int4QuantizeProblem>(threads, in, in_dtype, weight, symmetric);
}

nf4_status nf4_int4_reorder_launch(const nf4_int4_tensor *from, const nf4_int4_tensor *to,
                                   nf4_stream stream) {
  nf4::Int4ReorderProblem problem;
  if (const nf4_status status = nf4::validate_reorder(from, to, problem)) return status;
  if (problem.from.elements == 0) return NF4_STATUS_OK;
  return nf4::cuda::reorder(problem, stream);
}

nf4_status nf4_int4_reorder_cpu(const nf4_int4_tensor *from, const nf4_int4_tensor *to,
                                int32_t threads) {
  nf4::Int4ReorderProblem problem;
  if (const nf4_status status = nf4::validate_reorder(from, to, problem)) return status;
  if (const nf4_status status = nf4::validate_threads(threads)) return status;
  if (const nf4_status status = nf4::validate_columns(problem.from)) return status;
  if (problem.from.elements != 0) nf4::cpu::reorder(problem, threads);
  return NF4_STATUS_OK;
}

nf4_status nf4_int4_matmul_workspace_size(const nf4_int4_tensor *weight,
                                          const nf4_matmul_args *args, size_t *bytes) {
  return nf4::matmul_workspace_size<nf4::Int4Weight>(weight, args, bytes);
}

nf4_status nf4_int4_matmul_launch(const nf4_int4_tensor *weight, const nf4_matmul_args *args,
                                  void *workspace, size_t workspace_bytes, nf4_stream stream) {
  return nf4::matmul_launch<nf4::Int4Weight>(weight, args, workspace, workspace_bytes, stream);
}

nf4_status nf4_int4_matmul_cpu(const nf4_int4_tensor *weight, const nf4_matmul_args *args,
                               int32_t threads) {
  return nf4::matmul_cpu<nf4::Int4Weight>(weight, args, threads);
}

nf4_status nf4_int4_matmul_batch_workspace_size(const nf4_int4_tensor *const *weights,
                                                const nf4_matmul_args *args, size_t count,
                                                size_t *bytes) {
  return nf4::matmul_batch_workspace_size<nf4::Int4Weight>(weights, args, count, bytes);
}

nf4_status nf4_int4_matmul_batch_launch(const nf4_int4_tensor *const *weights,
                                        const nf4_matmul_args *args, size_t count, void *workspace,
                                        size_t workspace_bytes, nf4_stream stream) {
  return nf4::matmul_batch_launch<nf4::Int4Weight>(weights, args, count, workspace, workspace_bytes,
                                                   stream);
}

nf4_status nf4_int4_matmul_batch_cpu(const nf4_int4_tensor *const *weights,
                                     const nf4_matmul_args *args, size_t count, int32_t threads) {
  return nf4::matmul_batch_cpu<nf4::Int4Weight>(weights, args, count, threads);
}

nf4_status nf4_int4_matmul_plan(const nf4_int4_tensor *const *weights, const nf4_matmul_args *args,
                                size_t count, int32_t device, int32_t *launches,
                                const char **kernels) {
  return nf4::matmul_plan<nf4::Int4Weight>(weights, args, count, device, launches, kernels);
}

nf4_status nf4_int4_matmul_path(const nf4_int4_tensor *weight, const nf4_matmul_args *args,
                                int32_t device, nf4_path *path) {
  return nf4::matmul_path<nf4::Int4Weight>(weight, args, device, path);
}

nf4_status nf4_int4_matmul_grouped_path(const nf4_int4_tensor *weight, const nf4_grouped_args *args,
                                        int32_t device, nf4_path *path) {
  return nf4::matmul_grouped_path<nf4::Int4Weight>(weight, args, device, path);
}

nf4_status nf4_int4_matmul_grouped_workspace_size(const nf4_int4_tensor *weight,
                                                  const nf4_grouped_args *args, size_t *bytes) {
  return nf4::matmul_grouped_workspace_size<nf4::Int4Weight>(weight, args, bytes);
}

nf4_status nf4_int4_matmul_grouped_launch(const nf4_int4_tensor *weight,
                                          const nf4_grouped_args *args, void *workspace,
                                          size_t workspace_bytes, nf4_stream stream) {
  return nf4::matmul_grouped_launch<nf4::Int4Weight>(weight, args, workspace, workspace_bytes,
                                                     stream);
}

nf4_status nf4_int4_matmul_grouped_cpu(const nf4_int4_tensor *weight, const nf4_grouped_args *args,
                                       int32_t threads) {
  return nf4::matmul_grouped_cpu<nf4::Int4Weight>(weight, args, threads);
}

}  // extern "C"
