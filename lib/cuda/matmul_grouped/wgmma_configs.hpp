// The configurations that there are grouped wgmma kernels of.
#pragma once

#include <string_view>

#include "cuda/matmul/configs.hpp"
#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

template <int Count>
constexpr bool is_named(int config, const std::string_view (&names)[Count]) {
  for (const std::string_view name : names)
    if (name == kMatmulConfigs[config].name) return true;
  return false;
}

// By the kind of weight.
constexpr bool has_grouped_wgmma(const Weight *, int config) {
  return is_named(
      config, {"wgmma_32x256", "wgmma_64x256", "wgmma_152x128", "wgmma_208x128", "wgmma_304x128"});
}
constexpr bool has_grouped_wgmma(const TransposedWeight *, int config) {
  return is_named(config, {"wgmma_64x128", "wgmma_128x128"});
}
constexpr bool has_grouped_wgmma(const Int4Weight *, int config) {
  return is_named(config, {"wgmma_32x256", "wgmma_64x128", "wgmma_128x128"});
}
template <class W>
constexpr bool kHasGroupedWgmma(int config) {
  return has_grouped_wgmma(static_cast<const W *>(nullptr), config);
}

}  // namespace nf4::cuda
