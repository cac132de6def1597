// The CTA tile of the multistage kernels, and their shared memory. No CUDA types.
#pragma once

#include <cstdint>

#include "core/macros.hpp"
#include "cuda/matmul/configs.hpp"

namespace nf4::cuda {

constexpr int kMultistageTileK = 64;  // columns of a K-tile
constexpr int kMultistageWarpN = 32;  // rows of the weight of a warp tile
constexpr int kMultistageWarps = 8;
constexpr int kMultistageThreads = 32 * kMultistageWarps;
constexpr int kMultistageTileN = kMultistageWarpN * kMultistageWarps;
constexpr int kMultistageMinKTiles = 8;  // of a CTA, where CTAs share tiles

// Shared memory, in bytes: the LUT, nested_code, the stages of x, and the stages of the weight. A
// warp has the words of a K-tile in registers before it multiplies it, so that a stage of the
// weight is free sooner, and there is one less.
constexpr int kMultistageLutBytes = 32 << 10;
constexpr int kMultistageCodeBytes = 1024;
constexpr int kMultistageXRowBytes = kMultistageTileK * 2;
constexpr int kMultistageWeightBytes = kMultistageTileN * kMultistageTileK / 2;

// The stages of x: as many as fit 99 KiB, the least shared memory of a CTA from Ampere on.
constexpr NF4_HOST_DEVICE int multistage_stages(int tile_m) {
  return tile_m > 64 ? 3 : tile_m > 32 ? 4 : tile_m > 16 ? 5 : 6;
}
constexpr NF4_HOST_DEVICE int multistage_smem_bytes(int tile_m) {
  const int stages = multistage_stages(tile_m);
  return kMultistageLutBytes + kMultistageCodeBytes + stages * tile_m * kMultistageXRowBytes +
         (stages - 1) * kMultistageWeightBytes;
}

constexpr bool multistage_configs_fit() {
  for (int i = kFirstMultistage; i < kMatmulConfigCount; ++i)
    if (kMatmulConfigs[i].tile_n != kMultistageTileN ||
        multistage_smem_bytes(kMatmulConfigs[i].tile_m) > 99 << 10)
      return false;
  return true;
}
static_assert(multistage_configs_fit());

}  // namespace nf4::cuda
