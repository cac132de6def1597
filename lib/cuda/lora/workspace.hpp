// An adapter's part of a workspace. Plain C++: sizes do not depend on the build.
#pragma once

#include <cstdint>

#include "problem.hpp"

namespace nf4::cuda {

// Ranks with padding: of a row of what is in the workspace.
inline int64_t lora_stride(const Lora &lora) { return ceil_divide(lora.rank, 16) * 16; }

struct LoraWorkspaceBytes {
  int64_t scaled;  // [m][lora_stride()] in x's dtype, a multiple of 16 bytes
  int64_t b_copy;  // [rows][lora_stride()], for TMA

  explicit LoraWorkspaceBytes(const MatmulProblem &problem)
      : scaled(problem.m * lora_stride(problem.lora) * element_bytes(problem.dtype)),
        b_copy(problem.dtype == NF4_DTYPE_FP32
                   ? 0
                   : problem.weight.rows * lora_stride(problem.lora) * 2) {}
  int64_t bytes() const { return scaled + b_copy; }
};

}  // namespace nf4::cuda
