// What lora_product_persistent gets. No device code.
#pragma once

#include "cuda/lora/args.hpp"
#include "cuda/runtime/tensor_map.hpp"

namespace nf4::cuda {

struct LoraPersistentArgs {
  LoraProductArgs product;  // its rank_chunks and cluster_log2 are not used
  TensorMap x_map;          // boxes of a step of a tile's rows
  TensorMap in_map;         // of a step's columns and 16 ranks; in fp32 of half of the columns,
                            // but for the gradient
  int tiles;                // of x
};

constexpr int kPersistentWarps = kLoraProductThreads / 32;
constexpr int kPersistentRanks = 16;
constexpr int kPersistentStep = 64;  // columns of a warp at a time
constexpr int kPersistentTileM[] = {32, 64};

// Shared memory: for each warp a pipeline of steps; then the sums of each warp, and mbarriers.
struct LoraSmem {
  int stages;  // of a warp
  int x_bytes;
  int stage_bytes;
  int sums;  // offsets
  int barriers;
  int bytes;
};

constexpr LoraSmem lora_smem(int tile_m, bool in_is_fp32) {
  const int stages = tile_m == 32 ? 3 : 2, x_bytes = tile_m * kPersistentStep * 2;
  const int stage_bytes = x_bytes + kPersistentRanks * kPersistentStep * (in_is_fp32 ? 4 : 2);
  const int sums = kPersistentWarps * stages * stage_bytes;
  const int barriers = sums + kPersistentWarps * tile_m * kPersistentRanks * 4;
  return {stages, x_bytes, stage_bytes, sums, barriers, barriers + kPersistentWarps * stages * 8};
}

}  // namespace nf4::cuda
