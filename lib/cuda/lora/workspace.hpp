// An adapter's part of a workspace. Plain C++: sizes do not depend on the build.
#pragma once

#include <cstdint>

#include "problem.hpp"

namespace nf4::cuda {

// Ranks of a row of what is there, with zeros past the adapter's.
inline int64_t lora_stride(const Lora &lora) { return ceil_divide(lora.rank, 16) * 16; }

struct LoraWorkspace {
  // scale * x A^T, [m][lora_stride()], or in the gradient scale * dy B; in the problem's dtype.
  int64_t scaled_bytes;
  // Behind it, in 16 bits, the other factor for TMA, [rows][lora_stride()]; [cols] in the gradient.
  int64_t copy_bytes;

  explicit LoraWorkspace(const MatmulProblem &problem)
      : scaled_bytes(problem.m * lora_stride(problem.lora) * element_bytes(problem.dtype)),
        copy_bytes(problem.dtype == NF4_DTYPE_FP32
                       ? 0
                       : problem.y_columns() * lora_stride(problem.lora) * 2) {}
  int64_t bytes() const { return scaled_bytes + copy_bytes; }
};

}  // namespace nf4::cuda
