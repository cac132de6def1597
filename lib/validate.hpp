// Turns what a caller passed into a Problem, or says what is wrong with it. Touches
// neither CUDA nor the memory behind any pointer but the structs' own.
#pragma once

#include "nf4/nf4.h"
#include "problem.hpp"

namespace nf4 {

nf4_status validate_shape(const nf4_tensor *tensor, Weight &weight);

nf4_status validate_dequant(const nf4_tensor *tensor, void *out, nf4_dtype dtype,
                            DequantProblem &problem);

nf4_status validate_quantize(const void *in, nf4_dtype dtype, const nf4_tensor *tensor,
                             void *workspace, size_t workspace_bytes, QuantizeProblem &problem);

// All that needs no pointer: fills the sizes of *problem.
nf4_status validate_matmul_shape(const nf4_tensor *tensor, const nf4_matmul_args *args,
                                 MatmulProblem &problem);

// The rest, of a problem that has its sizes. workspace_bytes: as many as are used, 0 on the CPU.
nf4_status validate_matmul_operands(const nf4_tensor *tensor, const nf4_matmul_args *args,
                                    void *workspace, int64_t workspace_bytes,
                                    MatmulProblem &problem);

// The same for each product of a batch, and, in the second, against each other.
nf4_status validate_matmul_batch_shapes(const nf4_tensor *const *tensors,
                                        const nf4_matmul_args *args, size_t count,
                                        MatmulBatch &batch);
nf4_status validate_matmul_batch_operands(const nf4_tensor *const *tensors,
                                          const nf4_matmul_args *args, void *workspace,
                                          int64_t workspace_bytes, MatmulBatch &batch);

// That a GPU multiplies numbers of its dtype.
nf4_status validate_matmul_dtype(const MatmulProblem &problem);

nf4_status validate_workspace(size_t given, int64_t needed);

nf4_status validate_threads(int32_t threads);

}  // namespace nf4
