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
// Rows of x between those that a thread copies, 16 of the 128 bytes of each.
constexpr int kMultistageXRowStep = kMultistageThreads / 8;
constexpr int kMultistageMinKTiles = 8;  // of a CTA, where CTAs share tiles

// Shared memory, in bytes: the LUT, nested_code, the stages of x, and the stages of the weight. A
// warp has the words of a K-tile in registers before it multiplies it, so that a stage of the
// weight is free sooner, and there is one less.
constexpr int kMultistageLutBytes = 32 << 10;
constexpr int kMultistageCodeBytes = 1024;
// The gradient's scales of two K-tiles, behind nested_code: one for each column and 64 rows.
constexpr int kMultistageColumnScaleBytes = 2 * kMultistageTileN * 4;
constexpr int kMultistageXRowBytes = kMultistageTileK * 2;
constexpr int kMultistageWeightBytes = kMultistageTileN * kMultistageTileK / 2;

// The stages of x: with cp.async as many as fit 99 KiB, the least shared memory of a CTA from
// Ampere on. Without it, registers hold what is in flight, and codes go from memory to registers.
constexpr NF4_HOST_DEVICE int multistage_stages(int tile_m, bool async_copies) {
  if (!async_copies) return 3;
  return tile_m > 64 ? 3 : tile_m > 32 ? 4 : tile_m > 16 ? 5 : 6;
}
constexpr NF4_HOST_DEVICE int multistage_smem_bytes(WeightKind kind, int tile_m,
                                                    bool async_copies) {
  const int stages = multistage_stages(tile_m, async_copies);
  return kMultistageLutBytes + kMultistageCodeBytes +
         (kind == WeightKind::kTransposed ? kMultistageColumnScaleBytes : 0) +
         stages * tile_m * kMultistageXRowBytes +
         (async_copies ? stages - 1 : 0) * kMultistageWeightBytes;
}
// Whether there is a kernel for such tiles. Turing GPUs have 64 KiB for a CTA; there are no kernels
// of the gradient for them.
constexpr bool has_multistage_tile(WeightKind kind, int tile_m, bool async_copies) {
  if (async_copies) return true;
  return kind == WeightKind::kCodebook && multistage_smem_bytes(kind, tile_m, false) <= 64 << 10;
}

constexpr bool multistage_configs_fit() {
  for (int i = kFirstMultistage; i < kMatmulConfigCount; ++i)
    if (kMatmulConfigs[i].tile_n != kMultistageTileN ||
        multistage_smem_bytes(WeightKind::kTransposed, kMatmulConfigs[i].tile_m, true) > 99 << 10)
      return false;
  return true;
}
static_assert(multistage_configs_fit());

}  // namespace nf4::cuda
