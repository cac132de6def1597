// The CUDA backend: what api.cpp calls. stub.cpp answers in its place in a build
// without CUDA.
#pragma once

#include "problem.hpp"

namespace nf4::cuda {

nf4_status dequant(const DequantProblem &problem, nf4_stream stream);
nf4_status quantize(const QuantizeProblem &problem, nf4_stream stream);
// One product or several, which write nothing that others read or write. Where there is nothing to
// do for one of several, it is passed over.
nf4_status matmul(const MatmulProblem *problems, int count, nf4_stream stream);
// Says what matmul() would launch on a device, by its number; see nf4_matmul_plan.
nf4_status matmul_plan(const MatmulBatch &batch, int device, int32_t *launches,
                       const char **kernels);
// Says which way is expected to take less time on a device, by its number: see nf4_matmul_path. The
// problem is one that a launch takes, and not empty.
nf4_status matmul_path(const MatmulProblem &problem, int device, nf4_path &path);
nf4_status matmul_grad_path(const MatmulProblem &problem, int device, nf4_path &path);
nf4_status matmul_path(const Int4MatmulProblem &problem, int device, nf4_path &path);
nf4_status matmul_grouped_path(const GroupedProblem &problem, int device, nf4_path &path);
nf4_status matmul_grouped_path(const Int4GroupedProblem &problem, int device, nf4_path &path);
nf4_status lora_grad_path(const LoraGradProblem &problem, int device, nf4_path &path);
// Refuses a device of which a path cannot be asked.
nf4_status check_gpu(int device);
// The workspace of a product, and of several, which use it in turn. The same in every build.
int64_t matmul_workspace_bytes(const MatmulProblem &problem);
int64_t matmul_workspace_bytes(const MatmulBatch &batch);

// The gradient: problem.gradient is true.
nf4_status matmul_grad(const MatmulProblem &problem, nf4_stream stream);
int64_t matmul_grad_workspace_bytes(const MatmulProblem &problem);

// Not empty.
nf4_status lora_grad(const LoraGradProblem &problem, nf4_stream stream);

// Products of experts. The host reads none of ends, x_index and row_scale.
nf4_status matmul_grouped(const GroupedProblem &problem, nf4_stream stream);
int64_t matmul_grouped_workspace_bytes(const GroupedProblem &problem);

// Their gradient: problem.gradient is true.
nf4_status matmul_grouped_grad(const GroupedProblem &problem, nf4_stream stream);
int64_t matmul_grouped_grad_workspace_bytes(const GroupedProblem &problem);

// The same for integer weights.
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

nf4_status device_info(int device, nf4_device &info);

}  // namespace nf4::cuda
