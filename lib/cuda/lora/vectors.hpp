// Tells which operands of an adapter's product 16-byte vectors can load.
#pragma once

#include "cuda/lora/lora.hpp"

namespace nf4::cuda {

// Tells whether the rows of a matrix are on 16-byte boundaries.
inline bool has_vectors(const void *data, int64_t stride, nf4_dtype dtype) {
  return is_multiple(data, 16) && stride * element_bytes(dtype) % 16 == 0;
}

inline bool has_x_vectors(const LoraProblem &problem) {
  return is_multiple(problem.x, 16) &&
         (problem.m == 1 || problem.x_stride * element_bytes(problem.dtype) % 16 == 0);
}

}  // namespace nf4::cuda
