// The adapter's part of a workspace. Plain C++, since sizes do not depend on the build.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/lora/cta_args.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// The ranks of a row in the workspace; those past the adapter's are zeros.
inline int64_t lora_stride(const Lora &lora) { return ceil_divide(lora.rank, 16) * 16; }

// The rows of a factor's copy for TMA: whole groups, within which the gradient permutes the rows.
constexpr int64_t lora_copy_rows(int64_t rows) { return ceil_divide(rows, 32) * 32; }

// The lora CTAs of a skinny kernel.
inline int lora_ctas(const Lora &lora, int64_t cols) {
  if (lora.rank == 0) return 0;
  return lora_ctas(lora.rank * cols * element_bytes(lora.dtype), lora.rank);
}

// The number of their flags, whatever dtype A has, since sizes do not depend on that.
inline int64_t lora_flags(const Lora &lora, int64_t rows) {
  return std::min(rows, kMaxWeightCtas) * most_lora_ctas(lora.rank);
}

struct LoraWorkspace {
  // scale * x A^T, [m][lora_stride()], or in the gradient scale * dy B, in the problem's dtype.
  int64_t scaled_bytes;
  // After it, in 16 bits, the other factor for TMA: [lora_copy_rows()][lora_stride()].
  int64_t copy_bytes;
  // For skinny kernels, the data that lora CTAs and weight CTAs exchange (lora/cta_args.hpp)
  // instead.
  int64_t flags_bytes;
  int64_t parts_bytes;

  explicit LoraWorkspace(const MatmulProblem &problem)
      : scaled_bytes(problem.m * lora_stride(problem.lora) * element_bytes(problem.dtype)),
        copy_bytes(problem.dtype == NF4_DTYPE_FP32
                       ? 0
                       : lora_copy_rows(problem.y_columns()) * lora_stride(problem.lora) * 2),
        flags_bytes(lora_flags(problem.lora, problem.weight.rows) * 8),
        parts_bytes(kLoraParts * std::min<int64_t>(problem.m, kLoraCtaM) *
                    lora_stride(problem.lora) * 4) {}
  int64_t bytes() const { return std::max(scaled_bytes + copy_bytes, flags_bytes + parts_bytes); }
};

}  // namespace nf4::cuda
