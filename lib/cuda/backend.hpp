// The CUDA backend: the functions that the API calls (api.cpp, api_int4.cpp, api_calls.hpp). In a
// build without CUDA, stub.cpp implements them.
#pragma once

#include <cstddef>

#include "problem.hpp"

namespace nf4::cuda {

nf4_status dequant(const DequantProblem &problem, nf4_stream stream);
nf4_status quantize(const QuantizeProblem &problem, nf4_stream stream);
// Enqueues one product or several. No product may write anything that another reads or writes. If
// one of several has nothing to do, it is skipped.
nf4_status matmul(const MatmulProblem *problems, int count, nf4_stream stream);
// Reports what matmul() would launch on a device, given by its number; see nf4_matmul_plan.
nf4_status matmul_plan(const MatmulBatch &batch, int device, int32_t *launches,
                       const char **kernels);
// Says which way is expected to take less time on a device, given by its number; see
// nf4_matmul_path. The problem must be one that a launch accepts, and not empty.
nf4_status matmul_path(const MatmulProblem &problem, int device, nf4_path &path);
nf4_status matmul_grad_path(const MatmulProblem &problem, int device, nf4_path &path);
nf4_status matmul_path(const Int4MatmulProblem &problem, int device, nf4_path &path);
nf4_status matmul_grouped_path(const GroupedProblem &problem, int device, nf4_path &path);
nf4_status matmul_grouped_path(const Int4GroupedProblem &problem, int device, nf4_path &path);
nf4_status lora_grad_path(const LoraGradProblem &problem, int device, nf4_path &path);
// Refuses a device for which there is no path.
nf4_status check_gpu(int device);
// The workspace of a product, or of several that use it in turn. It is the same in every build.
int64_t matmul_workspace_bytes(const MatmulProblem &problem);
int64_t matmul_workspace_bytes(const MatmulBatch &batch);

// The gradient: problem.gradient is true.
nf4_status matmul_grad(const MatmulProblem &problem, nf4_stream stream);
int64_t matmul_grad_workspace_bytes(const MatmulProblem &problem);

// The problem is not empty.
nf4_status lora_grad(const LoraGradProblem &problem, nf4_stream stream);

// Products of experts. The host does not read ends, x_index or row_scale.
nf4_status matmul_grouped(const GroupedProblem &problem, nf4_stream stream);
int64_t matmul_grouped_workspace_bytes(const GroupedProblem &problem);

// The gradient of products of experts: problem.gradient is true.
nf4_status matmul_grouped_grad(const GroupedProblem &problem, nf4_stream stream);
int64_t matmul_grouped_grad_workspace_bytes(const GroupedProblem &problem);

// The same functions for integer weights.
nf4_status dequant(const Int4DequantProblem &problem, nf4_stream stream);
nf4_status quantize(const Int4QuantizeProblem &problem, nf4_stream stream);
nf4_status reorder(const Int4ReorderProblem &problem, nf4_stream stream);
nf4_status matmul(const Int4MatmulProblem *problems, int count, nf4_stream stream);
nf4_status matmul_plan(const Int4MatmulBatch &batch, int device, int32_t *launches,
                       const char **kernels);
int64_t matmul_workspace_bytes(const Int4MatmulProblem &problem);
int64_t matmul_workspace_bytes(const Int4MatmulBatch &batch);
nf4_status matmul_grouped(const Int4GroupedProblem &problem, nf4_stream stream);
int64_t matmul_grouped_workspace_bytes(const Int4GroupedProblem &problem);

// Replaces all costs by those of a text; NULL removes them. A text that is refused changes nothing.
// The same in every build.
nf4_status set_costs(const char *text, size_t bytes);

nf4_status device_info(int device, nf4_device &info);

}  // namespace nf4::cuda
