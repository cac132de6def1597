// The CTA tile of a wgmma configuration, and where a CTA keeps what it multiplies in shared memory.
// No device code: the host needs the sizes.
#pragma once

#include <cstdint>

#include "cuda/matmul/configs.hpp"

namespace nf4::cuda {

constexpr int kStepK = 64;                   // a K-step: columns that are multiplied at once
constexpr int kTileK = 2 * kStepK;           // a K-tile: columns of the weight loaded together
constexpr int kWgmmaSmemBytes = 227 * 1024;  // Hopper's limit for a CTA
constexpr int kMaxStages = 8;
constexpr int kLoraTileK = 32;  // ranks of an adapter in the place of a K-tile: as many bytes

// A work tile of experts may have fewer than tile_m rows of x. It is multiplied with the fewest of
// these numbers of rows that suffice; 0 ends the list. Each number is a loop of its own.
struct FewerRows {
  int of[4];
};
constexpr FewerRows fewer_rows(int tile_m, int tile_n, ScaleOn scale_on) {
  // A has no room in registers for 64 rows: two halves, as MainloopScaledSums::kHalves has it.
  if (scale_on == ScaleOn::kSums) return {{tile_m == 64 && tile_n == 256 ? 32 : 0}};
  if (tile_m == 96) return {{48, 64, 80}};
  if (tile_m == 128) return {{96}};
  if (tile_m == 152) return {{128}};
  return {};
}
constexpr FewerRows fewer_rows(const MatmulConfig &config) {
  return fewer_rows(config.tile_m, config.tile_n, config.scale_on);
}

// kTileM rows of x by 64 rows of the weight for each consumer warpgroup. `KindOfWeight` is a
// TileKind of codebook.cuh, transposed.cuh or int4.cuh.
template <int Config, class KindOfWeight>
struct CtaTile {
  using Kind = KindOfWeight;
  using Args = typename Kind::Args;
  using Scale = typename Kind::Scale;
  static constexpr MatmulConfig kConfig = kMatmulConfigs[Config];
  static constexpr int kTileM = kConfig.tile_m;
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kWarpgroups = kTileN / 64;
  static constexpr int kConsumers = 128 * kWarpgroups;
  static constexpr int kThreads = 128 + kConsumers;
  static constexpr ScaleOn kScaleOn = Kind::scale_on(kConfig.scale_on);
  static constexpr bool kSplitK = Kind::kSplitK && has_split_k(Config);
  using Layout = typename Kind::template Layout<kTileN>;
  using Accumulators = float[kTileM / 2];  // one thread's share
  static constexpr FewerRows kFewerRows = fewer_rows(kTileM, kTileN, kScaleOn);
  // TMA boxes of x: a box has 256 rows at most.
  static constexpr int kXBoxes = kTileM > 256 ? 2 : 1;
  static constexpr int kPartM = kTileM / kXBoxes;
};

// Shared memory: the LUT; the pipelines of x, by steps, and of the weight and its scales, by
// K-tiles; each consumer warp's subtile of y; the scale code; mbarriers. Partial sums of a cluster
// lie over the LUT and the pipelines, once those are done.
template <class Tile>
struct SharedLayout {
  static constexpr int kXBoxRows = Tile::kTileM / Tile::kXBoxes;
  static constexpr int kXStageBytes = Tile::kTileM * kStepK * 2;
  static constexpr int kWeightStageBytes = Tile::kTileN * kTileK / 2;
  // The scales of two K-steps for each row.
  static constexpr int kScaleStageBytes =
      Tile::Kind::scale_rows(Tile::kTileN) * 2 * int{sizeof(typename Tile::Scale)};
  static constexpr int kSubtileBytes = 1024;
  static constexpr int kSubtilesBytes = Tile::kWarpgroups * 4 * kSubtileBytes;
  static constexpr int kLutBytes = Tile::Kind::kLutBytes;
  // Partial sums of a cluster arrive in parts, as many rows of x as a subtile of y has; those of
  // narrow tiles at once.
  static constexpr int kPartColumns = kSubtileBytes / 32 / 8;
  static constexpr int kParts =
      Tile::kTileM <= 64 ? 0 : ((Tile::kTileM / 8 + 1) / 2 + kPartColumns - 1) / kPartColumns;
  static constexpr int kBarriersBytes = (4 * kMaxStages + 1 + kParts) * 8;
  static constexpr int kScaleCodeBytes = Tile::Kind::kScaleCodeBytes;
  static constexpr int kEndBytes = kSubtilesBytes + kScaleCodeBytes + kBarriersBytes;

  static constexpr int kWeightStages = Tile::Kind::weight_stages(Tile::kTileM, Tile::kTileN);
  static constexpr int kBytesForX = kWgmmaSmemBytes - kLutBytes - kEndBytes -
                                    kWeightStages * (kWeightStageBytes + kScaleStageBytes);
  static constexpr int kXStages =
      kBytesForX / kXStageBytes < kMaxStages ? kBytesForX / kXStageBytes : kMaxStages;
  static_assert(kXStages >= 3);

  static constexpr int kX = kLutBytes;
  static constexpr int kWeight = kX + kXStages * kXStageBytes;
  static constexpr int kScales = kWeight + kWeightStages * kWeightStageBytes;
  static constexpr int kSubtiles = kScales + kWeightStages * kScaleStageBytes;
  static constexpr int kScaleCode = kSubtiles + kSubtilesBytes;
  static constexpr int kBarriers = kScaleCode + kScaleCodeBytes;
  static constexpr int kBytes = kBarriers + kBarriersBytes;
  static_assert(kBytes <= kWgmmaSmemBytes);
  // Partial sums of a cluster, in shares that are whole columns of 8.
  static_assert((kXStageBytes / 1024 + kMaxClusterSize - 1) * Tile::kConsumers * 16 <= kSubtiles);
  static_assert(kXStageBytes % 1024 == 0 && kWeightStageBytes % 512 == 0);
};

}  // namespace nf4::cuda
