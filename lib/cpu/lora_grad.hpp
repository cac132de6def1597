// One gradient of an adapter's matrices, as it lies in memory.
#pragma once

#include "problem.hpp"

namespace nf4::cpu {

// Element (r, column) of the gradient is at this distance from the beginning of out, in elements.
struct LoraGradPart {
  const LoraGradProblem &problem;
  const LoraGrad &of;
  int64_t rank_step;
  int64_t column_step;

  int64_t at(int64_t r, int64_t column) const { return r * rank_step + column * column_step; }
};

}  // namespace nf4::cpu
