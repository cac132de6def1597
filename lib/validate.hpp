// Turns the caller's arguments into a Problem, or reports what is wrong with them. It calls no
// CUDA, and reads no memory except the structs.
#pragma once

#include "nf4/nf4.h"
#include "problem.hpp"

namespace nf4 {

nf4_status validate_shape(const nf4_tensor *tensor, Weight &weight);
nf4_status validate_shape(const nf4_int4_tensor *tensor, Int4Weight &weight);

struct Int4Bytes {
  int64_t packed, scales, zeros;
};
Int4Bytes bytes_of(const Int4Weight &weight);

// Tensor and W are nf4_tensor and Weight, or nf4_int4_tensor and Int4Weight.
template <class Tensor, class W>
nf4_status validate_dequant(const Tensor *tensor, void *out, nf4_dtype dtype,
                            DequantProblemOf<W> &problem);

nf4_status validate_quantize(const void *in, nf4_dtype dtype, const nf4_tensor *tensor,
                             void *workspace, size_t workspace_bytes, QuantizeProblem &problem);
nf4_status validate_quantize(const void *in, nf4_dtype dtype, const nf4_int4_tensor *tensor,
                             int32_t symmetric, Int4QuantizeProblem &problem);

nf4_status validate_reorder(const nf4_int4_tensor *from, const nf4_int4_tensor *to,
                            Int4ReorderProblem &problem);

// ---- Matmul, for each kind of weight: an nf4_tensor and its Weight, and so on --------

// Checks everything but pointers, and fills the sizes of `problem`.
template <class Tensor, class W>
nf4_status validate_matmul_shape(const Tensor *tensor, const nf4_matmul_args *args,
                                 MatmulProblemOf<W> &problem);

// Checks the pointers of a problem whose sizes are set. workspace_bytes is the number of bytes
// used, 0 on the CPU.
template <class Tensor, class W>
nf4_status validate_matmul_operands(const Tensor *tensor, const nf4_matmul_args *args,
                                    void *workspace, int64_t workspace_bytes,
                                    MatmulProblemOf<W> &problem);

// These do the same for each product of a batch; the second also checks the products against each
// other.
template <class Tensor, class W>
nf4_status validate_matmul_batch_shapes(const Tensor *const *tensors, const nf4_matmul_args *args,
                                        size_t count, MatmulBatchOf<W> &batch);
template <class Tensor, class W>
nf4_status validate_matmul_batch_operands(const Tensor *const *tensors, const nf4_matmul_args *args,
                                          void *workspace, int64_t workspace_bytes,
                                          MatmulBatchOf<W> &batch);

// Checks the shapes and dtypes, and copies the addresses without a check: the choice of a kernel
// depends on their alignment.
template <class Tensor, class W>
nf4_status validate_matmul_batch_plan(const Tensor *const *tensors, const nf4_matmul_args *args,
                                      size_t count, MatmulBatchOf<W> &batch);

// Does the same for one product.
template <class Tensor, class W>
nf4_status validate_matmul_plan(const Tensor *tensor, const nf4_matmul_args *args,
                                MatmulProblemOf<W> &problem);

// These do the same for products of experts.
template <class Tensor, class W>
nf4_status validate_grouped_shape(const Tensor *tensor, const nf4_grouped_args *args,
                                  GroupedProblemOf<W> &problem);
template <class Tensor, class W>
nf4_status validate_grouped_operands(const Tensor *tensor, const nf4_grouped_args *args,
                                     void *workspace, int64_t workspace_bytes,
                                     GroupedProblemOf<W> &problem);

template <class Tensor, class W>
nf4_status validate_grouped_plan(const Tensor *tensor, const nf4_grouped_args *args,
                                 GroupedProblemOf<W> &problem);

// Checks everything but pointers.
nf4_status validate_lora_grad_shape(const nf4_lora_grad_args *args, LoraGradProblem &problem);
nf4_status validate_lora_grad(const nf4_lora_grad_args *args, LoraGradProblem &problem);

// GPUs do not multiply in fp32 with integer weights or with more than kFp32RowsOfX rows of x.
template <class W>
bool gpu_refuses(const MatmulProblemOf<W> &problem);
template <class W>
nf4_status validate_matmul_dtype(const MatmulProblemOf<W> &problem);
// GPUs multiply experts neither in fp32 nor with integers that have a g_idx or a permutation.
bool gpu_refuses(const GroupedProblem &problem);
bool gpu_refuses(const Int4GroupedProblem &problem);
nf4_status validate_grouped_on_gpu(const GroupedProblem &problem);
nf4_status validate_grouped_on_gpu(const Int4GroupedProblem &problem);

nf4_status validate_workspace(size_t given, int64_t needed);

nf4_status validate_threads(int32_t threads);

// Functions on host memory check that the values of g_idx and permutation are groups and columns of
// the weight, so that nothing outside it is read or written. `experts` weights follow one another.
inline nf4_status validate_columns(const Weight &, int64_t = 1) { return NF4_STATUS_OK; }
nf4_status validate_columns(const Int4Weight &weight, int64_t experts = 1);

}  // namespace nf4
