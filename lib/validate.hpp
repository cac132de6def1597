// Turns the caller's arguments into a Problem, or reports what is wrong with them. Calls no CUDA,
// and reads no memory but the structs.
#pragma once

#include "nf4/nf4.h"
#include "problem.hpp"

namespace nf4 {

nf4_status validate_shape(const nf4_tensor *tensor, Weight &weight);

nf4_status validate_dequant(const nf4_tensor *tensor, void *out, nf4_dtype dtype,
                            DequantProblem &problem);

nf4_status validate_quantize(const void *in, nf4_dtype dtype, const nf4_tensor *tensor,
                             void *workspace, size_t workspace_bytes, QuantizeProblem &problem);

// Checks everything but pointers, and fills the sizes of `problem`.
nf4_status validate_matmul_shape(const nf4_tensor *tensor, const nf4_matmul_args *args,
                                 MatmulProblem &problem);

// Checks the pointers of a problem that has its sizes. workspace_bytes: as many as are used, 0 on
// the CPU.
nf4_status validate_matmul_operands(const nf4_tensor *tensor, const nf4_matmul_args *args,
                                    void *workspace, int64_t workspace_bytes,
                                    MatmulProblem &problem);

// The same for each product of a batch; the second also checks them against each other.
nf4_status validate_matmul_batch_shapes(const nf4_tensor *const *tensors,
                                        const nf4_matmul_args *args, size_t count,
                                        MatmulBatch &batch);
nf4_status validate_matmul_batch_operands(const nf4_tensor *const *tensors,
                                          const nf4_matmul_args *args, void *workspace,
                                          int64_t workspace_bytes, MatmulBatch &batch);

// The shapes and dtypes, and without a check the addresses on which the choice of a kernel depends.
nf4_status validate_matmul_batch_plan(const nf4_tensor *const *tensors, const nf4_matmul_args *args,
                                      size_t count, MatmulBatch &batch);

// Refuses dtypes that GPUs do not multiply.
nf4_status validate_matmul_dtype(const MatmulProblem &problem);

nf4_status validate_workspace(size_t given, int64_t needed);

nf4_status validate_threads(int32_t threads);

}  // namespace nf4
