// Which configurations have wgmma kernels of a kind of weight, as tables: each launch asks for all
// of them, and names take long to compare.
#pragma once

#include "cuda/matmul/configs.hpp"
#include "cuda/matmul/workspace.hpp"
#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

struct ConfigTable {
  bool has[kMatmulConfigCount];

  explicit constexpr ConfigTable(bool has_kernel(int config)) : has{} {
    for (int i = 0; i < kMatmulConfigCount; ++i) has[i] = has_kernel(i);
  }
};

// By set.
inline constexpr ConfigTable kWgmmaKernels[] = {
    ConfigTable(has_codebook_kernel), ConfigTable(has_int4_kernel), ConfigTable(has_grad_kernel)};
static_assert(static_cast<int>(WgmmaSet::kCodebook) == 0 &&
              static_cast<int>(WgmmaSet::kIntegers) == 1 && static_cast<int>(WgmmaSet::kGrad) == 2);

constexpr bool has_kernel(WgmmaSet set, int config) {
  return kWgmmaKernels[static_cast<int>(set)].has[config];
}
constexpr bool has_wgmma_kernel(const Weight &, int config) {
  return has_kernel(WgmmaSet::kCodebook, config);
}
constexpr bool has_wgmma_kernel(const Int4Weight &, int config) {
  return has_kernel(WgmmaSet::kIntegers, config);
}
constexpr bool has_wgmma_kernel(const TransposedWeight &, int config) {
  return has_kernel(WgmmaSet::kGrad, config);
}

}  // namespace nf4::cuda
