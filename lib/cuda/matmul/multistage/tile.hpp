// The CTA tile of the multistage kernels, and their shared memory. No CUDA types.
#pragma once

#include <cstdint>
#include <initializer_list>

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
constexpr int kMultistageMinKTiles = 8;  // least for a CTA, where CTAs share tiles
constexpr int kMaxTileCtas = 32;         // most CTAs that share a tile by split-K

// Shared memory, in bytes: the tables of a kind of weight, the stages of x, and the stages of the
// weight. A warp has the words of a K-tile in registers before it multiplies it, so that a stage of
// the weight is free sooner, and there is one less. The tables of a codebook are the LUT and
// nested_code, those of MXFP4 and NVFP4 the LUT and the scales; integers have none.
constexpr int kMultistageLutBytes = 32 << 10;
constexpr int kMultistageCodeBytes = 1024;
// The gradient's scales of two K-tiles, behind nested_code: one for each column and 64 rows.
constexpr int kMultistageColumnScaleBytes = 2 * kMultistageTileN * 4;
constexpr int kMultistageXRowBytes = kMultistageTileK * 2;
constexpr int kMultistageWeightBytes = kMultistageTileN * kMultistageTileK / 2;
constexpr NF4_HOST_DEVICE int multistage_table_bytes(WeightKind kind) {
  if (kind == WeightKind::kInt4) return 0;
  return kMultistageLutBytes + kMultistageCodeBytes +
         (kind == WeightKind::kTransposed ? kMultistageColumnScaleBytes : 0);
}

// The stages of x: with cp.async as many as fit 99 KiB, the least shared memory of a CTA from
// Ampere on. Integers have room for more, but with more than five a CTA takes longer to start.
// Registers hold what is in flight where there is no cp.async.
constexpr NF4_HOST_DEVICE int multistage_stages(WeightKind kind, int tile_m, bool async_copies) {
  if (!async_copies) return 3;
  if (kind == WeightKind::kInt4) return tile_m > 64 ? 4 : 5;
  return tile_m > 64 ? 3 : tile_m > 32 ? 4 : tile_m > 16 ? 5 : 6;
}
constexpr NF4_HOST_DEVICE int multistage_smem_bytes(WeightKind kind, int tile_m,
                                                    bool async_copies) {
  const int stages = multistage_stages(kind, tile_m, async_copies);
  return multistage_table_bytes(kind) + stages * tile_m * kMultistageXRowBytes +
         (async_copies ? stages - 1 : 0) * kMultistageWeightBytes;
}
// Whether there is a kernel for such tiles. Turing GPUs have 64 KiB for a CTA, and none of the
// gradient.
constexpr bool has_multistage_tile(WeightKind kind, int tile_m, bool async_copies) {
  if (async_copies) return true;
  return kind != WeightKind::kTransposed && multistage_smem_bytes(kind, tile_m, false) <= 64 << 10;
}

constexpr bool multistage_configs_fit() {
  for (int i = kFirstMultistage; i < kMatmulConfigCount; ++i)
    for (const WeightKind kind :
         {WeightKind::kCodebook, WeightKind::kInt4, WeightKind::kTransposed, WeightKind::kE2m1})
      if (kMatmulConfigs[i].tile_n != kMultistageTileN ||
          multistage_smem_bytes(kind, kMatmulConfigs[i].tile_m, true) > 99 << 10)
        return false;
  return true;
}
static_assert(multistage_configs_fit());

}  // namespace nf4::cuda
