// The configurations that there are grouped wgmma kernels of.
#pragma once

#include "cuda/matmul/configs.hpp"

namespace nf4::cuda {

// Of kMatmulConfigs, by the rows of x of a tile.
inline constexpr int kGroupedWgmmaConfigs[] = {
    config_named("wgmma_32x256"), config_named("wgmma_64x256"), config_named("wgmma_152x128"),
    config_named("wgmma_208x128"), config_named("wgmma_304x128")};
constexpr int kGroupedWgmmaCount = sizeof kGroupedWgmmaConfigs / sizeof *kGroupedWgmmaConfigs;

// Which of them a configuration is, or -1.
constexpr int grouped_wgmma_index(int config) {
  for (int i = 0; i < kGroupedWgmmaCount; ++i)
    if (kGroupedWgmmaConfigs[i] == config) return i;
  return -1;
}

}  // namespace nf4::cuda
