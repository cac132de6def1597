// The weights of a grouped product's experts: one of them, and how all of them lie in memory. No
// CUDA types.
#pragma once

#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

using GroupedGradProblem = GroupedProblemOf<TransposedWeight>;

// Returns the gradient's product for a problem whose x is dY and whose y is dX. The weight is one
// expert's.
inline GroupedGradProblem transposed(const GroupedProblem &problem) {
  GroupedGradProblem grad{};
  static_cast<Weight &>(grad.weight) = problem.weight;
  grad.weight.rows = problem.weight.cols;
  grad.weight.cols = problem.expert_rows();
  grad.dtype = problem.dtype;
  grad.experts = problem.experts;
  grad.m = problem.m;
  grad.x = problem.x;
  grad.x_stride = problem.x_stride;
  grad.x_rows = problem.x_rows;
  grad.y = problem.y;
  grad.y_stride = problem.y_stride;
  grad.ends = problem.ends;
  grad.x_index = problem.x_index;
  grad.row_scale = problem.row_scale;
  grad.workspace = problem.workspace;
  grad.operands = problem.operands;
  return grad;
}

// Returns the weight of the first expert. Sizes other than rows and columns stay the stack's.
inline Weight expert_weight(const GroupedProblem &problem) {
  Weight weight = problem.weight;
  weight.rows = problem.expert_rows();
  return weight;
}
template <class W>
W expert_weight(const GroupedProblemOf<W> &problem) {
  return problem.weight;
}

// Returns whether the experts lie one after another along K, as if they were columns of one weight,
// or else along N, as its rows.
inline bool stacked_along_k(const Weight &) { return false; }
inline bool stacked_along_k(const TransposedWeight &) { return true; }
inline bool stacked_along_k(const Int4Weight &weight) {
  return weight.layout != NF4_INT4_COMPRESSED_TENSORS;
}

// Returns all experts as one weight.
template <class W>
W stack_weight(const GroupedProblemOf<W> &problem) {
  W weight = expert_weight(problem);
  (stacked_along_k(weight) ? weight.cols : weight.rows) *= problem.experts;
  return weight;
}

// Returns what the wgmma kernels take for the weight.
template <class W>
W wgmma_weight(const GroupedProblemOf<W> &problem) {
  return stacked_along_k(problem.weight) ? expert_weight(problem) : stack_weight(problem);
}

}  // namespace nf4::cuda
