// W^T as a kind of weight: dX = dY W is the matmul of dY with it. Its rows are the columns of the
// stored matrix, and its columns are the rows; everything else describes the stored matrix. No CUDA
// types.
#pragma once

#include "problem.hpp"

namespace nf4::cuda {

struct TransposedWeight : Weight {};
using GradProblem = MatmulProblemOf<TransposedWeight>;

// For experts, this is the weight of one expert (matmul_grouped/stack.hpp).
inline int64_t rows_of_expert(const TransposedWeight &weight, int32_t) { return weight.rows; }

// Makes the problem whose x is dY and whose y is dX.
inline GradProblem transposed(const MatmulProblem &problem) {
  GradProblem grad{};
  static_cast<Weight &>(grad.weight) = problem.weight;
  grad.weight.rows = problem.weight.cols;
  grad.weight.cols = problem.weight.rows;
  grad.dtype = problem.dtype;
  grad.m = problem.m;
  grad.x = problem.x;
  grad.x_stride = problem.x_stride;
  grad.y = problem.y;
  grad.y_stride = problem.y_stride;
  grad.workspace = problem.workspace;
  grad.lora = problem.lora;
  grad.operands = problem.operands;
  return grad;
}

}  // namespace nf4::cuda
