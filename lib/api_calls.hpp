// The bodies of the functions of nf4.h, for any kind of weight: W is Weight for an nf4_tensor and
// Int4Weight for an nf4_int4_tensor.
#pragma once

#include "cpu/backend.hpp"
#include "cuda/backend.hpp"
#include "nf4/nf4.h"
#include "status.hpp"
#include "validate.hpp"

namespace nf4 {

template <class W, class Tensor>
nf4_status dequant_launch(const Tensor *weight, void *out, nf4_dtype dtype, nf4_stream stream) {
  DequantProblemOf<W> problem;
  if (const nf4_status status = validate_dequant(weight, out, dtype, problem)) return status;
  if (problem.weight.elements == 0) return NF4_STATUS_OK;
  return cuda::dequant(problem, stream);
}

template <class W, class Tensor>
nf4_status dequant_cpu(const Tensor *weight, void *out, nf4_dtype dtype, int32_t threads) {
  DequantProblemOf<W> problem;
  if (const nf4_status status = validate_dequant(weight, out, dtype, problem)) return status;
  if (const nf4_status status = validate_threads(threads)) return status;
  if (const nf4_status status = validate_columns(problem.weight)) return status;
  if (problem.weight.elements != 0) cpu::dequant(problem, threads);
  return NF4_STATUS_OK;
}

// `arguments` are those of validate_quantize, which differ between the kinds of weights.
template <class Problem, class... Arguments>
nf4_status quantize_launch(nf4_stream stream, Arguments... arguments) {
  Problem problem;
  if (const nf4_status status = validate_quantize(arguments..., problem)) return status;
  if (problem.weight.elements == 0) return NF4_STATUS_OK;
  return cuda::quantize(problem, stream);
}

template <class Problem, class... Arguments>
nf4_status quantize_cpu(int32_t threads, Arguments... arguments) {
  Problem problem;
  if (const nf4_status status = validate_quantize(arguments..., problem)) return status;
  if (const nf4_status status = validate_threads(threads)) return status;
  if (problem.weight.elements != 0) cpu::quantize(problem, threads);
  return NF4_STATUS_OK;
}

// These overloads are for a product or its gradient. Integer weights have no gradient.
inline int64_t workspace_bytes_of(const MatmulProblem &problem) {
  return problem.gradient ? cuda::matmul_grad_workspace_bytes(problem)
                          : cuda::matmul_workspace_bytes(problem);
}
inline int64_t workspace_bytes_of(const Int4MatmulProblem &problem) {
  return cuda::matmul_workspace_bytes(problem);
}
inline nf4_status launch(const MatmulProblem &problem, nf4_stream stream) {
  return problem.gradient ? cuda::matmul_grad(problem, stream) : cuda::matmul(&problem, 1, stream);
}
inline nf4_status launch(const Int4MatmulProblem &problem, nf4_stream stream) {
  return cuda::matmul(&problem, 1, stream);
}
inline void run_on_cpu(const MatmulProblem &problem, int threads) {
  problem.gradient ? cpu::matmul_grad(problem, threads) : cpu::matmul(&problem, 1, threads);
}
inline void run_on_cpu(const Int4MatmulProblem &problem, int threads) {
  cpu::matmul(&problem, 1, threads);
}

template <class W, class Tensor>
nf4_status matmul_workspace_size(const Tensor *weight, const nf4_matmul_args *args, size_t *bytes,
                                 bool gradient = false) {
  MatmulProblemOf<W> problem;
  problem.gradient = gradient;
  if (const nf4_status status = validate_matmul_shape(weight, args, problem)) return status;
  if (bytes == nullptr) return fail(NF4_STATUS_INVALID_ARGUMENT, "bytes is NULL");
  *bytes = static_cast<size_t>(workspace_bytes_of(problem));
  return NF4_STATUS_OK;
}

template <class W, class Tensor>
nf4_status matmul_launch(const Tensor *weight, const nf4_matmul_args *args, void *workspace,
                         size_t workspace_bytes, nf4_stream stream, bool gradient = false) {
  MatmulProblemOf<W> problem;
  problem.gradient = gradient;
  if (const nf4_status status = validate_matmul_shape(weight, args, problem)) return status;
  const int64_t needed = workspace_bytes_of(problem);
  if (const nf4_status status = validate_workspace(workspace_bytes, needed)) return status;
  if (const nf4_status status = validate_matmul_operands(weight, args, workspace, needed, problem))
    return status;
  if (const nf4_status status = validate_matmul_dtype(problem)) return status;
  if (problem.empty()) return NF4_STATUS_OK;
  return launch(problem, stream);
}

template <class W, class Tensor>
nf4_status matmul_cpu(const Tensor *weight, const nf4_matmul_args *args, int32_t threads,
                      bool gradient = false) {
  MatmulProblemOf<W> problem;
  problem.gradient = gradient;
  if (const nf4_status status = validate_matmul_shape(weight, args, problem)) return status;
  if (const nf4_status status = validate_matmul_operands(weight, args, nullptr, 0, problem))
    return status;
  if (const nf4_status status = validate_threads(threads)) return status;
  if (problem.empty()) return NF4_STATUS_OK;
  if (const nf4_status status = validate_columns(problem.weight)) return status;
  run_on_cpu(problem, threads);
  return NF4_STATUS_OK;
}

template <class W, class Tensor>
nf4_status matmul_batch_workspace_size(const Tensor *const *weights, const nf4_matmul_args *args,
                                       size_t count, size_t *bytes) {
  MatmulBatchOf<W> batch;
  if (const nf4_status status = validate_matmul_batch_shapes(weights, args, count, batch))
    return status;
  if (bytes == nullptr) return fail(NF4_STATUS_INVALID_ARGUMENT, "bytes is NULL");
  *bytes = static_cast<size_t>(cuda::matmul_workspace_bytes(batch));
  return NF4_STATUS_OK;
}

template <class W, class Tensor>
nf4_status matmul_batch_launch(const Tensor *const *weights, const nf4_matmul_args *args,
                               size_t count, void *workspace, size_t workspace_bytes,
                               nf4_stream stream) {
  MatmulBatchOf<W> batch;
  if (const nf4_status status = validate_matmul_batch_shapes(weights, args, count, batch))
    return status;
  const int64_t needed = cuda::matmul_workspace_bytes(batch);
  if (const nf4_status status = validate_workspace(workspace_bytes, needed)) return status;
  if (const nf4_status status =
          validate_matmul_batch_operands(weights, args, workspace, needed, batch))
    return status;
  for (int i = 0; i < batch.count; ++i)
    if (const nf4_status status = validate_matmul_dtype(batch.list[i]))
      return of_product(status, i);
  if (batch.empty()) return NF4_STATUS_OK;
  return cuda::matmul(batch.list, batch.count, stream);
}

template <class W, class Tensor>
nf4_status matmul_batch_cpu(const Tensor *const *weights, const nf4_matmul_args *args, size_t count,
                            int32_t threads) {
  MatmulBatchOf<W> batch;
  if (const nf4_status status = validate_matmul_batch_shapes(weights, args, count, batch))
    return status;
  if (const nf4_status status = validate_matmul_batch_operands(weights, args, nullptr, 0, batch))
    return status;
  if (const nf4_status status = validate_threads(threads)) return status;
  for (int i = 0; i < batch.count; ++i)
    if (!batch.list[i].empty())
      if (const nf4_status status = validate_columns(batch.list[i].weight))
        return of_product(status, i);
  if (!batch.empty()) cpu::matmul(batch.list, batch.count, threads);
  return NF4_STATUS_OK;
}

template <class W, class Tensor>
nf4_status matmul_plan(const Tensor *const *weights, const nf4_matmul_args *args, size_t count,
                       int32_t device, int32_t *launches, const char **kernels) {
  MatmulBatchOf<W> batch;
  if (const nf4_status status = validate_matmul_batch_plan(weights, args, count, batch))
    return status;
  if (launches == nullptr) return fail(NF4_STATUS_INVALID_ARGUMENT, "launches is NULL");
  if (kernels == nullptr) return fail(NF4_STATUS_INVALID_ARGUMENT, "kernels is NULL");
  return cuda::matmul_plan(batch, device, launches, kernels);
}

// ---- Which way is faster ---------------------------------------------------------------------

// Finds the path of a checked problem. on_cpu and on_gpu answer if the problem is neither empty nor
// `refused`. A launch refuses a `refused` problem, so its path is dense.
template <class OnCpu, class OnGpu>
nf4_status find_path(bool empty, bool refused, int32_t device, nf4_path *path, const OnCpu &on_cpu,
                     const OnGpu &on_gpu) {
  if (path == nullptr) return fail(NF4_STATUS_INVALID_ARGUMENT, "path is NULL");
  if (device < NF4_DEVICE_CPU)
    return fail(NF4_STATUS_INVALID_ARGUMENT,
                "device is %d; expected a GPU's index, or NF4_DEVICE_CPU (-1)", device);
  nf4_path found = NF4_PATH_FUSED;
  if (device == NF4_DEVICE_CPU) {
    if (!empty) found = on_cpu();
  } else if (empty || refused) {
    if (const nf4_status status = cuda::check_gpu(device)) return status;
    if (!empty) found = NF4_PATH_DENSE;
  } else if (const nf4_status status = on_gpu(found)) {
    return status;
  }
  *path = found;
  return NF4_STATUS_OK;
}

inline nf4_path path_on_cpu(const MatmulProblem &problem) { return cpu::path_of(problem); }
// On a CPU, decoding on the fly is faster than writing a dense weight first.
template <class Problem>
nf4_path path_on_cpu(const Problem &) {
  return NF4_PATH_FUSED;
}
inline nf4_status path_on_gpu(const MatmulProblem &problem, int device, nf4_path &path) {
  return problem.gradient ? cuda::matmul_grad_path(problem, device, path)
                          : cuda::matmul_path(problem, device, path);
}
inline nf4_status path_on_gpu(const Int4MatmulProblem &problem, int device, nf4_path &path) {
  return cuda::matmul_path(problem, device, path);
}

template <class W, class Tensor>
nf4_status matmul_path(const Tensor *weight, const nf4_matmul_args *args, int32_t device,
                       nf4_path *path, bool gradient = false) {
  MatmulProblemOf<W> problem;
  problem.gradient = gradient;
  if (const nf4_status status = validate_matmul_plan(weight, args, problem)) return status;
  return find_path(
      problem.empty(), gpu_refuses(problem), device, path, [&] { return path_on_cpu(problem); },
      [&](nf4_path &found) { return path_on_gpu(problem, device, found); });
}

template <class W, class Tensor>
nf4_status matmul_grouped_path(const Tensor *weight, const nf4_grouped_args *args, int32_t device,
                               nf4_path *path, bool gradient = false) {
  GroupedProblemOf<W> problem{};
  problem.gradient = gradient;
  if (const nf4_status status = validate_grouped_plan(weight, args, problem)) return status;
  return find_path(
      problem.empty(), gpu_refuses(problem), device, path, [&] { return path_on_cpu(problem); },
      [&](nf4_path &found) { return cuda::matmul_grouped_path(problem, device, found); });
}

// These overloads are for products of experts or their gradient. Integer weights have no gradient.
inline int64_t workspace_bytes_of(const GroupedProblem &problem) {
  return problem.gradient ? cuda::matmul_grouped_grad_workspace_bytes(problem)
                          : cuda::matmul_grouped_workspace_bytes(problem);
}
inline int64_t workspace_bytes_of(const Int4GroupedProblem &problem) {
  return cuda::matmul_grouped_workspace_bytes(problem);
}
inline nf4_status launch(const GroupedProblem &problem, nf4_stream stream) {
  return problem.gradient ? cuda::matmul_grouped_grad(problem, stream)
                          : cuda::matmul_grouped(problem, stream);
}
inline nf4_status launch(const Int4GroupedProblem &problem, nf4_stream stream) {
  return cuda::matmul_grouped(problem, stream);
}

template <class W, class Tensor>
nf4_status matmul_grouped_workspace_size(const Tensor *weight, const nf4_grouped_args *args,
                                         size_t *bytes, bool gradient = false) {
  GroupedProblemOf<W> problem{};
  problem.gradient = gradient;
  if (const nf4_status status = validate_grouped_shape(weight, args, problem)) return status;
  if (bytes == nullptr) return fail(NF4_STATUS_INVALID_ARGUMENT, "bytes is NULL");
  *bytes = static_cast<size_t>(workspace_bytes_of(problem));
  return NF4_STATUS_OK;
}

template <class W, class Tensor>
nf4_status matmul_grouped_launch(const Tensor *weight, const nf4_grouped_args *args,
                                 void *workspace, size_t workspace_bytes, nf4_stream stream,
                                 bool gradient = false) {
  GroupedProblemOf<W> problem{};
  problem.gradient = gradient;
  if (const nf4_status status = validate_grouped_shape(weight, args, problem)) return status;
  const int64_t needed = workspace_bytes_of(problem);
  if (const nf4_status status = validate_workspace(workspace_bytes, needed)) return status;
  if (const nf4_status status = validate_grouped_operands(weight, args, workspace, needed, problem))
    return status;
  if (const nf4_status status = validate_grouped_on_gpu(problem)) return status;
  return problem.empty() ? NF4_STATUS_OK : launch(problem, stream);
}

template <class W, class Tensor>
nf4_status matmul_grouped_cpu(const Tensor *weight, const nf4_grouped_args *args, int32_t threads,
                              bool gradient = false) {
  GroupedProblemOf<W> problem{};
  problem.gradient = gradient;
  if (const nf4_status status = validate_grouped_shape(weight, args, problem)) return status;
  if (const nf4_status status = validate_grouped_operands(weight, args, nullptr, 0, problem))
    return status;
  if (const nf4_status status = validate_threads(threads)) return status;
  if (problem.empty()) return NF4_STATUS_OK;
  if (const nf4_status status = validate_columns(problem.weight, problem.experts)) return status;
  cpu::matmul_grouped(problem, threads);
  return NF4_STATUS_OK;
}

}  // namespace nf4
