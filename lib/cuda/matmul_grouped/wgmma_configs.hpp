// The configurations that there are grouped wgmma kernels of.
#pragma once

#include "cuda/matmul/configs.hpp"
#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// By the kind of weight.
template <class W>
constexpr bool has_grouped_wgmma(int config);
template <>
constexpr bool has_grouped_wgmma<Weight>(int config) {
  return is_named(config, {"wgmma_32x256", "wgmma_64x256", "wgmma_96x256", "wgmma_152x128",
                           "wgmma_208x128", "wgmma_304x128"});
}
template <>
constexpr bool has_grouped_wgmma<TransposedWeight>(int config) {
  return is_named(config, {"wgmma_64x128", "wgmma_128x128", "wgmma_256x128"});
}
template <>
constexpr bool has_grouped_wgmma<Int4Weight>(int config) {
  return is_named(config, {"wgmma_32x256", "wgmma_64x128", "wgmma_128x128"});
}

}  // namespace nf4::cuda
